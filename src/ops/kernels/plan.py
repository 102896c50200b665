"""Which block sizes a call gets, and where its tiles are. No autotuning: one choice for each kind of shape."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from src.ops.fenwick import CHUNK_BITS, CHUNK_SIZE


@dataclass(frozen=True)
class Plan:
    """Block sizes of one kind of call.

    pair: whether a tile is two chunks (tree and states half as large) or one.
    key_block, value_block: ``BK``, the head dim K padded to a power of two, and ``BV``, values at a time.
    precision: of fp32 products.
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
    def state_warps(self) -> int:
        """Of a program that has a state in registers."""
        return 8 if self.key_block > 128 else 4


def plan_for(dtype: torch.dtype, K: int, V: int) -> Plan:
    BK, BV = triton.next_power_of_2(K), triton.next_power_of_2(V)
    if dtype == torch.float32:
        # Products without tensor cores: small blocks, or shared memory runs out.
        return Plan(0, BK, min(BV, 64 if BK <= 64 else 32), "ieee")
    return Plan(int(BK <= 128), BK, min(BV, 64), "tf32")


@dataclass(frozen=True)
class Layout:
    """Tiles of one call. ``documents [3, N]`` and ``first [N + 1]`` as in ``tiles.py``, None without packing."""

    documents: Tensor | None
    first: Tensor | None
    count: int
    rows: int
    seq_len: int
    tiles_a_row: int
    tiles: int
    tree_levels: int

    @property
    def tokens(self) -> int:
        return self.rows * self.seq_len


def layout_for(x: Tensor, documents: Tensor | None, max_chunk: int, plan: Plan) -> Layout:
    """Of ``x [B, T, …]``; ``max_chunk`` bounds the documents' first chunks."""
    rows, seq_len = x.shape[:2]
    tile, bits = plan.tile, plan.tile_bits
    longest = -(-seq_len // tile)
    dense = Layout(None, None, rows, rows, seq_len, longest, rows * longest, longest.bit_length())
    if documents is None:
        return dense
    N = documents.shape[1]
    start, length, chunk0 = documents
    tile0 = chunk0 >> plan.pair
    counts = ((chunk0 * CHUNK_SIZE + length + tile - 1) >> bits) - tile0
    counts = torch.where(length > 0, counts, 0)
    first = torch.zeros(N + 1, dtype=torch.int32, device=x.device)
    torch.cumsum(counts, 0, out=first[1:], dtype=torch.int32)
    # Each document may cut one tile at its end, and begin in the middle of one.
    offset = CHUNK_SIZE * plan.pair if max_chunk else 0
    tiles = (seq_len * rows + N * offset) // tile + N
    most = (max_chunk >> plan.pair) + (seq_len + offset) // tile + 1
    return replace(
        dense,
        documents=documents.contiguous(),
        first=first,
        count=N,
        tiles=tiles,
        tree_levels=most.bit_length(),
    )


def heads_a_block(heads: int, units: int) -> int:
    """Heads that one program takes in turn, of the ``heads`` of a group, where there are ``units`` blocks of tokens.

    More heads share more work; fewer fill the card: the most that leaves four programs for each of 132
    multiprocessors.
    """
    for count in range(heads, 0, -1):
        if heads % count == 0 and units * (heads // count) >= 528:
            return count
    return 1
