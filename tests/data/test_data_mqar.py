"""data=mqar against the published protocol."""

import time

import numpy as np
import pytest
import torch

from src.data.mqar import MQAR, PUBLISHED_TEST
from src.errors import UserError


def _module(seed: int = 0, micro: int | None = None, **options) -> MQAR:
    return MQAR(MQAR.Config(**({"name": "mqar", "batch_size": 64} | options)), seed=seed, micro_batch_size=micro)


@pytest.mark.parametrize(("t", "n"), [(64, 4), (64, 16), (256, 64), (33, 5), (8, 2), (4, 1)])
def test_layout(seed, t, n):
    module = _module(seed, seq_len=t, n_pairs=n, batch_size=50)
    batch = module.batch("train", range(50))
    ids, labels = batch["input_ids"], batch["labels"]
    assert ids.shape == labels.shape == (50, t)
    assert batch["n_pairs"] == n
    for row, answer in zip(ids.tolist(), labels.tolist(), strict=True):
        keys, values = row[0 : 2 * n : 2], row[1 : 2 * n : 2]
        assert len(set(keys)) == len(set(values)) == n
        assert all(1 <= key < 4096 for key in keys)
        assert all(4096 <= value < 8192 for value in values)
        pairs = dict(zip(keys, values, strict=True))
        places = [p for p in range(t) if answer[p] != -100]
        assert len(places) == n
        assert all(p >= 2 * n and (p - 2 * n) % 2 == 0 for p in places)
        assert sorted(row[p] for p in places) == sorted(keys)  # each key is asked once
        assert all(answer[p] == pairs[row[p]] for p in places)


def test_keys_and_values_are_uniform(seed):
    module = _module(seed, seq_len=64, n_pairs=8, vocab_size=64, batch_size=4000)
    ids = module.batch("train", range(4000))["input_ids"].numpy()
    for tokens, low, high in ((ids[:, 0:16:2], 1, 32), (ids[:, 1:16:2], 32, 64)):
        counts = np.bincount(tokens.ravel(), minlength=64)[low:high]
        assert counts.sum() == 32_000
        expected = 32_000 / (high - low)
        assert np.abs(counts - expected).max() < 6 * expected**0.5
    for place in (0, 15):  # no place prefers a token
        counts = np.bincount(ids[:, place])[-31:]
        assert counts.max() < 4000 / 31 + 6 * (4000 / 31) ** 0.5


def test_slots_follow_the_power_law(seed):
    """The first draw's law is p itself; key 1 is drawn first."""
    module = _module(seed, seq_len=44, n_pairs=2, batch_size=20_000)
    batch = module.batch("train", range(20_000))
    ids, labels = batch["input_ids"].numpy(), batch["labels"].numpy()
    asked = (ids == ids[:, :1]) & (labels != -100)
    slots = (asked.argmax(axis=1) - 4) // 2
    p = np.arange(1, 21) ** (0.01 - 1)
    p /= p.sum()
    counts = np.bincount(slots, minlength=20)
    assert np.abs(counts - 20_000 * p).max() < 6 * (20_000 * p.max()) ** 0.5
    # The second key's law, without replacement: sum over the first draw.
    second = (((ids == ids[:, 2:3]) & (labels != -100)).argmax(axis=1) - 4) // 2
    q = np.array([sum(p[i] * p[j] / (1 - p[i]) for i in range(20) if i != j) for j in range(20)])
    assert np.abs(np.bincount(second, minlength=20) - 20_000 * q).max() < 6 * (20_000 * q.max()) ** 0.5


@pytest.mark.parametrize("fill", ["random", "zeros"])
def test_fill(seed, fill):
    module = _module(seed, seq_len=128, n_pairs=4, fill=fill)
    batch = module.batch("train", range(64))
    ids, labels = batch["input_ids"], batch["labels"]
    unused = ids[:, 8:][labels[:, 8:] == -100]
    assert (unused == 0).all() if fill == "zeros" else len(unused.unique()) > 4000


def test_an_example_depends_on_seed_and_number_only(seed):
    module = _module(seed)
    whole = module.batch("train", range(64))
    parts = [module.batch("train", range(i, i + 16)) for i in (48, 0)]
    assert torch.equal(parts[0]["input_ids"], whole["input_ids"][48:])
    assert torch.equal(parts[1]["labels"], whole["labels"][:16])
    assert not torch.equal(_module(seed + 1).batch("train", range(64))["input_ids"], whole["input_ids"])
    held_out = [module.batch(split, range(64))["input_ids"] for split in ("val", "test")]
    rows = {tuple(row.tolist()) for ids in (whole["input_ids"], *held_out) for row in ids}
    assert len(rows) == 192


@pytest.mark.parametrize("fresh", [False, True])
def test_epochs_repeat_unless_fresh(fresh):
    module = _module(examples=128, fresh=fresh)
    first, again = module.batch("train", range(64)), module.batch("train", range(128, 192))
    assert torch.equal(first["input_ids"], again["input_ids"]) is not fresh


def test_mixture_keeps_its_order_and_one_kind_a_batch():
    module = _module(micro=32, mixture=["64:4:150", "32:8:64", "16:2:10"])
    assert module.steps_per_epoch == 3 + 1 + 1
    assert module.accumulation == 2
    shapes, batches = [], iter(module.train_dataloader())
    for _ in range(20):
        batch = next(batches)
        shapes.append((*batch["input_ids"].shape, batch["n_pairs"]))
    epoch = [(32, 64, 4)] * 6 + [(32, 32, 8)] * 2 + [(32, 16, 2)] * 2
    assert shapes == epoch * 2


def test_a_kind_of_an_epoch_is_all_its_examples():
    module = _module(mixture=["16:2:128", "8:1:64"])
    rows = torch.cat([module.batch("train", range(64 * s, 64 * s + 64))["input_ids"] for s in range(2)])
    assert torch.equal(rows, module.draw(module.kinds["train"][0], np.arange(128), 0, 0)[0])


def test_evaluation_kinds_follow_one_another():
    module = _module(val=["64:4:100", "16:2:70"], test=["128:8:5"], val_batch_size=64)
    shapes = [(*b["input_ids"].shape, b["n_pairs"]) for b in module.val_dataloader()]
    assert shapes == [(64, 64, 4), (36, 64, 4), (64, 16, 2), (6, 16, 2)]
    assert [tuple(b["labels"].shape) for b in module.test_dataloader()] == [(5, 128)]
    assert module.max_seq_len == max(kind.seq_len for kind in module.kinds["train"]) < 128  # trained, not only measured
    assert module.tokenizer is None


def test_published_presets():
    module = _module(mixture=["published"], test=["published"])
    assert [(k.seq_len, k.n_pairs) for k in module.kinds["train"]] == [
        (64, 4), (128, 8), (256, 16), (256, 32), (256, 64)
    ]  # fmt: skip
    assert [k.examples for k in module.kinds["train"]] == [100_000] + [20_000] * 4
    assert [str(k) for k in module.kinds["test"]] == PUBLISHED_TEST
    assert module.max_seq_len == 256  # trained, not only measured
    assert module.describe()["train"].startswith("64:4:100000, ")


def test_fingerprint_knows_what_decides_the_examples():
    prints = {_module(**o).fingerprint for o in ({}, {"n_pairs": 8}, {"fill": "zeros"}, {"seed": 1})}
    assert len(prints) == 4
    assert _module(val_batch_size=3).fingerprint in prints


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 64, "n_pairs": 17}, "mqar 64:17:100000: 17 pairs and their queries need at least 68 places"),
        ({"seq_len": 64, "n_pairs": 16, "vocab_size": 32}, "need data.vocab_size of at least 34, not 32"),
        ({"n_pairs": 0}, "at least one pair"),
        ({"examples": 0}, "at least one pair and one example"),
        ({"mixture": ["64:4"]}, "data.mixture=64:4: expected seq_len:n_pairs:examples"),
        ({"test": ["publishd"]}, "data.test=publishd: .*or: published"),
    ],
)
def test_impossible_kinds(options, message):
    with pytest.raises(UserError, match=message):
        _module(**options)


def test_a_batch_takes_milliseconds():
    module = _module(seq_len=256, n_pairs=64, batch_size=256)
    module.batch("train", range(256))
    times = []
    for step in range(1, 6):
        start = time.perf_counter()
        module.batch("train", range(256 * step, 256 * step + 256))
        times.append(time.perf_counter() - start)
    print(f"256 x 256 with 64 pairs: {1e3 * min(times):.1f} ms")
    assert min(times) < 0.05
