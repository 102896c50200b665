"""Rows that continue each other: B lanes, each reads its own part of the split from step to step.

An epoch lays all documents end to end in an order drawn from (seed, epoch), cuts that into B equal parts, a lane
each, and gives row r of every lane at its step r. So a document that is longer than a row is read on in the next
row of its lane, and a model that keeps its state from step to step has seen all of it: truncated back-propagation
through time. Everything is a pure function of a few integers, as with rows drawn at random.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from src.data.common.packing import Stream
from src.data.common.sampling import permutation


class Carry(NamedTuple):
    """How the N documents of a packed batch (padding included) hang together with the lanes' states before it."""

    lane: Tensor
    """int64 [N]: the lane whose state a document continues; 0 where it continues none."""
    fresh: Tensor
    """int64: the documents that continue none."""
    last: Tensor
    """int64 [lanes]: the document with which each lane ends, whose state is the lane's next one."""


def lane_spans(
    stream: Stream, *, lane: int, lanes: int, row: int, seq_len: int, seed: int, epoch: int
) -> tuple[list[tuple[int, int]], bool]:
    """Row `row` of a lane as spans [begin, end) of the stream, one a document; whether the first goes on from before.

    There are `lane_rows(stream, lanes, seq_len)` rows a lane. The first row of an epoch continues nothing.
    """
    order, ends = _layout(stream, seed, epoch)
    begin = (lane * lane_rows(stream, lanes, seq_len) + row) * seq_len
    end = begin + seq_len
    spans = []
    first = j = int(np.searchsorted(ends, begin, side="right"))
    while begin < end:
        document = int(order[j])
        start = int(stream.starts[document + 1]) - int(ends[j])  # place in the stream minus place in the layout
        stop = min(end, int(ends[j]))
        spans.append((begin + start, stop + start))
        begin, j = stop, j + 1
    continues = row > 0 and spans[0][0] != int(stream.starts[order[first]])
    return spans, continues


def lane_rows(stream: Stream, lanes: int, seq_len: int) -> int:
    """Full rows of each lane in an epoch."""
    return len(stream) // seq_len // lanes


def carry_of(counts: list[int], continues: list[bool], padded: int) -> Carry:
    """Of a batch with `counts[b]` documents in lane b, whose first one continues or not, and `padded` in all."""
    firsts = np.cumsum([0, *counts[:-1]])
    lane, fresh = np.zeros(padded, dtype=np.int64), np.ones(padded, dtype=bool)
    for b, first in enumerate(firsts):
        if continues[b]:
            lane[first], fresh[first] = b, False
    last = firsts + np.array(counts) - 1
    return Carry(torch.from_numpy(lane), torch.from_numpy(fresh.nonzero()[0]), torch.from_numpy(last))


@lru_cache(maxsize=2)  # an epoch and the next
def _layout(stream: Stream, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """The documents in the epoch's order, and where each ends when they are laid end to end."""
    lengths = np.diff(stream.starts)
    order = permutation(len(lengths), seed, epoch)
    return order, np.cumsum(lengths[order])
