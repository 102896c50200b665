"""``ssd`` and ``loglinear_ssd`` by Triton kernels, as operators that ``torch.compile`` and autograd know.

Read ``states.py``, ``forward.py``, ``between.py``, ``within.py``; here they are launched. Inputs are kept for the
backward pass, everything else is computed again there.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from src.ops.fenwick import CHUNK_LEVELS
from src.ops.kernels import between, forward, states, within
from src.ops.kernels.plan import Layout, Plan, heads_a_block, layout_for, plan_for

SWEEP_BLOCK = 1024
"""Elements of a state that one program of the passes over tiles takes."""

SCRATCH_BYTES = 512 << 20
"""Of one pass of the backward pass: heads are taken in several, if all at once would need more."""


class Call:
    """Sizes and scratch that the kernels of one call share."""

    def __init__(self, k, v, scales, documents, scale, max_chunk) -> None:
        self.K, self.V = k.shape[-1], v.shape[-1]
        self.G, self.H = k.shape[2], v.shape[2]
        self.plan: Plan = plan_for(v.dtype, self.K, self.V)
        self.layout: Layout = layout_for(v, documents, max_chunk, self.plan)
        self.loglinear = scales is not None
        self.L = scales.shape[-1] if self.loglinear else 1
        self.scale = scale
        self.device, self.dtype = v.device, v.dtype
        self.per_group = self.H // self.G
        self.value_blocks = triton.cdiv(self.V, self.plan.value_block)
        self.J = self.layout.tree_levels + 1
        tiles = self.layout.tiles
        self.block_heads = heads_a_block(self.per_group, tiles * self.G)
        self.blocks = self.H // self.block_heads

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self.device)

    def where(self, *, tiles: bool = True) -> dict:
        """The arguments that say where tokens are."""
        at = self.layout
        given = {
            "documents": at.documents,
            "first": at.first,
            "N": at.count,
            "T": at.seq_len,
            "tiles_a_row": at.tiles_a_row,
            "PACKED": at.documents is not None,
        }
        return {**given, "tiles": at.tiles} if tiles else given

    def dims(self) -> dict:
        return {"K": self.K, "V": self.V, "BK": self.plan.key_block, "BV": self.plan.value_block}


class Pass:
    """Some blocks of heads of a call, with the scratch that they need: gates, level scales, states."""

    def __init__(self, call: Call, block0: int, blocks: int, more: bool) -> None:
        self.call, self.block0, self.blocks, self.more = call, block0, blocks, more
        self.heads = blocks * call.block_heads
        self.head0 = block0 * call.block_heads
        tiles, tokens = call.layout.tiles, call.layout.tokens
        self.cums = call.new(self.heads, tokens)
        self.columns = None
        self.totals = call.new(self.heads, tiles)
        self.nodes = call.new(self.heads, tiles, call.K * call.V, dtype=call.dtype) if more else None
        self.spans = call.new(self.heads, call.J, tiles) if more and call.loglinear else None
        self.since = call.new(self.heads, tiles) if more and call.loglinear else None

    def heads_args(self) -> dict:
        return {"heads": self.heads, "head0": self.head0, "H": self.call.H}

    def block_args(self) -> dict:
        return {
            "scale": self.call.scale,
            "blocks": self.blocks,
            "block0": self.block0,
            "heads_a_block": self.call.block_heads,
        }

    def prepare(self, k, v, g, scales, initial, levels) -> None:
        """Up to the states that tiles read; ``levels`` (None: not wanted) takes those that live at the end."""
        c, at = self.call, self.call.layout
        half = levels is not None and c.loglinear and c.plan.pair == 1
        if c.loglinear:
            self.columns = c.new(self.heads, c.L, at.tokens, dtype=scales.dtype)
        NV = c.value_blocks if self.more else 1
        states.prepare[(at.tiles * self.heads * NV,)](
            k, v, g, scales, self.cums, self.columns, self.nodes, self.totals, levels if half else None,
            **c.where(), **self.heads_args(), tokens=at.tokens, per_group=c.per_group, L=c.L,
            K=c.K, V=c.V, BK=c.plan.key_block, BV=c.plan.value_block if self.more else triton.next_power_of_2(c.V),
            BL=max(2, triton.next_power_of_2(c.L)), P=c.plan.pair,
            LOGLINEAR=c.loglinear, LEAVES=self.more, HALF=half, PRECISION=c.plan.precision, num_warps=4,
        )  # fmt: skip
        if not self.more:
            return
        size = c.K * c.V
        block = min(SWEEP_BLOCK, size & -size)
        programs = at.count * self.heads * (size // block)
        if not c.loglinear:
            self.scan(self.nodes, initial, levels, reverse=False)
            return
        stack = c.new(at.count, self.heads, c.J, size)
        kept = c.new(programs, c.J)
        states.sweep[(programs,)](
            self.nodes, self.totals, self.spans, self.since, stack, kept, levels, self.cums,
            **c.where(), **self.heads_args(), tokens=at.tokens, J=c.J,
            SIZE=size, BLOCK=block, P=c.plan.pair, STATE=levels is not None, num_warps=4,
        )  # fmt: skip
        if initial is not None and levels is not None:
            states.keep_roots[(programs,)](
                self.totals, initial, levels, self.cums,
                **c.where(), **self.heads_args(), tokens=at.tokens,
                SIZE=size, BLOCK=block, P=c.plan.pair, num_warps=4,
            )  # fmt: skip

    def scan(self, nodes, initial, final, *, reverse: bool) -> None:
        c = self.call
        size = c.K * c.V
        block = min(SWEEP_BLOCK, size & -size)
        states.scan[(c.layout.count * self.heads * (size // block),)](
            nodes, self.totals, initial, final,
            **c.where(), **self.heads_args(), SIZE=size, BLOCK=block,
            INITIAL=initial is not None, FINAL=final is not None, REVERSE=reverse, TILE=c.plan.tile, num_warps=4,
        )  # fmt: skip

    def output(self, q, k, v, roots, o) -> None:
        c, at = self.call, self.call.layout
        JR = roots.shape[0] if roots is not None else 0
        forward.output[((at.tiles << c.plan.pair) * self.blocks * c.value_blocks,)](
            q, k, v, self.cums, self.columns, self.nodes, self.spans, self.since, roots, o,
            **c.where(), **self.heads_args(), tokens=at.tokens, per_group=c.per_group, L=c.L, J=c.J, JR=JR,
            **self.block_args(), **c.dims(), C=64, P=c.plan.pair, BITS=6,
            LOGLINEAR=c.loglinear, NODES=self.more, ROOTS=roots is not None, PRECISION=c.plan.precision,
            num_warps=c.plan.warps(64),
        )  # fmt: skip

    def backward(self, q, k, v, do, roots, dlevels, out) -> None:
        """Into ``out``: dq, dk, dv, dg, dscales, droots."""
        c, at, plan = self.call, self.call.layout, self.call.plan
        tokens, tiles, more, NV = at.tokens, at.tiles, self.more, c.value_blocks
        dq, dk, dv, dg, dscales, droots = out
        place, heads, block = c.where(), self.heads_args(), self.block_args()
        common = {"LOGLINEAR": c.loglinear, "PRECISION": plan.precision}
        sizes = {"tokens": tokens, "per_group": c.per_group, "L": c.L}
        tile = {"R": plan.tile, "BITS": plan.tile_bits}
        loglinear_roots = roots is not None and c.loglinear
        dcolumns = c.zeros(self.heads, c.L + 1, tokens) if c.loglinear else None
        gates = c.new(4, self.heads, tokens)
        crossing = c.new(self.heads, tiles, NV) if more else None
        passing = crossing
        if more:
            crossed = c.new(self.heads, c.J, tiles) if c.loglinear else None
            root_crossed = c.new(self.heads, tiles) if loglinear_roots else None
            root_crossing = None
            E = c.new(self.heads, tiles, c.K * c.V, dtype=c.dtype)
            width = triton.next_power_of_2(at.tiles_a_row)
            places = tiles if at.documents is not None else at.count * width
            between.adjoint[(places * self.heads * NV,)](
                q, do, self.cums, self.columns, self.totals, self.spans, self.nodes, dlevels, E, crossing,
                **place, **heads, **sizes, J=c.J, scale=c.scale, width=width, **c.dims(), **tile,
                STATE=dlevels is not None, **common, num_warps=plan.warps(plan.key_block),
            )  # fmt: skip
            if not c.loglinear:
                self.scan(E, dlevels, droots, reverse=True)
            elif loglinear_roots:
                JR = roots.shape[0]
                root_crossing = c.new(JR, at.count, self.heads, NV)
                between.root_adjoint[(JR * at.count * self.heads * NV,)](
                    q, do, self.cums, self.columns, self.since, self.totals, roots, dlevels, droots, root_crossing,
                    **place, **heads, **sizes, scale=c.scale, **c.dims(), **tile,
                    STATE=dlevels is not None, PRECISION=plan.precision, num_warps=plan.warps(plan.key_block),
                )  # fmt: skip
            between.rows[(tiles * self.blocks,)](
                q, do, self.cums, self.columns, self.nodes, self.spans, self.since, roots, dq, dcolumns,
                gates[2], crossed, root_crossed,
                **place, **heads, **sizes, J=c.J, **block, **c.dims(), **tile,
                ROOTS=loglinear_roots, **common, num_warps=8,
            )  # fmt: skip
            half = dlevels is not None and c.loglinear and plan.pair == 1
            between.columns_back[(tiles * self.blocks,)](
                k, v, self.cums, self.totals, self.spans, self.nodes, E, dlevels if half else None, dv, dk,
                gates[3], crossing,
                **place, **heads, tokens=tokens, per_group=c.per_group, J=c.J,
                blocks=self.blocks, block0=self.block0, heads_a_block=c.block_heads,
                **c.dims(), **tile, HALF=half, **common, num_warps=8,
            )  # fmt: skip
            if c.loglinear:
                passing = c.new(self.heads, tiles)
                between.carry[(at.count * self.heads,)](
                    crossing, crossed, root_crossing, root_crossed, passing,
                    **place, heads=self.heads, J=c.J, JR=roots.shape[0] if loglinear_roots else 0, parts=NV,
                    BITS=plan.tile_bits, WIDTH=32, ROOTS=loglinear_roots, STATE=dlevels is not None, num_warps=1,
                )  # fmt: skip
        grid = ((tiles << plan.pair) * self.blocks,)
        block_shape = {"C": 64, "P": plan.pair, "BITS": 6, "MORE": more}
        args = {**c.where(tiles=False), "head0": self.head0, "H": c.H, **sizes, **block, **c.dims(), **block_shape}
        within.inside_rows[grid](
            q, k, v, do, self.cums, self.columns, dq, dcolumns, gates[0], **args, **common, num_warps=8
        )
        within.inside_columns[grid](
            q, k, v, do, self.cums, self.columns, dk, dv, gates[1], **args, **common, num_warps=8
        )
        within.finish[(tiles * self.heads,)](
            dcolumns, gates, passing, dg, dscales,
            **place, **heads, tokens=tokens, L=c.L, **tile, BL=max(2, triton.next_power_of_2(c.L)),
            PARTS=1 if c.loglinear else NV, LOGLINEAR=c.loglinear, MORE=more, num_warps=4,
        )  # fmt: skip


def has_more(call: Call, roots: Tensor | None, state: bool) -> bool:
    """Whether states are needed at all: a sequence that fits into a tile has none."""
    return state or roots is not None or call.layout.seq_len > call.plan.tile


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
    q, k, v, g = (x.contiguous() for x in (q, k, v, g))
    scales = None if scales is None else scales.contiguous()
    roots = None if roots is None else roots.contiguous()
    call = Call(k, v, scales, documents, scale, max_chunk)
    levels = None
    if state_levels >= 0:
        shape = (call.layout.count, call.H, call.K, call.V)
        levels = call.zeros(state_levels, *shape) if call.loglinear else call.new(*shape)
    o = torch.empty_like(v)
    one = Pass(call, 0, call.blocks, has_more(call, roots, levels is not None))
    one.prepare(k, v, g, scales, roots, levels)
    one.output(q, k, v, roots if call.loglinear else None, o)
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
    q, k, v, g, do = (x.contiguous() for x in (q, k, v, g, do))
    scales = None if scales is None else scales.contiguous()
    roots = None if roots is None else roots.contiguous()
    dlevels = None if dlevels is None else dlevels.contiguous()
    call = Call(k, v, scales, documents, scale, max_chunk)
    more = has_more(call, roots, dlevels is not None)
    parts = call.per_group // call.block_heads
    dq, dk = (call.new(parts, *k.shape) for _ in range(2))
    dv, dg = torch.empty_like(v), torch.empty_like(g)
    dscales = call.new(0) if scales is None else torch.empty_like(scales)
    droots = call.new(0) if roots is None else torch.zeros_like(roots)
    out = (dq, dk, dv, dg, dscales, droots if roots is not None else None)
    for block0, blocks in passes(call, more):
        part = Pass(call, block0, blocks, more)
        part.prepare(k, v, g, scales, roots, None)
        part.backward(q, k, v, do, roots, dlevels, out)
    return dq.sum(0).to(q.dtype), dk.sum(0).to(k.dtype), dv, dg, dscales, droots


@ssd_backward.register_fake
def _(do, dlevels, q, k, v, g, scales, documents, roots, scale, max_chunk):
    like = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g)]
    rest = [v.new_empty(0, dtype=torch.float32) if x is None else torch.empty_like(x) for x in (scales, roots)]
    return (*like, *rest)


def passes(call: Call, more: bool) -> list[tuple[int, int]]:
    """First block and number of blocks of heads of each pass, so that scratch stays in bounds."""
    tokens, tiles = call.layout.tokens, call.layout.tiles
    item = call.dtype.itemsize
    a_head = 4 * tokens * (2 * call.L + 7) + (2 * tiles * call.K * call.V * item if more else 0)
    count = max(1, min(call.blocks, round(a_head * call.H / SCRATCH_BYTES)))
    edges = [i * call.blocks // count for i in range(count + 1)]
    return [(a, b - a) for a, b in zip(edges[:-1], edges[1:], strict=True)]


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
    dq, dk, dv, dg, dscales, droots = ssd_backward(
        do, dlevels, q, k, v, g, scales, documents, roots, *ctx.arguments
    )
    return (
        dq, dk, dv, dg,
        None if scales is None else dscales,
        None,
        None if roots is None else droots,
        None, None, None,
    )  # fmt: skip


ssd_forward.register_autograd(_backward, setup_context=_keep)
