"""Which kernels run, in which order: the forward pass and the backward pass over some heads."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from src.ops.kernels import states, within
from src.ops.kernels.delta import chain, inside, read, solve, write
from src.ops.kernels.delta.sizes import Sizes
from src.ops.kernels.launch import launch


class Pass:
    """Some heads of a call, with the scratch that they need.

    ``tensors``: the call's, by the kernels' names. ``qs, ks``, ``q~`` and ``k~``, are of chunks until ``join`` has
    made them those of tiles; their gradients, ``dqs, dks``, are of tiles until ``across`` has made them those of
    chunks. Where a tile is one chunk the two are the same.
    """

    def __init__(self, sizes: Sizes, tensors: dict, head0: int, heads: int, *, backward: bool) -> None:
        self.sizes, self.heads = sizes, heads
        self.device = tensors["v"].device
        at, plan, dtype = sizes.layout, sizes.plan, sizes.dtype
        loglinear, more, scales = sizes.loglinear, sizes.more, tensors["scales"]
        K, V, C = sizes.K, sizes.V, plan.tile >> plan.pair
        self.tiles, self.chunks = at.tiles * heads, (at.tiles << plan.pair) * heads
        self.given = {
            **sizes.given, **tensors, "heads": heads, "head0": head0,
            "cums": self.new(heads, at.tokens),
            "totals": self.new(heads, at.tiles),
            "columns": self.new(heads, sizes.L, at.tokens, dtype=scales.dtype) if loglinear else None,
            "qs": self.new(heads, at.tokens, K, dtype=dtype),
            "ks": self.new(heads, at.tokens, K, dtype=dtype),
            "attention": self.new(heads, at.tokens, C, dtype=dtype),
            "inverse": self.new(heads, at.tokens, C) if backward else None,
            "crossing": self.new(heads, at.tiles, C * C, dtype=dtype) if plan.pair else None,
            "overlap": self.new(heads, at.tiles, C * C, dtype=dtype) if plan.pair and backward else None,
            "chunks": self.new(heads, at.tokens, K, dtype=dtype) if plan.pair and backward else None,
            "BACKWARD": backward,
        }  # fmt: skip
        if more:
            self.given |= {
                "nodes": self.new(heads, at.tiles, K * V, dtype=dtype),
                "changes": self.new(heads, at.tiles, K * K, dtype=dtype),
                "seen": self.new(heads, sizes.slots, K * V, dtype=dtype),
            }
        else:
            self.given |= {"nodes": None, "changes": None, "seen": None}

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def run(
        self, kernel, programs: int, *, warps: int = 4, stages: int = 2, registers: int | None = None, **arguments
    ) -> None:
        launch(kernel, programs, {**self.given, **arguments}, warps=warps, stages=stages, registers=registers)

    def prepare(self, levels: Tensor | None) -> None:
        """Up to the states that tiles see; ``levels`` (None: not wanted) takes those behind the call."""
        sizes, given = self.sizes, self.given
        whole = {"BV": triton.next_power_of_2(sizes.V), "LEAVES": False, "HALF": False, "leaves": None, "half": None}
        self.run(states.prepare, self.tiles, **whole)
        self.run(solve.solve, self.chunks, stages=1, registers=sizes.at_most(168))
        if sizes.plan.pair:
            self.run(solve.join, self.tiles, registers=sizes.at_most(168))
        if not sizes.more:
            return
        programs = self.tiles * (sizes.value_blocks + sizes.key_blocks)
        self.run(solve.leaves, programs, warps=sizes.plan.state_warps, registers=sizes.state_registers)
        state = {"levels": levels, "STATE": levels is not None, "ROOTS": given["roots"] is not None}
        for step in sizes.steps:
            self._chain(chain.follow, *step, **state)

    def _chain(self, kernel, level: int, children_a_row: int, children: int, **arguments) -> None:
        sizes = self.sizes
        low = level < 0  # its line of ``children_first`` is behind those of all levels
        at = {"level": sizes.layout.tree_levels if low else level, "children_a_row": children_a_row, "LOW": low}
        self.run(kernel, children * self.heads * sizes.value_blocks, **at, **arguments, stages=sizes.chain_stages)

    def output(self, o: Tensor) -> None:
        self.run(
            read.output,
            self.chunks * self.sizes.value_blocks,
            o=o,
            registers=self.sizes.at_most(128 if self.sizes.K <= 128 else 168),
        )

    def backward(self, do: Tensor, dlevels: Tensor | None, out: dict[str, Tensor | None]) -> None:
        """Into ``out``: dq, dk, dv, dg, dbeta, dscales, droots."""
        sizes, at, heads, K = self.sizes, self.sizes.layout, self.heads, self.sizes.K
        gates = self.new(4 + (sizes.value_blocks if sizes.more else 0), heads, at.tokens)
        dcolumns = self.new(heads, sizes.L + 2, at.tokens).zero_() if sizes.loglinear else None
        self.given |= {**out, "do": do, "gates": gates, "dcolumns": dcolumns, "passing": None}
        outer = bool(sizes.more or sizes.plan.pair)  # does anything reach a chunk from outside?
        for name in ("dqs", "dks", "dk_part"):
            self.given[name] = self.new(heads, at.tokens, K, dtype=sizes.dtype) if outer else None
        if sizes.more:
            self._between(gates, dlevels)
        if sizes.plan.pair:
            for name in ("crossing", "overlap"):
                self.given[f"d{name}"] = torch.empty_like(self.given[name])
            self.run(inside.squares_back, self.tiles, stages=3)
            self.run(inside.across, self.tiles * sizes.key_blocks, stages=3)
        self.given["dattention"] = torch.empty_like(self.given["attention"])
        self.run(inside.attention_back, self.chunks, OUTER=outer, stages=3, registers=sizes.at_most(168))
        self.run(inside.solve_back, self.chunks, OUTER=outer, stages=1)
        self.run(within.finish, self.tiles, OUTWARD=sizes.value_blocks)

    def _between(self, gates: Tensor, dlevels: Tensor | None) -> None:
        """What passes from tile to tile."""
        sizes, given, plan = self.sizes, self.given, self.sizes.plan
        given["after"] = torch.empty_like(given["seen"])
        given["dnodes"] = torch.zeros_like(given["nodes"]) if sizes.loglinear else None
        given["passing"] = self.new(self.heads, sizes.layout.tiles, given["slices"])
        state = {"dlevels": dlevels, "STATE": dlevels is not None, "ROOTS": given["roots"] is not None}
        blocks = self.tiles * sizes.value_blocks
        self.run(read.reads_back, blocks, warps=plan.state_warps, registers=sizes.state_registers)
        for step in reversed(sizes.steps):
            self._chain(chain.ebb, *step, **state)
        self.run(read.rows, self.chunks, row_gates=gates[3], warps=plan.state_warps, stages=3)
        self.run(write.changes_back, self.tiles * sizes.key_blocks, warps=plan.state_warps, stages=3)
        blocks = self.tiles * (sizes.value_blocks + sizes.key_blocks)
        self.run(write.columns_back, blocks, stages=3, registers=sizes.at_most(168))
