"""Which kernels run, in which order: the forward pass and the backward pass over some heads."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from src.ops.kernels import adjoints, between, forward, states, within
from src.ops.kernels.launch import launch
from src.ops.kernels.sizes import Sizes


class Pass:
    """Some blocks of heads of a call, with the scratch that they need: gates, level scales, states.

    ``tensors``: the call's, by the kernels' names. ``roots``: states before the call.
    """

    def __init__(self, sizes: Sizes, tensors: dict, block0: int, blocks: int, roots: Tensor | None) -> None:
        self.sizes, self.more, self.roots = sizes, sizes.more, roots
        self.heads, self.blocks = blocks * sizes.block_heads, blocks
        self.device = tensors["v"].device
        tiles, tokens = sizes.layout.tiles, sizes.layout.tokens
        loglinear, more, scales = sizes.loglinear, sizes.more, tensors["scales"]
        self.given = {
            **sizes.given, **tensors,
            "heads": self.heads, "head0": block0 * sizes.block_heads, "blocks": blocks, "block0": block0,
            "cums": self.new(self.heads, tokens),
            "totals": self.new(self.heads, tiles),
            "columns": self.new(self.heads, sizes.L, tokens, dtype=scales.dtype) if loglinear else None,
            "nodes": self.new(self.heads, tiles, sizes.K * sizes.V, dtype=sizes.dtype) if more else None,
            "spans": self.new(self.heads, sizes.J, tiles) if more and loglinear else None,
            "since": self.new(self.heads, tiles) if more and loglinear else None,
            "roots": roots if loglinear else None, "JR": len(roots) if roots is not None and loglinear else 0,
            "ROOTS": roots is not None and loglinear,
        }  # fmt: skip

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def run(
        self, kernel, programs: int, *, warps: int = 4, stages: int = 2, registers: int | None = None, **arguments
    ) -> None:
        launch(kernel, programs, {**self.given, **arguments}, warps=warps, stages=stages, registers=registers)

    def prepare(self, levels: Tensor | None) -> None:
        """Up to the states that tiles read; ``levels`` (None: not wanted) takes those that live at the end."""
        sizes, given = self.sizes, self.given
        state = {"levels": levels, "STATE": levels is not None}
        has_half = levels is not None and sizes.loglinear and sizes.plan.pair == 1
        parts = sizes.value_blocks if self.more else 1
        BV = given["BV"] if self.more else triton.next_power_of_2(sizes.V)
        half = {"half": levels if has_half else None, "HALF": has_half}
        self.run(states.prepare, sizes.layout.tiles * self.heads * parts, leaves=given["nodes"], BV=BV, **half)
        if not self.more:
            return
        if not sizes.loglinear:
            self.scan(given["nodes"], self.roots, levels)
            return
        programs = self._sweep_programs()
        size = sizes.K * sizes.V
        self.given["stack"] = self.new(self.heads, sizes.entries, size)
        self.run(states.sweep, programs, kept=self.new(programs, sizes.J), **state)
        if self.roots is not None and levels is not None:
            self.run(states.keep_roots, programs, levels=levels)

    def scan(
        self, leaves: Tensor, initial: Tensor | None, final: Tensor | None, crossing: Tensor | None = None
    ) -> None:
        """Left to right or, with ``crossing``, right to left."""
        ends = {"initial": initial, "INITIAL": initial is not None, "final": final, "FINAL": final is not None}
        self.run(
            states.scan, self._sweep_programs(), leaves=leaves, crossing=crossing, **ends, REVERSE=crossing is not None
        )

    def _sweep_programs(self) -> int:
        return self.sizes.layout.count * self.heads * (self.given["SIZE"] // self.given["BLOCK"])

    def output(self, o: Tensor) -> None:
        sizes = self.sizes
        programs = (sizes.layout.tiles << sizes.plan.pair) * self.blocks * sizes.value_blocks
        plan = sizes.plan
        self.run(forward.output, programs, o=o, warps=plan.chunk_warps, stages=plan.stages, registers=plan.registers)

    def backward(self, do: Tensor, dlevels: Tensor | None, out: dict[str, Tensor | None]) -> None:
        """Into ``out``: dq, dk (sums over some heads), dv, dg, dscales, droots."""
        sizes, plan, tiles = self.sizes, self.sizes.plan, self.sizes.layout.tiles
        dcolumns = self.new(self.heads, sizes.L + 2, sizes.layout.tokens).zero_() if sizes.loglinear else None
        gates = self.new(5, self.heads, sizes.layout.tokens)
        self.given |= {
            **out,
            "do": do,
            "dlevels": dlevels,
            "STATE": dlevels is not None,
            "dcolumns": dcolumns,
            "gates": gates,
        }
        passing = self.between(gates) if self.more else None
        if plan.pair:
            self.run(within.pairs, tiles * self.blocks, stages=3)
        more = self.more or plan.pair == 1
        self.run(within.inside, (tiles << plan.pair) * self.blocks, MORE=more, stages=1)
        summed = {"slices": 1, "SLICES": 1} if sizes.loglinear else {}
        self.run(within.finish, tiles * self.heads, passing=passing, OUTWARD=1, **summed)

    def between(self, gates: Tensor) -> Tensor:
        """What passes from tile to tile; returns the gates' gradient over whole tiles: ``[heads, tiles]``, and of the
        linear form ``[heads, tiles, slices]``, to be summed over slices."""
        sizes, plan, layout, given = self.sizes, self.sizes.plan, self.sizes.layout, self.given
        tiles, parts = layout.tiles, sizes.value_blocks
        E = self.new(self.heads, tiles, sizes.K * sizes.V, dtype=sizes.dtype)
        crossing = self.new(self.heads, tiles, given["slices"])
        given |= {"E": E, "crossing": crossing, "root_crossing": None, "root_crossed": None, "crossed": None}
        places = tiles if given["PACKED"] else layout.count * given["width"]
        self.run(adjoints.adjoint, places * self.heads * parts, warps=plan.state_warps)
        if sizes.loglinear:
            given["crossed"] = self.new(self.heads, sizes.J, tiles << plan.pair)
            self.run(adjoints.descend, self._sweep_programs())
            if given["ROOTS"]:
                roots = given["JR"] * layout.count * self.heads
                given["root_crossing"] = self.new(roots, parts)
                given["root_crossed"] = self.new(self.heads, tiles << plan.pair)
                self.run(adjoints.root_adjoint, roots * parts, warps=plan.state_warps)
        else:
            self.scan(E, given["dlevels"], given["droots"], crossing)
        self.run(
            between.rows,
            (tiles << plan.pair) * self.blocks,
            row_gates=gates[3],
            warps=plan.row_warps,
            stages=plan.stages,
        )
        has_half = given["STATE"] and sizes.loglinear and plan.pair == 1
        half = {"dhalf": given["dlevels"] if has_half else None, "HALF": has_half}
        own = {"adjoints": E, "column_gates": gates[4], **half}
        self.run(between.columns_back, tiles * self.blocks, **own, warps=8, stages=plan.stages)
        if not sizes.loglinear:
            return crossing
        passing = self.new(self.heads, tiles)
        self.run(adjoints.carry, layout.count * self.heads, passing=passing, warps=1)
        return passing
