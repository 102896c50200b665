"""The partition, against counting by hand."""

import pytest
import torch

from src.ops import fenwick


def buckets(t: int) -> dict[int, list[int]]:
    """Level -> tokens, by clearing the set bits of ``t`` from the lowest."""
    found, end = {0: [t]}, t
    while end:
        low = end & -end
        found[low.bit_length()] = list(range(end - low, end))
        end -= low
    return found


@pytest.mark.parametrize("t", [*range(70), 127, 128, 777, 1023, 1024])
def test_level_is_the_bucket_that_holds_the_token(t: int) -> None:
    expected = {s: level for level, tokens in buckets(t).items() for s in tokens}
    assert {s: fenwick.level(t, s) for s in range(t + 1)} == expected
    assert fenwick.live_levels(t) == sorted(buckets(t))


@pytest.mark.parametrize("t", [1, 2, 3, 4, 12, 64, 96, 777, 1024])
def test_a_step_merges_the_low_levels_into_an_empty_one(t: int) -> None:
    before, after = buckets(t - 1), buckets(t)
    top = fenwick.merged_levels(t)
    assert top not in before
    merged = sorted(s for level, tokens in before.items() if level < top for s in tokens)
    assert merged == after[top]
    assert {level: tokens for level, tokens in before.items() if level > top} == {
        level: tokens for level, tokens in after.items() if level > top
    }


def test_num_levels() -> None:
    assert [fenwick.num_levels(n) for n in (1, 2, 3, 4, 5, 16384, 16385, 131072)] == [
        1,
        2,
        3,
        3,
        4,
        15,
        16,
        18,
    ]
    for n in range(1, 300):
        assert fenwick.num_levels(n) == 1 + max(fenwick.level(t, s) for t in (n - 1,) for s in (0, t))
    with pytest.raises(ValueError, match="seq_len >= 1"):
        fenwick.num_levels(0)


@pytest.mark.parametrize("size", [1, 2, 5, 64, 100])
def test_level_matrix(size: int) -> None:
    matrix = fenwick.level_matrix(size)
    for t in range(size):
        for s in range(t + 1):
            assert matrix[t, s] == fenwick.level(t, s)
    assert (matrix.triu(1) == 0).all()


def test_levels_of_chunks_are_the_partition_of_chunk_indices() -> None:
    C = fenwick.CHUNK_SIZE
    t = torch.randint(0, 1 << 17, ()).item()
    for s in torch.randint(0, t + 1, (200,)).tolist():
        b, a = t // C, s // C
        level = fenwick.level(t, s)
        if a == b:
            assert level < fenwick.CHUNK_LEVELS
        else:
            assert level == fenwick.CHUNK_LEVELS - 1 + fenwick.level(b, a)
            j = level - fenwick.CHUNK_LEVELS
            assert b >> j & 1
            assert a >> j == (b >> j) - 1
            assert (a >> j) % 2 == 0


def test_levels_refuse_the_future() -> None:
    with pytest.raises(ValueError, match="0 <= s <= t"):
        fenwick.level(3, 4)
    with pytest.raises(ValueError, match="t >= 1"):
        fenwick.merged_levels(0)
