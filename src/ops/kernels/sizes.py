"""Everything about a call that follows from shapes: computed once for each kind of call."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
from torch import Tensor

from src.ops.fenwick import CHUNK_BITS
from src.ops.kernels.plan import FORWARD, PROGRAMS, layout_for, plan_for, work_for

SWEEP_BLOCK = 1024
"""Elements of a state that one program of the passes over tiles takes."""

SCRATCH = 2.0
"""The backward pass takes heads in several passes where its scratch for all would be more than so many times v …"""
SCRATCH_BYTES = 256 << 20
"""… and more than this: short sequences are not cut into passes."""


class Sizes:
    """``B`` rows of ``T`` tokens, ``N`` documents (None: the rows), ``L`` level scales (None: the linear form).

    ``more``: whether anything outside a token's tile is needed. ``given``: what all kernels are given.
    """

    def __init__(
        self, dtype: torch.dtype, B: int, T: int, G: int, K: int, H: int, V: int, L: int | None,
        N: int | None, max_chunk: int, more: bool, backward: bool,
    ):  # fmt: skip
        self.G, self.K, self.H, self.V, self.L = G, K, H, V, L or 1
        self.dtype, self.loglinear = dtype, L is not None
        self.plan = plan = plan_for(dtype, K, V)
        self.layout = at = layout_for(B, T, N, max_chunk, plan)
        self.J = at.tree_levels + 1
        self.value_blocks = -(-V // plan.value_block)
        self.more = more or plan.tile < T
        # Levels of all documents' trees: each needs J of them, or one more than it has tiles.
        by_tiles = max_chunk == 0 and at.tiles + at.count < at.count * self.J
        self.entries = at.tiles + at.count if by_tiles else at.count * self.J
        passes = 1
        if backward and self.more:
            # Bytes a token and head: columns and dcolumns, gates and sums; nodes and E; the tree's stack.
            a_token = 4 * (2 * self.L + 10) + 2 * K * V * dtype.itemsize // plan.tile
            if self.loglinear:
                a_token += 4 * K * V * self.entries // at.tokens
            of_v = at.tokens * H * V * dtype.itemsize
            passes = math.ceil(a_token * at.tokens * H / max(SCRATCH_BYTES, SCRATCH * of_v))
        work = work_for(H, G, at.tiles, passes, PROGRAMS if backward else FORWARD * PROGRAMS)
        per_group = H // G
        self.block_heads, self.blocks_a_pass = work.heads_a_block, work.blocks_a_pass
        self.blocks = H // self.block_heads
        self.partials = min(per_group // self.block_heads, self.blocks_a_pass)
        size = K * V
        block = min(SWEEP_BLOCK, size & -size)
        self.given = {
            "PACKED": N is not None,
            "N": at.count, "T": T, "tiles_a_row": at.tiles_a_row, "tiles": at.tiles, "tokens": at.tokens,
            "H": H, "per_group": per_group, "heads_a_block": self.block_heads, "L": self.L, "J": self.J,
            "parts": self.value_blocks, "partials": self.partials,
            "width": triton.next_power_of_2(at.tiles_a_row),
            "K": K, "V": V, "BK": plan.key_block, "BV": plan.value_block,
            "BL": max(2, triton.next_power_of_2(self.L)), "SIZE": size, "BLOCK": block,
            "P": plan.pair, "BITS": CHUNK_BITS, "R": plan.tile,
            "slices": size // block, "SLICES": triton.next_power_of_2(size // block), "WIDTH": 32,
            "LOGLINEAR": self.loglinear, "PRECISION": plan.precision,
            "entries": self.entries, "ROOM": int(by_tiles),
            "LEAVES": self.more, "NODES": self.more, "MORE": self.more,
        }  # fmt: skip


@lru_cache(maxsize=256)
def _sizes(*key) -> Sizes:
    return Sizes(*key)


def sizes_of(
    k: Tensor, v: Tensor, scales: Tensor | None, documents: Tensor | None, max_chunk: int, *, more: bool, backward: bool
) -> Sizes:
    (B, T, G, K), (H, V) = k.shape, v.shape[2:]
    L = None if scales is None else scales.shape[-1]
    N = None if documents is None else documents.shape[1]
    return _sizes(v.dtype, B, T, G, K, H, V, L, N, max_chunk, more, backward)
