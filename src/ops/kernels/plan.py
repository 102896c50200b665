"""Which block sizes a call gets, and where its tiles are. No autotuning: one choice for each kind of shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from src.ops.fenwick import CHUNK_BITS, CHUNK_SIZE


@dataclass(frozen=True)
class Plan:
    """Block sizes of one kind of call.

    pair: whether a tile is two chunks (tree and states half as large) or one.
    key_block, value_block: ``BK``, the head dim K padded to a power of two, and ``BV``, values at a time.
    precision: of fp32 products, by the compiler's name; ``tf32`` where operands are bf16.
    """

    pair: int
    key_block: int
    value_block: int
    precision: str

    @property
    def tile_bits(self) -> int:
        return CHUNK_BITS + self.pair

    @property
    def tile(self) -> int:
        return CHUNK_SIZE << self.pair

    @property
    def chunk_warps(self) -> int:
        """Of a program whose products have 64 rows: they cannot be shared among more without being repeated."""
        return 8 if self.key_block > 128 else 4

    @property
    def registers(self) -> int | None:
        """A bound for ``output``: three programs a multiprocessor instead of two (chosen for K = 128, V = 64)."""
        return 168 if self.pair else None

    @property
    def stages(self) -> int:
        """Loads under way in ``output``, ``rows`` and ``columns_back``, as many as shared memory takes."""
        if self.key_block > 128 and self.precision != "tf32":
            return 1
        return 3 if self.pair else 2

    @property
    def row_warps(self) -> int:
        """Of ``rows``: two sums of 64 x BK are in registers, too many for four warps where a state is large."""
        return 4 if self.pair else 8

    @property
    def state_warps(self) -> int:
        """Of a program that has a state in registers."""
        return 8 if self.key_block > 128 else 4


def plan_for(dtype: torch.dtype, K: int, V: int) -> Plan:
    BK, BV = triton.next_power_of_2(K), triton.next_power_of_2(V)
    # Never fewer columns than 128 bytes: tensor cores read so many of a row of an operand, and Triton 3.6 reserves no
    # shared memory for what they read behind a narrower one (docs/kernels.md).
    if dtype == torch.float32:
        # A product as three of tf32: as exact as fp32's own, on tensor cores. Operands are twice as large.
        return Plan(0, max(BK, 32), min(max(BV, 32), 64 if BK <= 64 else 32), "tf32x3")
    return Plan(int(BK <= 128), max(BK, 64), 64, "tf32")


@dataclass(frozen=True)
class Layout:
    """Tiles of one call: at most so many, in trees of at most so many levels, over ``count`` documents or rows."""

    count: int
    tokens: int
    tiles_a_row: int
    tiles: int
    tree_levels: int


def layout_for(rows: int, seq_len: int, documents: int | None, max_chunk: int, plan: Plan) -> Layout:
    """``max_chunk`` bounds the documents' first chunks. Nothing depends on where documents end."""
    tile, tokens = plan.tile, rows * seq_len
    longest = -(-seq_len // tile)
    if documents is None:
        return Layout(rows, tokens, longest, rows * longest, longest.bit_length())
    # Each document may cut one tile at its end, and begin in the middle of one.
    offset = CHUNK_SIZE * plan.pair if max_chunk else 0
    tiles = (tokens + documents * offset) // tile + documents
    most = (max_chunk >> plan.pair) + (seq_len + offset) // tile + 1
    return Layout(documents, tokens, longest, tiles, most.bit_length())


def first_tiles(documents: Tensor, plan: Plan) -> Tensor:
    """``[N + 1]`` int32: the first tile of each document, and how many there are."""
    _, length, chunk0 = documents
    end = chunk0 * CHUNK_SIZE + length
    counts = ((end + plan.tile - 1) >> plan.tile_bits) - (chunk0 >> plan.pair)
    first = torch.zeros(len(length) + 1, dtype=torch.int32, device=documents.device)
    torch.cumsum(torch.where(length > 0, counts, 0), 0, out=first[1:], dtype=torch.int32)
    return first


@dataclass(frozen=True)
class Work:
    """How heads are dealt out. A program takes some heads of a q/k group in turn (a *block*); a *pass* of the backward
    pass takes ``blocks_a_pass`` blocks, so that scratch stays in bounds."""

    heads_a_block: int
    blocks_a_pass: int


PROGRAMS = 256
"""About two for each of the 132 multiprocessors of an H100 or H200: fewest repeated products."""

FORWARD = 4
"""So many times as many in the forward pass, which repeats less and gains from more that run at once."""


def work_for(heads: int, groups: int, units: int, passes: int, programs: int) -> Work:
    """Of ``groups`` q/k groups, each for ``heads / groups`` heads; ``units`` tiles of tokens.

    More heads a block share more work, fewer fill the card: the most heads that leave enough ``programs`` a pass, in
    at least so many ``passes``. A pass is some whole groups, or an equal part of one.
    """
    per_group = heads // groups
    passes = min(passes, heads)
    while groups % passes and (passes % groups or per_group % (passes // groups)):
        passes += 1
    parts = max(1, passes // groups)  # of a group, at least
    choices = [n for n in range(parts, per_group + 1, parts) if per_group % n == 0]
    blocks = next((n for n in choices if units * groups * n >= programs * passes), choices[-1])
    return Work(per_group // blocks, groups * blocks // passes)
