"""Documents to rows: borders, labels, bytes, every token once."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from src.errors import UserError

EOT = 256


def _segments(batch) -> list[tuple[list[int], list[int]]]:
    cuts = batch["cu_seqlens"].tolist()
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    return [(ids[a:b], labels[a:b]) for a, b in pairwise(cuts) if b > a]


def test_two_documents_by_hand(corpus):
    module = corpus(["ab", "", "c"], seq_len=16, batch_size=1)
    batch = module.batch("train", [0])
    a, b, c = b"abc"
    assert batch["input_ids"].tolist() == [[EOT, a, b, EOT, c]]
    assert batch["labels"].tolist() == [[a, b, EOT, c, EOT]]
    assert batch["cu_seqlens"].tolist() == [0, 3] + [5] * 14
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["n_bytes"] == 3.0
    assert batch["n_words"] == 2.0
    assert batch["n_pairs"] is None


def test_each_segment_is_its_document(corpus, prose, seed):
    rng = np.random.default_rng(seed)
    documents = [prose(int(n)) for n in rng.integers(1, 60, 40)]
    module = corpus(["t"], val=documents, seq_len=10_000)
    (batch,) = module.val_dataloader()
    segments = _segments(batch)
    assert len(segments) == len(documents)
    for document, (ids, labels) in zip(documents, segments, strict=True):
        assert ids == [EOT, *document.encode()]
        assert labels == [*document.encode(), EOT]


@pytest.mark.parametrize("packing", ["documents", "concatenate"])
def test_evaluation_reads_every_token_once_in_order(corpus, prose, seed, packing):
    rng = np.random.default_rng(seed)
    documents = [prose(int(n)) for n in rng.integers(1, 90, 30)]
    module = corpus(["t"], val=documents, seq_len=37, packing=packing, val_batch_size=int(rng.integers(1, 6)))
    batches = list(module.val_dataloader())
    expected = [token for document in documents for token in [EOT, *document.encode()]]
    assert torch.cat([b["input_ids"].flatten() for b in batches]).tolist() == expected
    assert torch.cat([b["labels"].flatten() for b in batches]).tolist() == [*expected[1:], EOT]
    total = sum(len(document.encode()) for document in documents)
    assert sum(b["n_bytes"] for b in batches) == pytest.approx(total, rel=1e-9)
    assert sum(b["n_words"] for b in batches) == pytest.approx(sum(len(d.split()) for d in documents), rel=1e-9)
    for batch in batches:
        if packing == "documents":
            assert batch["input_ids"].shape[0] == 1
            assert len(batch["cu_seqlens"]) % 16 == 0
            assert batch["cu_seqlens"][-1] == batch["input_ids"].numel()
            assert max(len(ids) for ids, _ in _segments(batch)) <= 37
        else:
            assert batch["cu_seqlens"] is None
            assert batch["input_ids"].shape[1] in (37, len(expected) % 37)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_evaluate_the_split_together(corpus, prose, attach, world):
    module = corpus(["t"], val=[prose(700)], seq_len=16, batch_size=6, val_batch_size=4)
    batches = [b for rank in range(world) for b in attach(module, world, rank).val_dataloader()]
    labels = torch.cat([b["labels"].flatten() for b in batches])
    assert int((labels != -100).sum()) == len(module._streams["val"])
    assert sum(b["n_bytes"] for b in batches) == pytest.approx(module._streams["val"].n_bytes)


def test_training_rows_are_an_order_of_all_rows_each_epoch(corpus, prose):
    module = corpus([prose(800)], seq_len=16, batch_size=4, packing="concatenate", seed=3)
    n = module.n_rows("train")
    epochs = [[tuple(module.batch("train", [e * n + i])["input_ids"][0].tolist()) for i in range(n)] for e in (0, 1)]
    tokens = module._streams["train"].tokens[: 16 * n].reshape(n, 16)
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(tuple(row.tolist()) for row in tokens)
    assert epochs[0] != epochs[1]
    other = corpus(module.splits["train"], seq_len=16, packing="concatenate", seed=4)
    assert [tuple(other.batch("train", [i])["input_ids"][0].tolist()) for i in range(n)] != epochs[0]


def test_fewer_rows_than_the_batch_go_on_into_the_next_epoch(corpus, prose):
    module = corpus([prose(40)], seq_len=16, batch_size=8)
    batch = next(iter(module.train_dataloader()))
    assert batch["input_ids"].shape == (1, 8 * 16)


def test_a_corpus_below_one_row_is_one_shorter_row(corpus):
    module = corpus(["short"], seq_len=512, batch_size=2)
    batch = next(iter(module.train_dataloader()))
    assert batch["input_ids"].shape == (1, 12)
    assert _segments(batch) == [([EOT, *b"short"], [*b"short", EOT])] * 2


def test_bytes_of_a_cut_document_are_in_proportion_to_its_labels(corpus):
    module = corpus(["é" * 7], seq_len=5, packing="concatenate")  # 14 bytes, 15 labels
    stream = module._streams["train"]
    first, second = (stream.share(stream.byte_starts, place) for place in (5, 10))
    assert first == pytest.approx(14 / 3)
    assert second - first == pytest.approx(14 / 3)


def test_number_of_cu_seqlens_shapes_is_small(corpus, prose, seed):
    rng = np.random.default_rng(seed)
    module = corpus([prose(int(n)) for n in rng.integers(1, 40, 300)], seq_len=64, batch_size=8)
    shapes = {len(module.batch("train", range(8 * s, 8 * s + 8))["cu_seqlens"]) for s in range(50)}
    assert all(n % 16 == 0 for n in shapes)
    assert len(shapes) <= 4


@pytest.mark.parametrize("packing", ["documents", "concatenate"])
def test_validation_during_training_is_the_same_rows_whatever_the_batch(text, prose, packing):
    """Evenly spread over the split, so that runs of different batch sizes can be compared."""
    seen = {}
    for batch in (1, 3, 8):
        module = text({"a.txt": prose(20_000)} if not seen else {}, seq_len=16, val_rows=10, val_batch_size=batch,
                      packing=packing)  # fmt: skip
        seen[batch] = [i for b in module.val_dataloader() for i in b["input_ids"].flatten().tolist()]
    assert len(seen[1]) == 10 * 16
    assert seen[1] == seen[3] == seen[8]
    whole = text({}, seq_len=16, val_rows=None, packing=packing)
    every = [i for b in whole.val_dataloader() for i in b["input_ids"].flatten().tolist()]
    n = whole.n_rows("val")
    assert seen[1] == [t for i in range(10) for t in every[i * n // 10 * 16 :][:16]]
    with pytest.raises(UserError, match=r"data.val_rows=0: must be at least 1"):
        text({}, val_rows=0)
