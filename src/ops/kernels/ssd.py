"""``ssd`` and ``loglinear_ssd`` by Triton kernels, as operators that ``torch.compile`` and autograd know.

Read ``states.py``, ``forward.py``, ``between.py``, ``within.py``; here they are launched. Inputs are kept for the
backward pass, everything else is computed again there.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from src.ops.fenwick import CHUNK_BITS
from src.ops.kernels import adjoints, between, check, forward, states, within
from src.ops.kernels.launch import launch
from src.ops.kernels.plan import Layout, Plan, layout_for, plan_for, work_for

SWEEP_BLOCK = 1024
"""Elements of a state that one program of the passes over tiles takes."""

SCRATCH = 2.0
SCRATCH_BYTES = 256 << 20
"""The backward pass takes heads in several passes where its scratch for all would be more than so many times v."""


class Call:
    """Sizes of one call, and what all its kernels are given."""

    def __init__(
        self,
        tensors: dict[str, Tensor | None],
        documents: Tensor | None,
        scale: float,
        max_chunk: int,
        more: bool,
        backward: bool = False,
    ):
        k, v, scales = tensors["k"], tensors["v"], tensors["scales"]
        self.K, self.V, self.G, self.H = k.shape[3], v.shape[3], k.shape[2], v.shape[2]
        self.dtype, self.device = v.dtype, v.device
        self.plan: Plan = plan_for(v.dtype, self.K, self.V)
        self.layout: Layout = layout_for(v, documents, max_chunk, self.plan)
        self.loglinear = scales is not None
        self.L = scales.shape[-1] if self.loglinear else 1
        self.J = self.layout.tree_levels + 1
        self.value_blocks = -(-self.V // self.plan.value_block)
        at, plan = self.layout, self.plan
        size = self.K * self.V
        self.more = more or at.seq_len > plan.tile
        passes = 1
        if backward and self.more:
            a_token = 4 * (2 * self.L + 10) + 2 * size * v.element_size() // plan.tile
            total = a_token * at.tokens * self.H
            passes = math.ceil(total / max(SCRATCH_BYTES, SCRATCH * v.nbytes))
        work = work_for(self.H, self.G, at.tiles, passes)
        per_group = self.H // self.G
        self.block_heads, self.blocks_a_pass = work.heads_a_block, work.blocks_a_pass
        self.blocks = self.H // self.block_heads
        self.partials = min(per_group // self.block_heads, self.blocks_a_pass)
        self.given = {
            **tensors,
            "documents": at.documents, "first": at.first, "PACKED": at.documents is not None,
            "N": at.count, "T": at.seq_len, "tiles_a_row": at.tiles_a_row, "tiles": at.tiles, "tokens": at.tokens,
            "H": self.H, "per_group": per_group, "heads_a_block": self.block_heads, "L": self.L, "J": self.J,
            "scale": scale, "parts": self.value_blocks, "partials": self.partials,
            "width": triton.next_power_of_2(at.tiles_a_row),
            "K": self.K, "V": self.V, "BK": plan.key_block, "BV": plan.value_block,
            "BL": max(2, triton.next_power_of_2(self.L)), "SIZE": size, "BLOCK": min(SWEEP_BLOCK, size & -size),
            "P": plan.pair, "BITS": CHUNK_BITS, "R": plan.tile, "TILE_BITS": plan.tile_bits,
            "PARTS": 1 if self.loglinear else self.value_blocks, "WIDTH": 32,
            "LOGLINEAR": self.loglinear, "PRECISION": plan.precision,
        }  # fmt: skip

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self.device)


class Pass:
    """Some blocks of heads of a call, with the scratch that they need: gates, level scales, states.

    ``roots``: states before the call.
    """

    def __init__(self, call: Call, block0: int, blocks: int, roots: Tensor | None) -> None:
        self.call, self.more, self.roots = call, call.more, roots
        more = call.more
        self.heads, self.blocks = blocks * call.block_heads, blocks
        tiles, tokens = call.layout.tiles, call.layout.tokens
        loglinear = call.loglinear
        scales = call.given["scales"]
        self.given = {
            **call.given,
            "heads": self.heads, "head0": block0 * call.block_heads, "blocks": blocks, "block0": block0,
            "cums": call.new(self.heads, tokens),
            "totals": call.new(self.heads, tiles),
            "columns": call.new(self.heads, call.L, tokens, dtype=scales.dtype) if loglinear else None,
            "nodes": call.new(self.heads, tiles, call.K * call.V, dtype=call.dtype) if more else None,
            "spans": call.new(self.heads, call.J, tiles) if more and loglinear else None,
            "since": call.new(self.heads, tiles) if more and loglinear else None,
            "roots": roots if loglinear else None, "JR": len(roots) if roots is not None and loglinear else 0,
            "LEAVES": more, "NODES": more, "MORE": more, "ROOTS": roots is not None and loglinear,
        }  # fmt: skip

    def run(
        self, kernel, programs: int, *, warps: int = 4, stages: int = 2, registers: int | None = None, **arguments
    ) -> None:
        launch(kernel, programs, {**self.given, **arguments}, warps=warps, stages=stages, registers=registers)

    def prepare(self, levels: Tensor | None) -> None:
        """Up to the states that tiles read; ``levels`` (None: not wanted) takes those that live at the end."""
        call, given = self.call, self.given
        state = {"levels": levels, "STATE": levels is not None}
        half = levels is not None and call.loglinear and call.plan.pair == 1
        parts = call.value_blocks if self.more else 1
        BV = given["BV"] if self.more else triton.next_power_of_2(call.V)
        half = {"half": levels if half else None, "HALF": half}
        self.run(states.prepare, call.layout.tiles * self.heads * parts, leaves=given["nodes"], BV=BV, **half)
        if not self.more:
            return
        if not call.loglinear:
            self.scan(given["nodes"], self.roots, levels, reverse=False)
            return
        programs = self._sweep_programs()
        size = call.K * call.V
        scratch = {
            "stack": call.new(call.layout.count, self.heads, call.J + 2, size),
            "kept": call.new(programs, call.J + 2),
        }
        self.run(states.sweep, programs, **scratch, **state)
        if self.roots is not None and levels is not None:
            self.run(states.keep_roots, programs, levels=levels)

    def scan(self, nodes: Tensor, initial: Tensor | None, final: Tensor | None, *, reverse: bool) -> None:
        ends = {"initial": initial, "INITIAL": initial is not None, "final": final, "FINAL": final is not None}
        self.run(states.scan, self._sweep_programs(), nodes=nodes, **ends, REVERSE=reverse)

    def _sweep_programs(self) -> int:
        return self.call.layout.count * self.heads * (self.given["SIZE"] // self.given["BLOCK"])

    def output(self, o: Tensor) -> None:
        call = self.call
        programs = (call.layout.tiles << call.plan.pair) * self.blocks * call.value_blocks
        plan = call.plan
        self.run(forward.output, programs, o=o, warps=plan.chunk_warps, stages=plan.stages, registers=plan.registers)

    def backward(self, do: Tensor, dlevels: Tensor | None, out: dict[str, Tensor | None]) -> None:
        """Into ``out``: dq, dk (sums over some heads), dv, dg, dscales, droots."""
        call, plan, tiles = self.call, self.call.plan, self.call.layout.tiles
        dcolumns = call.zeros(self.heads, call.L + 2, call.layout.tokens) if call.loglinear else None
        gates = call.new(5, self.heads, call.layout.tokens)
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
            self.run(within.pairs, tiles * self.blocks, warps=plan.square_warps)
        self.run(
            within.inside, (tiles << plan.pair) * self.blocks, MORE=self.more or plan.pair == 1, warps=plan.square_warps
        )
        self.run(within.finish, tiles * self.heads, passing=passing)

    def between(self, gates: Tensor) -> Tensor:
        """What passes from tile to tile; returns the gates' gradient over whole tiles."""
        call, plan, layout, given = self.call, self.call.plan, self.call.layout, self.given
        tiles, parts = layout.tiles, call.value_blocks
        crossing = call.new(self.heads, tiles, parts)
        E = call.new(self.heads, tiles, call.K * call.V, dtype=call.dtype)
        given |= {"E": E, "crossing": crossing, "root_crossing": None, "root_crossed": None, "crossed": None}
        places = tiles if layout.documents is not None else layout.count * given["width"]
        self.run(adjoints.adjoint, places * self.heads * parts, warps=plan.state_warps)
        if not call.loglinear:
            self.scan(E, given["dlevels"], given["droots"], reverse=True)
        else:
            given["crossed"] = call.new(self.heads, call.J, tiles)
            if given["ROOTS"]:
                roots = given["JR"] * layout.count * self.heads
                given["root_crossing"] = call.new(roots, parts)
                given["root_crossed"] = call.new(self.heads, tiles)
                self.run(adjoints.root_adjoint, roots * parts, warps=plan.state_warps)
        self.run(between.rows, tiles * self.blocks, row_gates=gates[3], warps=8)
        half = given["STATE"] and call.loglinear and plan.pair == 1
        half = {"dhalf": given["dlevels"] if half else None, "HALF": half}
        self.run(between.columns_back, tiles * self.blocks, column_gates=gates[4], **half, warps=8)
        if not call.loglinear:
            return crossing
        passing = call.new(self.heads, tiles)
        self.run(adjoints.carry, layout.count * self.heads, passing=passing, warps=1)
        return passing


def _trust(v: Tensor, k: Tensor, scales: Tensor | None, documents: Tensor | None, *, gradients: bool) -> None:
    """Check the kernels that this kind of call takes, the first time."""
    K, V, L = k.shape[3], v.shape[3], None if scales is None else scales.shape[-1]
    tile = plan_for(v.dtype, K, V).tile
    short = v.shape[1] <= tile
    size_class = None if L is None else triton.next_power_of_2(L)
    kind = (v.device, v.dtype, K, V, size_class, documents is not None, short, gradients)

    def run() -> dict[str, float]:
        T = tile - 5 if short else 2 * tile + 77
        given = check.problem(T, K, V, L, v.dtype, v.device)
        cu_seqlens = None if documents is None else torch.tensor([0, T // 3, T], device=v.device)
        packing = None if documents is None else documents_of(cu_seqlens)

        def rest(x: dict[str, Tensor]) -> tuple:
            return x["q"], x["k"], x["v"], x["g"], x.get("scales"), packing, None, 1.0, 0

        def backward(do: Tensor, x: dict[str, Tensor]) -> dict[str, Tensor]:
            made = ssd_backward(do, None, *rest(x))
            return dict(zip(x, made, strict=False))  # the order of both is q, k, v, g, scales

        return check.errors(given, cu_seqlens, lambda x: ssd_forward(*rest(x), -1)[0], backward if gradients else None)

    check.ensure(kind, run, v.dtype)


def documents_of(cu_seqlens: Tensor) -> Tensor:
    """``[3, N]`` int64: where documents start, their tokens, their first chunk."""
    cu = cu_seqlens.long()
    lengths = cu.diff()
    return torch.stack([cu[:-1], lengths, torch.zeros_like(lengths)])


def _dense(**tensors: Tensor | None) -> dict[str, Tensor | None]:
    return {name: None if x is None else x.contiguous() for name, x in tensors.items()}


@torch.library.custom_op("loglinear::ssd_forward", mutates_args=())
def ssd_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scales: Tensor | None,
    documents: Tensor | None,
    roots: Tensor | None,
    scale: float,
    max_chunk: int,
    state_levels: int,
) -> tuple[Tensor, Tensor]:
    """Outputs and, with ``state_levels >= 0``, the new states: ``[state_levels, N, H, K, V]``, or ``[N, H, K, V]``
    for the linear form (``scales`` None); else an empty tensor.

    ``documents [3, N]`` (None: rows): where each starts in the list of tokens, its tokens, its first chunk.
    ``roots``: the states before, in the same layout as the new ones.
    """
    _trust(v, k, scales, documents, gradients=False)
    given = _dense(q=q, k=k, v=v, g=g, scales=scales)
    (roots,) = _dense(roots=roots).values()
    call = Call(given, documents, scale, max_chunk, more=state_levels >= 0 or roots is not None)
    levels = None
    if state_levels >= 0:
        shape = (call.layout.count, call.H, call.K, call.V)
        levels = call.zeros(state_levels, *shape) if call.loglinear else call.new(*shape)
    o = torch.empty_like(given["v"])
    with torch.cuda.device_of(v):
        one = Pass(call, 0, call.blocks, roots)
        one.prepare(levels)
        one.output(o)
    return o, o.new_empty(0, dtype=torch.float32) if levels is None else levels


@ssd_forward.register_fake
def _(q, k, v, g, scales, documents, roots, scale, max_chunk, state_levels):
    N = v.shape[0] if documents is None else documents.shape[1]
    shape = (N, v.shape[2], k.shape[3], v.shape[3])
    if state_levels < 0:
        shape = (0,)
    elif scales is not None:
        shape = (state_levels, *shape)
    return torch.empty_like(v, memory_format=torch.contiguous_format), v.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("loglinear::ssd_backward", mutates_args=())
def ssd_backward(
    do: Tensor,
    dlevels: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scales: Tensor | None,
    documents: Tensor | None,
    roots: Tensor | None,
    scale: float,
    max_chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, scales and roots (empty where there are none)."""
    _trust(v, k, scales, documents, gradients=True)
    given = _dense(q=q, k=k, v=v, g=g, scales=scales)
    do, dlevels, roots = _dense(do=do, dlevels=dlevels, roots=roots).values()
    outside = dlevels is not None or roots is not None
    call = Call(given, documents, scale, max_chunk, more=outside, backward=True)
    out = {
        "dq": call.new(call.partials, *q.shape),
        "dk": call.new(call.partials, *k.shape),
        "dv": torch.empty_like(given["v"]),
        "dg": torch.empty_like(given["g"]),
        "dscales": None if scales is None else torch.empty_like(given["scales"]),
        "droots": None if roots is None else torch.zeros_like(roots),
    }
    with torch.cuda.device_of(v):
        for block0 in range(0, call.blocks, call.blocks_a_pass):
            part = Pass(call, block0, call.blocks_a_pass, roots)
            part.prepare(None)
            part.backward(do, dlevels, out)
    out["dq"], out["dk"] = out["dq"].sum(0).to(q.dtype), out["dk"].sum(0).to(k.dtype)
    return tuple(call.new(0) if x is None else x for x in out.values())


@ssd_backward.register_fake
def _(do, dlevels, q, k, v, g, scales, documents, roots, scale, max_chunk):
    like = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g)]
    rest = [v.new_empty(0, dtype=torch.float32) if x is None else torch.empty_like(x) for x in (scales, roots)]
    return (*like, *rest)


def _keep(ctx, inputs, output) -> None:
    *tensors, scale, max_chunk, state_levels = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)
    ctx.arguments = (scale, max_chunk)
    ctx.stateful = state_levels >= 0


def _backward(ctx, do, dlevels):
    q, k, v, g, scales, documents, roots = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(v)
    if not ctx.stateful:
        dlevels = None
    dq, dk, dv, dg, dscales, droots = ssd_backward(do, dlevels, q, k, v, g, scales, documents, roots, *ctx.arguments)
    return (
        dq, dk, dv, dg,
        None if scales is None else dscales,
        None,
        None if roots is None else droots,
        None, None, None,
    )  # fmt: skip


ssd_forward.register_autograd(_backward, setup_context=_keep)
