r"""Linear and log-linear attention, chunk by chunk: matrix products only, O(T) and O(T log T).

This is the file to read. Per head, with a log decay ``g_t <= 0``, its running sum ``G`` inside the chunk, write
strengths ``beta_t`` and level scales ``lambda_{t,l}``, the four operators are

    o_t = sum_{s <= t}  lambda_{t, level(t, s)}  exp(G_t - G_s)  P_ts  v_s .

``P = tril(q k^T) T``, where ``T`` is the identity for scalar decay (Mamba-2), and for the delta rule

    T = (I + strictly_lower(diag(beta) k k^T))^{-1} diag(beta).

``lambda = 1`` gives the linear model. Two observations make it one algorithm (notation: a chunk of C tokens as
rows of q, k, v; a state S is K x V and is read as q^T S):

1. **Gates factor out.** ``exp(G_t - G_s) exp(G_s) = exp(G_t)``: transitions and gates commute, so the delta
   rule's corrections ``T`` can be made first, once a chunk, whatever the gates and levels are:

       P  = tril(q k^T) T     what attends inside the chunk
       k~ = T^T k             keys as they are written
       q~ = q - P k           queries as they see states from before the chunk
       R  = I - k~^T k        what the chunk does to those states, besides decay

   For scalar decay these are ``q k^T, k, q`` and ``I``.
2. **Levels are a tree over chunks** (see ``fenwick.py`` and ``tree.py``). A chunk's own state, its leaf, is
   ``k~^T diag(exp(G_C - G)) v``; its transition is ``exp(G_C) R``. Chunk ``b`` reads one group of chunks a set
   bit of ``b``:

       o_t  =  [(P * D * M) v]_t  +  sum_j  lambda_{t, c+1+j} exp(G_t) q~_t^T H_j[b]
               inside the chunk      the group of 2^j chunks at bit j, as b sees it

   with ``D_ts = exp(G_t - G_s)`` and ``M_ts = lambda_{t, level(t,s)}``.

Exponents are differences of sums of ``g <= 0`` in time order, so never positive; they are masked and clamped
before ``exp``. Where a position needs more levels than there are scales, the last scale serves all higher ones.
Everything is computed in fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from src.ops.chunks import Chunks, dense_chunks, document_lengths, is_dynamic, packed_chunks
from src.ops.fenwick import CHUNK_LEVELS, CHUNK_SIZE, level_matrix
from src.ops.state import LinearState, LogLinearState
from src.ops.tree import Transition, build, prefixes, reads

BLOCK_BYTES = 2 << 20
"""Size of one C x C matrix a head for a block of chunks; see ``_inside``."""


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    level_scales: Tensor | None,
    *,
    scale: float,
    initial_state: LinearState | LogLinearState | None,
    return_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, LinearState | LogLinearState | None]:
    """All four operators: ``beta`` makes it the delta rule, ``level_scales`` log-linear.

    Shapes as in the operator contract (``src/ops/__init__.py``); arguments are taken as valid. When gradients
    are needed, the inputs are kept and the rest is computed again in the backward pass: the states of all
    levels would take O(T log T) memory.
    """
    loglinear = level_scales is not None
    old = initial_state
    if old is None and cu_seqlens is None:
        chunks = dense_chunks(v, keep_last=return_state)
    else:
        # Only the levels depend on absolute positions; linear states carry no unfinished chunk.
        at = old.positions if loglinear and old is not None else None
        most = 0 if at is None else int(at.max()) if is_dynamic(v) else old.max_position
        chunks = packed_chunks(v, cu_seqlens, at, most, keep_last=return_state)

    tensors = (q, k, v, g, beta, level_scales)
    carried = () if old is None else (old.levels, old.k, old.v, old.g, old.beta) if loglinear else (old.memory,)
    if loglinear and old is not None and old.in_place:  # the new state may keep the levels
        carried = (old.levels.clone(), *carried[1:])
    run = _loglinear if loglinear else _linear
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*tensors, *carried)):
        o, new = checkpoint(
            run, chunks, tensors, carried, scale, return_state, use_reentrant=False, preserve_rng_state=False
        )
    else:
        o, new = run(chunks, tensors, carried, scale, return_state)
    if not return_state:
        return o, None
    seen = document_lengths(v, cu_seqlens)
    positions = seen if old is None else old.positions + seen
    if not loglinear:
        return o, LinearState(positions, new[0])
    most = int(positions.max()) if is_dynamic(v) else v.shape[1] + (0 if old is None else old.max_position)
    return o, LogLinearState(positions, *new, max_position=most)


def _linear(chunks, tensors, carried, scale, return_state):
    q, k, v, g, beta, _ = (None if x is None else chunks.gather(x) for x in tensors)
    o, reader, decay, leaf, transition = _inside((q, k, v, g, beta, None), scale)
    levels = build(chunks, leaf, transition, None)
    before = prefixes(chunks, levels, leaf, carried[0] if carried else None)
    o = o + decay[..., None] * (reader @ before)
    new = None
    if return_state:
        last = chunks.last
        new = (transition[last].apply(before[last]) + leaf[last],)
    return chunks.scatter(o.transpose(1, 2)).to(tensors[2].dtype), new


def _loglinear(chunks, tensors, carried, scale, return_state):
    levels, *buffers = carried or (None,) * 5
    q, k, v, g, beta, scales = tensors
    q, scales = chunks.gather(q), chunks.gather(scales)
    k, v, g, beta = (
        None if x is None else chunks.gather(x, old) for x, old in zip((k, v, g, beta), buffers, strict=True)
    )
    o, reader, decay, leaf, transition = _inside((q, k, v, g, beta, scales), scale)
    raw = (None if x is None else x[chunks.last, : CHUNK_SIZE - 1] for x in (k, v, g, beta)) if return_state else ()

    if levels is not None and chunks.finish_none():
        read = _read_as_they_are(chunks, levels, reader, decay, tensors[5])
        out = (chunks.scatter(o.transpose(1, 2)) + read).to(tensors[2].dtype)
        return out, (levels, *raw) if return_state else None
    width, H, C, V = o.shape
    o = torch.cat([o, o.new_zeros(1, H, C, V)])  # one place more: padded readers land there
    kept = []
    for j, at, seen in reads(chunks, build(chunks, leaf, transition, levels)):
        inside = at.clamp(max=width - 1)
        weight = scales[..., min(CHUNK_LEVELS + j, scales.shape[-1] - 1)].mT.to(o.dtype)  # [M, H, C]
        strength = (decay * weight).index_select(0, inside)
        o.index_add_(0, at, strength[..., None] * (reader.index_select(0, inside) @ seen))
        if return_state:
            kept.append(_rows_of(chunks, j, at, seen))
    out = chunks.scatter(o[:width].transpose(1, 2)).to(tensors[2].dtype)
    if not return_state:
        return out, None
    capacity = max(len(kept), scales.shape[-1] - CHUNK_LEVELS, 0 if levels is None else len(levels))
    empty = leaf.new_zeros(1, len(chunks.last), *leaf.shape[1:])
    kept = torch.cat([empty[:0], *(x[None] for x in kept), *[empty] * (capacity - len(kept))])
    return out, (kept, *raw)


def _read_as_they_are(chunks: Chunks, levels: Tensor, reader: Tensor, decay: Tensor, scales: Tensor) -> Tensor:
    """What the new tokens read of the state's levels, ``[B, T, H, V]``, in a call that finishes no chunk.

    Levels change at the ends of chunks only, so most tokens of a generation come by here: one product, where the
    tree takes a dozen steps for each level.
    """
    reader, decay = (chunks.scatter(x.transpose(1, 2)).transpose(1, 2) for x in (reader, decay))  # [B, H, T, …]
    j = torch.arange(len(levels), device=levels.device)
    weight = scales[..., (CHUNK_LEVELS + j).clamp(max=scales.shape[-1] - 1)].to(decay.dtype)  # [B, T, H, J]
    weight = torch.where((chunks.begin[:, None] >> j & 1 == 1)[:, None, None], weight, 0)
    weight = weight.transpose(1, 2) * decay[..., None]
    if levels.is_inference() and torch.is_grad_enabled():
        levels = levels.clone()  # autograd cannot keep it otherwise
    seen = reader @ levels.to(reader.dtype)  # [J, B, H, T, V]
    return (weight.movedim(-1, 0)[..., None] * seen).sum(0).transpose(1, 2)


def _inside(tensors, scale):
    """Everything that needs one chunk alone, for all chunks: output, q~, exp(G), leaf and transition.

    Chunks go through in blocks whose C x C squares stay in a CPU's cache: 1.2 times as fast at 16,384 tokens,
    and the squares of all chunks never stand in memory at once. A compiler fuses instead.
    """
    M, _, H = tensors[2].shape[:3]
    size = max(1, BLOCK_BYTES // (4 * H * CHUNK_SIZE**2))
    if torch.compiler.is_compiling() or size >= M:
        *parts, log_decay, matrix = _inside_block(*tensors, scale)
        return *parts, Transition(log_decay, matrix)
    blocks = [
        _inside_block(*(None if x is None else x[i : i + size] for x in tensors), scale) for i in range(0, M, size)
    ]
    *parts, log_decay, matrix = (None if x[0] is None else torch.cat(x) for x in zip(*blocks, strict=True))
    return *parts, Transition(log_decay, matrix)


def _inside_block(q, k, v, g, beta, scales, scale):
    dtype = torch.promote_types(v.dtype, torch.float32)
    H = v.shape[2]
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))  # [M, G or H, C, K or V]
    g, beta = (None if x is None else x.to(dtype).transpose(1, 2) for x in (g, beta))  # [M, H, C]
    repeat = H // q.shape[1]

    G = g.cumsum(-1)
    # The diagonal is 1 whatever the gates are. Left in the graph, its two equal gradients would cancel only up
    # to rounding, which at strong decay is all that remains of the gates' gradient.
    D = (G[..., :, None] - G[..., None, :]).tril(-1).clamp(max=0).exp().tril()
    P = (scale * q @ k.mT).tril()
    q, k, P = (x.repeat_interleave(repeat, 1) if repeat > 1 else x for x in (scale * q, k, P))
    writer, matrix = k, None  # k~ and R
    if beta is not None:
        N = (beta[..., None] * (k @ k.mT)).tril(-1)
        eye = torch.eye(CHUNK_SIZE, dtype=dtype, device=v.device).expand_as(N)
        T = torch.linalg.solve_triangular(N, eye, upper=False, unitriangular=True) * beta[..., None, :]
        P = P @ T
        writer = T.mT @ k
        q = q - P @ k
        matrix = torch.eye(k.shape[-1], dtype=dtype, device=v.device) - writer.mT @ k
    attention = P * D
    if scales is not None:
        attention = attention * _spread(scales.to(dtype))
    o = attention @ v
    leaf = writer.mT @ ((G[..., -1:] - G).clamp(max=0).exp()[..., None] * v)
    return o, q, G.clamp(max=0).exp(), leaf, G[..., -1], matrix


def _spread(scales: Tensor) -> Tensor:
    """``[M, C, H, L]`` -> ``M_ts = lambda_{t, level(t, s)}``, ``[M, H, C, C]`` (anything above the diagonal)."""
    index = level_matrix(CHUNK_SIZE, scales.device).clamp(max=scales.shape[-1] - 1)
    scales = scales.transpose(1, 2)
    if scales.is_cuda:
        # The backward pass of gather adds by atomics there, in another order each time; this is a product.
        one_hot = F.one_hot(index, scales.shape[-1]).to(scales.dtype)
        return torch.einsum("mhtl,tsl->mhts", scales, one_hot)
    return scales.gather(-1, index.expand(*scales.shape[:2], -1, -1))


def _rows_of(chunks: Chunks, j: int, at: Tensor, seen: Tensor) -> Tensor:
    """Of the states that level ``j``'s readers see, those at the documents' ends: ``[N, H, K, V]``."""
    place = torch.zeros(len(chunks) + 1, dtype=torch.int64, device=at.device)
    place = place.index_copy(0, at, torch.arange(len(at), device=at.device))
    there = (chunks.index[chunks.last] >> j & 1 == 1)[:, None, None, None]
    if not len(at):
        return seen.new_zeros(len(chunks.last), *seen.shape[1:])
    return torch.where(there, seen[place[chunks.last]], 0)
