"""``gated_delta_rule`` and ``loglinear_gated_delta_rule`` by Triton kernels, as operators that ``torch.compile`` and
autograd know.

Read ``solve.py``, ``chain.py``, ``read.py``, ``write.py`` and ``inside.py`` for the kernels, ``passes.py`` for their
order. Inputs are kept for the backward pass, everything else is computed again there.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor, library

from src.ops.kernels import check
from src.ops.kernels.delta.passes import Pass
from src.ops.kernels.delta.sizes import Sizes, plan_for, sizes_of, tree_tables
from src.ops.kernels.plan import first_tiles
from src.ops.kernels.ssd import dense, dense_like, documents_of, dtypes_of, new_states


def _trust(
    v: Tensor, k: Tensor, g: Tensor, beta: Tensor, scales: Tensor | None, documents: Tensor | None,
    *, stateful: bool, gradients: bool,
) -> None:  # fmt: skip
    """Check the kernels that this kind of call takes, the first time."""
    K, V, L = k.shape[3], v.shape[3], None if scales is None else scales.shape[-1]
    dtypes = dtypes_of(g=g, beta=beta, scales=scales)
    groups = 1 if k.shape[2] < v.shape[2] else 2  # of two heads; with groups, gradients of q and k are in fp32
    tile = plan_for(v.dtype, K, V, stateful).tile
    short = v.shape[1] <= tile and not stateful
    size_class = None if L is None else triton.next_power_of_2(L)
    kind = (
        "delta", v.device, v.dtype, K, V, size_class, documents is not None, short, stateful, gradients, groups,
        *dtypes.values(),
    )  # fmt: skip

    def run() -> dict[str, float]:
        T = tile - 5 if short else 9 * tile + 77
        given = check.problem(T, K, V, L, v.dtype, v.device, delta=True, groups=groups, **dtypes)
        cu_seqlens = None if documents is None else torch.tensor([0, T // 3, T], device=v.device)
        packing = None if documents is None else documents_of(cu_seqlens)
        # With states: the new ones are asked for, and their gradient is zero.
        levels = (T // tile).bit_length() + 1 if stateful and L is not None else 0

        def rest(x: dict[str, Tensor]) -> tuple:
            return x["q"], x["k"], x["v"], x["g"], x["beta"], x.get("scales"), packing, None, 1.0, 0

        def backward(do: Tensor, x: dict[str, Tensor]) -> dict[str, Tensor]:
            N = 1 if packing is None else packing.shape[1]
            shape = (N, 2, K, V) if L is None else (levels, N, 2, K, V)
            dlevels = torch.zeros(shape, device=v.device) if stateful else None
            made = delta_backward(do, dlevels, *rest(x))
            return dict(zip(x, made, strict=False))  # the order of both is q, k, v, g, beta, scales

        def forward(x: dict[str, Tensor]) -> Tensor:
            return delta_forward(*rest(x), levels if stateful else -1)[0]

        return check.errors(given, cu_seqlens, forward, backward if gradients else None)

    check.ensure(kind, run, v.dtype)


def _tensors(q, k, v, g, beta, scales, documents, roots, scale: float, sizes: Sizes) -> dict:
    """What the kernels read, by their names."""
    first = children_first = seen_first = None
    if documents is not None:
        documents = documents.contiguous()
        first = first_tiles(documents, sizes.plan)
        if sizes.loglinear and sizes.more:
            children_first, seen_first = tree_tables(documents, sizes)
    given = dense(q=q, k=k, v=v, g=g, beta=beta, scales=scales, roots=roots)
    tables = {"documents": documents, "first": first, "children_first": children_first, "seen_first": seen_first}
    return {**given, **tables, "scale": scale}


@library.custom_op("loglinear::delta_forward", mutates_args=())
def delta_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scales: Tensor | None,
    documents: Tensor | None,
    roots: Tensor | None,
    scale: float,
    max_chunk: int,
    state_levels: int,
) -> tuple[Tensor, Tensor]:
    """Outputs and states, as ``ssd_forward`` of ``ssd.py``, with write strengths ``beta [B, T, H]``."""
    state = state_levels >= 0
    stateful = state or roots is not None
    _trust(v, k, g, beta, scales, documents, stateful=stateful, gradients=False)
    sizes = sizes_of(k, v, scales, documents, max_chunk, stateful=stateful, roots=roots is not None, backward=False)
    levels = new_states(k, v, scales, documents, state_levels)
    with torch.cuda.device_of(v):
        tensors = _tensors(q, k, v, g, beta, scales, documents, roots, scale, sizes)
        o = torch.empty_like(tensors["v"])
        for head0 in range(0, sizes.H, sizes.heads_a_pass):
            part = Pass(sizes, tensors, head0, min(sizes.heads_a_pass, sizes.H - head0), backward=False)
            part.prepare(levels if state else None)
            part.output(o)
            del part  # its scratch goes before the next one's comes
    return o, levels


@delta_forward.register_fake
def _(q, k, v, g, beta, scales, documents, roots, scale, max_chunk, state_levels):
    return dense_like(v), new_states(k, v, scales, documents, state_levels)


@library.custom_op("loglinear::delta_backward", mutates_args=())
def delta_backward(
    do: Tensor,
    dlevels: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scales: Tensor | None,
    documents: Tensor | None,
    roots: Tensor | None,
    scale: float,
    max_chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, beta, scales and roots (empty where there are none)."""
    stateful = dlevels is not None or roots is not None
    _trust(v, k, g, beta, scales, documents, stateful=stateful, gradients=True)
    do, dlevels = dense(do=do, dlevels=dlevels).values()
    sizes = sizes_of(k, v, scales, documents, max_chunk, stateful=stateful, roots=roots is not None, backward=True)
    H, grouped = v.shape[2], v.shape[2] // k.shape[2]
    with torch.cuda.device_of(v):
        tensors = _tensors(q, k, v, g, beta, scales, documents, roots, scale, sizes)
        by_head = (*q.shape[:2], H, q.shape[3])
        out = {
            "dq": q.new_empty(by_head, dtype=q.dtype if grouped == 1 else torch.float32),
            "dk": k.new_empty(by_head, dtype=k.dtype if grouped == 1 else torch.float32),
            "dv": torch.empty_like(tensors["v"]),
            "dg": torch.empty_like(tensors["g"]),
            "dbeta": torch.empty_like(tensors["beta"]),
            "dscales": None if scales is None else torch.empty_like(tensors["scales"]),
            "droots": None if roots is None else torch.zeros_like(tensors["roots"]),
        }
        for head0 in range(0, H, sizes.heads_a_pass):
            part = Pass(sizes, tensors, head0, min(sizes.heads_a_pass, H - head0), backward=True)
            part.prepare(None)
            part.backward(do, dlevels, out)
            del part
    if grouped > 1:
        for name, x in (("dq", q), ("dk", k)):
            out[name] = out[name].unflatten(2, (-1, grouped)).sum(3).to(x.dtype)
    return tuple(v.new_empty(0, dtype=torch.float32) if x is None else x for x in out.values())


@delta_backward.register_fake
def _(do, dlevels, q, k, v, g, beta, scales, documents, roots, scale, max_chunk):
    like = [dense_like(x) for x in (q, k, v, g, beta)]
    rest = [v.new_empty(0, dtype=torch.float32) if x is None else dense_like(x) for x in (scales, roots)]
    return (*like, *rest)


def _keep(ctx, inputs, output) -> None:
    *tensors, scale, max_chunk, state_levels = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)
    ctx.arguments = (scale, max_chunk)
    ctx.stateful = state_levels >= 0


def _backward(ctx, do, dlevels):
    *tensors, documents, roots = ctx.saved_tensors
    scales = tensors[-1]
    if do is None:
        do = torch.zeros_like(tensors[2])
    if not ctx.stateful:
        dlevels = None
    dq, dk, dv, dg, dbeta, dscales, droots = delta_backward(do, dlevels, *tensors, documents, roots, *ctx.arguments)
    return (
        dq, dk, dv, dg, dbeta,
        None if scales is None else dscales,
        None,
        None if roots is None else droots,
        None, None, None,
    )  # fmt: skip


delta_forward.register_autograd(_backward, setup_context=_keep)
