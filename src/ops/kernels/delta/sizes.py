"""Everything about a call of the delta rule that follows from shapes: computed once for each kind of call."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
from torch import Tensor

from src.ops.fenwick import CHUNK_BITS, CHUNK_SIZE
from src.ops.kernels.delta import chain
from src.ops.kernels.plan import Plan, layout_for

LOWEST = chain.LOWEST.value

SCRATCH = 16.0
"""Heads are taken in several passes where scratch for all would be more than so many times v …"""
SCRATCH_BYTES = 4 << 30
"""… and more than this."""


def plan_for(dtype: torch.dtype, K: int, V: int, stateful: bool) -> Plan:
    """A tile is a pair of chunks in bf16; with states a chunk, since states are handed over at the ends of chunks."""
    BK = triton.next_power_of_2(K)
    if dtype == torch.float32:
        return Plan(0, max(BK, 32), 32, "tf32x3")
    return Plan(int(not stateful), max(BK, 64), 64, "tf32")


class Sizes:
    """``B`` rows of ``T`` tokens, ``N`` documents (None: the rows), ``L`` level scales (None: the linear form).

    ``stateful``: whether states come in or go out. ``given``: what all kernels are given.
    """

    def __init__(
        self, dtype: torch.dtype, B: int, T: int, G: int, K: int, H: int, V: int, L: int | None,
        N: int | None, max_chunk: int, stateful: bool, roots: bool, backward: bool,
    ):  # fmt: skip
        self.K, self.H, self.V, self.L = K, H, V, L or 1
        self.dtype, self.loglinear = dtype, L is not None
        self.plan = plan = plan_for(dtype, K, V, stateful)
        self.layout = at = layout_for(B, T, N, max_chunk, plan)
        self.value_blocks = -(-V // plan.value_block)
        key_block = min(64 if dtype != torch.float32 else 32, plan.key_block)
        self.key_blocks = -(-K // key_block)
        self.more = stateful or plan.tile < T
        # Loads of a tile's M under way while the one before is used, if both fit into shared memory.
        blocks = (-(-K // 64)) ** 2 * 64 * 64 * dtype.itemsize
        self.chain_stages = 2 if 2 * blocks <= 150_000 else 1
        # Launches along the tree, lowest first: level (-1: the lowest ones), programs a row, and programs in all.
        self.steps = [(0, 1, at.count)]
        if self.loglinear:
            last = T >> plan.tile_bits if stateful else at.tiles_a_row - 1
            low, levels = LOWEST, at.tree_levels
            self.steps = [(-1, (last >> low) + 1, (at.tiles >> low) + 2 * at.count)] if levels else []
            self.steps += [
                (j, ((last >> j) + 1) >> 1, (at.tiles >> (j + 1)) + 2 * at.count) for j in range(low, levels)
            ]
            if N is None:
                self.steps = [(j, a_row, at.count * a_row) for j, a_row, _ in self.steps if last and a_row]
        self.slots = at.tiles
        if self.loglinear:
            self.slots = at.count * bits_below(at.tiles_a_row) if N is None else bits_below(at.tiles)
            if roots:
                self.slots = at.tiles * at.tree_levels
        per_token = self._bytes_a_token(backward) if self.more else 0
        of_v = at.tokens * H * V * dtype.itemsize
        passes = min(H, math.ceil(per_token * at.tokens * H / max(SCRATCH_BYTES, SCRATCH * of_v)) or 1)
        self.heads_a_pass = -(-H // passes)
        self.given = {
            "PACKED": N is not None,
            "N": at.count, "T": T, "tiles_a_row": at.tiles_a_row, "tiles": at.tiles, "tokens": at.tokens,
            "H": H, "per_group": H // G, "L": self.L, "slots": max(1, self.slots), "slices": self.key_blocks,
            "K": K, "V": V, "BK": plan.key_block, "BV": plan.value_block, "KB": key_block,
            "CB": min(64, plan.key_block),
            "BL": max(2, triton.next_power_of_2(self.L)), "SLICES": triton.next_power_of_2(self.key_blocks),
            "P": plan.pair, "BITS": CHUNK_BITS, "R": plan.tile,
            "LOGLINEAR": self.loglinear, "MORE": self.more, "PRECISION": plan.precision,
        }  # fmt: skip

    def at_most(self, registers: int) -> int | None:
        """A bound for a thread's registers, so that more programs run at a time: of bf16 kernels, where it was
        measured."""
        return None if self.dtype == torch.float32 else registers

    @property
    def state_registers(self) -> int | None:
        """Registers of programs that have a state's block of columns in them."""
        return self.at_most(128 if self.plan.state_warps == 8 else 168)

    def _bytes_a_token(self, backward: bool) -> float:
        """Scratch of one head."""
        K, V, tile = self.K, self.V, self.plan.tile
        vectors = K * (2 + (3 + self.plan.pair if backward else 0))
        vectors += CHUNK_SIZE * (2 if backward else 1)
        squares = self.plan.pair * CHUNK_SIZE // 2 * (4 if backward else 1)
        inverse = 4 * CHUNK_SIZE if backward else 0
        states = (K * V * (2 if backward else 1) + K * K) / tile
        seen = K * V * self.slots / self.layout.tokens * (2 if backward else 1)
        gates = 4 * (2 * self.L + 8 + self.value_blocks)
        return self.dtype.itemsize * (vectors + squares + states + seen) + inverse + gates


def bits_below(x: int) -> int:
    """Set bits of all numbers below ``x``, summed."""
    return sum((x >> (j + 1) << j) + max((x & ((2 << j) - 1)) - (1 << j), 0) for j in range(x.bit_length()))


def tree_tables(documents: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Of packed documents: ``children_first [J + 1, N + 1]``, the right children before each document's first at each
    level, and windows, and ``seen_first [N]``, the slots before its first; see ``chain.py``."""
    _, length, chunk0 = documents
    plan, levels = sizes.plan, sizes.layout.tree_levels
    end = chunk0 * CHUNK_SIZE + length
    tile0 = chunk0 >> plan.pair
    limit = torch.where(length > 0, (end + plan.tile - 1) >> plan.tile_bits, tile0)
    # With states, also those that begin at the end: plans with pairs have none. An end inside a tile is in it.
    last = limit - 1 if plan.pair else torch.maximum(end >> plan.tile_bits, limit - 1)
    level = torch.arange(levels, device=documents.device)[:, None]
    counts = (((last >> level) + 1) >> 1) - ((tile0 >> level) >> 1)
    windows = (last >> LOWEST) - (tile0 >> LOWEST) + 1
    counts = torch.cat([counts, windows.clamp(min=0)[None]])
    children_first = torch.nn.functional.pad(counts.cumsum(1), (1, 0)).int()
    low = torch.stack([limit, tile0])[:, None] >> (level + 1) << level
    rest = (torch.stack([limit, tile0])[:, None] & ((2 << level) - 1)) - (1 << level)
    ones = (low + rest.clamp(min=0)).sum(1)
    counts = ones[0] - ones[1]
    return children_first.contiguous(), (counts.cumsum(0) - counts).int()


@lru_cache(maxsize=256)
def _sizes(*key) -> Sizes:
    return Sizes(*key)


def sizes_of(
    k: Tensor, v: Tensor, scales: Tensor | None, documents: Tensor | None, max_chunk: int,
    *, stateful: bool, roots: bool, backward: bool,
) -> Sizes:  # fmt: skip
    (B, T, G, K), (H, V) = k.shape, v.shape[2:]
    L = None if scales is None else scales.shape[-1]
    N = None if documents is None else documents.shape[1]
    return _sizes(v.dtype, B, T, G, K, H, V, L, N, max_chunk, stateful, roots, backward)
