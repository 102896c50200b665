"""Steps, ranks, accumulation, resuming: which sample is where."""

import pickle
from itertools import islice

import numpy as np
import pytest
import torch

from src.data.common.sampling import EvalSampler, StepSampler, accumulation, hash_uniform, permutation
from src.errors import UserError


def _equal(a: dict, b: dict) -> bool:
    return all(torch.equal(a[k], b[k]) if torch.is_tensor(a[k]) else a[k] == b[k] for k in a)


def test_step_takes_its_samples_over_ranks_and_micro_batches():
    world, micro, size = 2, 3, 12
    for step in (0, 5):
        seen = {}
        for rank in range(world):
            draws = islice(StepSampler(size, micro, rank, world, lambda s=step: s), size // (micro * world))
            for m, draw in enumerate(draws):
                assert draw.samples[0] == step * size + (m * world + rank) * micro
                seen[m, rank] = list(draw.samples)
        assert sorted(i for part in seen.values() for i in part) == list(range(step * size, (step + 1) * size))


def test_a_resumed_sampler_goes_on_exactly():
    whole = list(islice(StepSampler(8, 2), 40))
    resumed = list(islice(StepSampler(8, 2, start=lambda: 6), 16))
    assert whole[24:] == resumed


@pytest.mark.parametrize(
    ("batch", "micro", "world", "expected"),
    [(16, None, 1, 1), (16, None, 4, 1), (16, 4, 1, 4), (16, 4, 2, 2)],
)
def test_accumulation(batch, micro, world, expected):
    assert accumulation(batch, micro, world) == expected


def test_indivisible_batch_names_both_keys_and_a_value_that_works():
    with pytest.raises(UserError, match=r"data.batch_size=10 .*trainer.micro_batch_size=4.*data.batch_size=8$"):
        accumulation(10, 4, 1)
    with pytest.raises(UserError, match=r"data.batch_size=3 .*ranks \(2\).*nearest is data.batch_size=4$"):
        accumulation(3, None, 2)
    with pytest.raises(UserError, match="micro_batch_size=0"):
        accumulation(4, 0, 1)


@pytest.mark.parametrize("n", [1, 5, 6, 7])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_is_shared_without_duplicates(n, world):
    batches = [range(3 * i, 3 * i + 3) for i in range(n)]
    ranks = [list(EvalSampler(batches, rank, world)) for rank in range(world)]
    assert len({len(draws) for draws in ranks}) == 1
    counted = [i for draws in ranks for draw in draws if draw.counts for i in draw.samples]
    assert sorted(counted) == list(range(3 * n))


def test_random_numbers_are_uniform_and_addressed(seed):
    u = hash_uniform(seed, np.arange(200)[:, None], np.arange(500))
    assert abs(u.mean() - 0.5) < 0.01
    assert np.histogram(u, bins=10, range=(0, 1))[0].min() > 9_000
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 0.02
    assert hash_uniform(seed, 17, 3) == u[17, 3]
    assert hash_uniform(seed, 3, 17) != u[17, 3]


def test_permutation_differs_by_epoch_and_is_one():
    orders = [permutation(100, 7, epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert not np.array_equal(orders[0], orders[1])
    assert np.array_equal(orders[0], permutation(100, 7, 0))


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_of_a_resumed_run_gives_the_next_batches(corpus, prose, attach, workers):
    document = prose(3000)

    def make():
        return corpus([document], seq_len=16, batch_size=4, micro=2, num_workers=workers)

    whole = list(islice(make().train_dataloader(), 12))
    resumed = list(islice(attach(make(), step=4).train_dataloader(), 4))
    assert all(_equal(a, b) for a, b in zip(whole[8:], resumed, strict=True))
    other = list(islice(attach(make(), step=3).train_dataloader(), 1))
    assert not _equal(other[0], resumed[0])


def test_an_iterator_made_anew_goes_on_at_the_present_step(corpus, prose, attach):
    module = attach(corpus([prose(2000)], seq_len=16, batch_size=2))
    loader = module.train_dataloader()
    batches = list(islice(loader, 6))
    module.trainer.global_step = 5
    assert _equal(next(iter(loader)), batches[5])


def test_ranks_together_see_the_single_process_batch(corpus, prose, attach):
    document = prose(4000)
    single = next(iter(corpus([document], seq_len=16, batch_size=8, packing="concatenate").train_dataloader()))
    parts = []
    for rank in range(2):
        module = attach(corpus([document], seq_len=16, batch_size=8, packing="concatenate"), world=2, rank=rank)
        assert module.accumulation == 1
        parts.append(next(iter(module.train_dataloader())))
    assert torch.equal(single["input_ids"], torch.cat([part["input_ids"] for part in parts]))
    assert single["n_bytes"] == pytest.approx(sum(part["n_bytes"] for part in parts))


def test_loading_draws_nothing_from_the_global_generator(corpus, prose):
    module = corpus([prose(500)], seq_len=16, batch_size=2)
    before = torch.get_rng_state()
    next(iter(module.train_dataloader()))
    assert torch.equal(before, torch.get_rng_state())


def test_module_travels_to_a_worker_process_without_trainer_or_corpus(text, prose, attach):
    module = attach(text({"a.txt": prose(100_000)}, seq_len=16, batch_size=2))
    sent = pickle.dumps(module)
    assert len(sent) < 10_000
    assert _equal(pickle.loads(sent).batch("train", [0, 9]), module.batch("train", [0, 9]))


@pytest.mark.parametrize("option", ["seq_len", "batch_size", "val_batch_size", "num_workers"])
def test_impossible_sizes_are_named(corpus, option):
    with pytest.raises(UserError, match=f"data.{option}=-1"):
        corpus(["a"], **{option: -1})
