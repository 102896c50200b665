"""``ssd`` and ``loglinear_ssd`` by Triton kernels, as operators that ``torch.compile`` and autograd know.

Read ``states.py``, ``forward.py``, ``between.py``, ``within.py`` and ``adjoints.py`` for the kernels, ``passes.py`` for
their order. Inputs are kept for the backward pass, everything else is computed again there.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor, library

from src.ops.kernels import check
from src.ops.kernels.passes import Pass
from src.ops.kernels.plan import first_tiles, plan_for
from src.ops.kernels.sizes import sizes_of


def _trust(
    v: Tensor, k: Tensor, g: Tensor, scales: Tensor | None, documents: Tensor | None, *, gradients: bool
) -> None:
    """Check the kernels that this kind of call takes, the first time."""
    K, V, L = k.shape[3], v.shape[3], None if scales is None else scales.shape[-1]
    dtypes = dtypes_of(g=g, scales=scales)
    tile = plan_for(v.dtype, K, V).tile
    short = v.shape[1] <= tile
    size_class = None if L is None else triton.next_power_of_2(L)
    kind = (v.device, v.dtype, K, V, size_class, documents is not None, short, gradients, *dtypes.values())

    def run() -> dict[str, float]:
        # Long enough for a tree of four levels, and for two groups of the four tiles that its passes take at a time.
        T = tile - 5 if short else 9 * tile + 77
        given = check.problem(T, K, V, L, v.dtype, v.device, **dtypes)
        cu_seqlens = None if documents is None else torch.tensor([0, T // 3, T], device=v.device)
        packing = None if documents is None else documents_of(cu_seqlens)

        def rest(x: dict[str, Tensor]) -> tuple:
            return x["q"], x["k"], x["v"], x["g"], x.get("scales"), packing, None, 1.0, 0

        def backward(do: Tensor, x: dict[str, Tensor]) -> dict[str, Tensor]:
            made = ssd_backward(do, None, *rest(x))
            return dict(zip(x, made, strict=False))  # the order of both is q, k, v, g, scales

        return check.errors(given, cu_seqlens, lambda x: ssd_forward(*rest(x), -1)[0], backward if gradients else None)

    check.ensure(kind, run, v.dtype)


def dtypes_of(**tensors: Tensor | None) -> dict[str, torch.dtype]:
    return {name: x.dtype for name, x in tensors.items() if x is not None}


def documents_of(cu_seqlens: Tensor) -> Tensor:
    """``[3, N]`` int64: where documents start, their tokens, their first chunk."""
    cu = cu_seqlens.long()
    lengths = cu.diff()
    return torch.stack([cu[:-1], lengths, torch.zeros_like(lengths)])


def new_states(k: Tensor, v: Tensor, scales: Tensor | None, documents: Tensor | None, state_levels: int) -> Tensor:
    """Memory for a call's new states: zeros for levels, of which some may hold none; nothing where none are wanted."""
    if state_levels < 0:
        return v.new_empty(0, dtype=torch.float32)
    N = v.shape[0] if documents is None else documents.shape[1]
    shape = (N, v.shape[2], k.shape[3], v.shape[3])
    if scales is None:
        return v.new_empty(shape, dtype=torch.float32)
    return v.new_zeros(state_levels, *shape, dtype=torch.float32)


def dense_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def dense(**tensors: Tensor | None) -> dict[str, Tensor | None]:
    return {name: None if x is None else x.contiguous() for name, x in tensors.items()}


def _tensors(q, k, v, g, scales, documents, scale: float) -> dict:
    """What the kernels read, by their names."""
    first = None
    if documents is not None:
        documents = documents.contiguous()
        first = first_tiles(documents, plan_for(v.dtype, k.shape[3], v.shape[3]))
    given = dense(q=q, k=k, v=v, g=g, scales=scales)
    return {**given, "documents": documents, "first": first, "scale": scale}


@library.custom_op("loglinear::ssd_forward", mutates_args=())
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
    _trust(v, k, g, scales, documents, gradients=False)
    (roots,) = dense(roots=roots).values()
    state = state_levels >= 0
    sizes = sizes_of(k, v, scales, documents, max_chunk, more=state or roots is not None, backward=False)
    levels = new_states(k, v, scales, documents, state_levels)
    with torch.cuda.device_of(v):
        tensors = _tensors(q, k, v, g, scales, documents, scale)
        o = torch.empty_like(tensors["v"])
        one = Pass(sizes, tensors, 0, sizes.blocks, roots)
        one.prepare(levels if state else None)
        one.output(o)
    return o, levels


@ssd_forward.register_fake
def _(q, k, v, g, scales, documents, roots, scale, max_chunk, state_levels):
    return dense_like(v), new_states(k, v, scales, documents, state_levels)


@library.custom_op("loglinear::ssd_backward", mutates_args=())
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
    _trust(v, k, g, scales, documents, gradients=True)
    do, dlevels, roots = dense(do=do, dlevels=dlevels, roots=roots).values()
    outside = dlevels is not None or roots is not None
    sizes = sizes_of(k, v, scales, documents, max_chunk, more=outside, backward=True)
    with torch.cuda.device_of(v):
        tensors = _tensors(q, k, v, g, scales, documents, scale)
        out = {
            "dq": q.new_empty(sizes.partials, *q.shape, dtype=torch.float32),
            "dk": k.new_empty(sizes.partials, *k.shape, dtype=torch.float32),
            "dv": torch.empty_like(tensors["v"]),
            "dg": torch.empty_like(tensors["g"]),
            "dscales": None if scales is None else torch.empty_like(tensors["scales"]),
            "droots": None if roots is None else torch.zeros_like(roots),
        }
        for block0 in range(0, sizes.blocks, sizes.blocks_a_pass):
            part = Pass(sizes, tensors, block0, sizes.blocks_a_pass, roots)
            part.prepare(None)
            part.backward(do, dlevels, out)
            del part  # its scratch goes before the next one's comes
    for name, x in (("dq", q), ("dk", k)):
        partial = out[name]
        out[name] = (partial[0] if len(partial) == 1 else partial.sum(0)).to(x.dtype)
    return tuple(v.new_empty(0, dtype=torch.float32) if x is None else x for x in out.values())


@ssd_backward.register_fake
def _(do, dlevels, q, k, v, g, scales, documents, roots, scale, max_chunk):
    like = [dense_like(x) for x in (q, k, v, g)]
    rest = [v.new_empty(0, dtype=torch.float32) if x is None else dense_like(x) for x in (scales, roots)]
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
