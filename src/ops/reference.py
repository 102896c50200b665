"""Two slow forms of the same operators that are easy to believe: what the fast ones are tested against.

:func:`recurrent` is the definition, token by token; :func:`parallel` is one masked T x T matrix. Both are
differentiable and run on any device; both serve all four operators, as ``chunked`` does: ``beta`` makes it the
delta rule, ``level_scales`` log-linear. Shapes as in the operator contract (``src/ops/__init__.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from src.ops.fenwick import CHUNK_LEVELS, CHUNK_SIZE, level_matrix, merged_levels
from src.ops.state import LinearState, LogLinearState


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    level_scales: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: LinearState | LogLinearState | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, LinearState | LogLinearState | None]:
    """The definition. At each token: merge, transition, insert, read.

    S[z+1] = S[0] + … + S[z]                       where the step from t-1 to t says so (log-linear only)
    S[l]   = exp(g_t) (I - beta_t k_t k_t^T) S[l]  for every level; without the bracket for scalar decay
    S[0]   = beta_t k_t v_t^T
    o_t    = sum_l lambda_{t,l} scale q_t^T S[l]
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    outputs, states = [], []
    for n, tokens in enumerate(_documents(q, k, v, g, beta, level_scales, cu_seqlens)):
        old = None if initial_state is None else initial_state.select([n])
        cells = [None if x is None else x.to(dtype) for x in tokens]
        o, state = _recurrent_document(*cells, scale, old, [x for x in tokens[1:5] if x is not None])
        outputs.append(o.to(v.dtype))
        states.append(state)
    o = torch.cat(outputs, 1 if cu_seqlens is not None else 0)
    return o, _stack(states, level_scales) if return_state else None


def _recurrent_document(q, k, v, g, beta, scales, scale, old, raw):
    T, H = v.shape[1:3]
    loglinear = scales is not None
    at = 0 if old is None else int(old.positions)
    dtype = v.dtype
    memory: dict[int, Tensor] = {}  # level -> [H, K, V]
    boundary: dict[int, Tensor] = {}  # the same at the last chunk boundary
    replay = 0
    if loglinear and old is not None:
        memory = {CHUNK_LEVELS + j: s[0].to(dtype) for j, s in enumerate(old.levels) if at // CHUNK_SIZE >> j & 1}
        boundary = dict(memory)
        replay = at % CHUNK_SIZE
        buffers = [x for x in (old.k, old.v, old.g, old.beta) if x is not None]
        raw = [torch.cat([x[:, :replay].to(y.dtype), y], 1) for x, y in zip(buffers, raw, strict=True)]
        k, v, g = (x.to(dtype) for x in raw[:3])
        beta = raw[3].to(dtype) if beta is not None else None
    elif old is not None:
        memory = {0: old.memory[0].to(dtype)}
    start = at - replay
    heads = H // k.shape[2]
    outputs = []
    for i in range(T + replay):
        t = start + i
        if loglinear and t:
            if t > start or not replay:
                level = merged_levels(t)
                merged = sum(memory.pop(low) for low in range(level) if low in memory)
                memory[level] = merged if level not in memory else memory[level] + merged
            if t % CHUNK_SIZE == 0:
                boundary = dict(memory)
        k_t = k[0, i].repeat_interleave(heads, 0)[..., None]  # [H, K, 1]
        v_t = v[0, i, :, None, :]  # [H, 1, V]
        decay = g[0, i].exp()[:, None, None]
        for level, S in memory.items():
            if beta is not None:
                S = S - beta[0, i][:, None, None] * k_t * (k_t.mT @ S)
            memory[level] = decay * S
        new = k_t * v_t if beta is None else beta[0, i][:, None, None] * k_t * v_t
        memory[0] = new if loglinear or 0 not in memory else memory[0] + new
        if i < replay:
            continue
        q_t = scale * q[0, i - replay].repeat_interleave(heads, 0)[:, None, :]  # [H, 1, K]
        o_t = v.new_zeros(H, v.shape[-1])
        for level, S in memory.items():
            read = (q_t @ S)[:, 0]
            if loglinear:
                read = scales[0, i - replay, :, min(level, scales.shape[-1] - 1)][:, None] * read
            o_t = o_t + read
        outputs.append(o_t)
    end = at + T
    o = torch.stack(outputs)[None] if outputs else v.new_zeros(1, 0, H, v.shape[-1])
    if not loglinear:
        zero = v.new_zeros(H, k.shape[-1], v.shape[-1])
        return o, (end, memory.get(0, zero))
    if end % CHUNK_SIZE == 0 and end and end != at:  # the merge that position ``end`` will begin with
        level = merged_levels(end)
        memory[level] = sum(memory.pop(low) for low in range(level) if low in memory)
        boundary = dict(memory)
    kept = end % CHUNK_SIZE
    return o, (end, boundary, [x[:, x.shape[1] - kept :] for x in raw])


def _stack(states: list, level_scales: Tensor | None) -> LinearState | LogLinearState:
    """One state of all documents."""
    if level_scales is None:
        memory = torch.stack([memory for _, memory in states])
        return LinearState(torch.tensor([end for end, _ in states], device=memory.device), memory)
    ends = [end for end, _, _ in states]
    device = level_scales.device
    bits = max((end // CHUNK_SIZE).bit_length() for end in ends)
    raws = [
        torch.cat([torch.cat([x, x.new_zeros(1, CHUNK_SIZE - 1 - x.shape[1], *x.shape[2:])], 1) for x in each])
        for each in zip(*(raw for _, _, raw in states), strict=True)
    ]
    k, v = raws[:2]
    dtype = torch.promote_types(v.dtype, torch.float32)
    zero = torch.zeros(v.shape[2], k.shape[-1], v.shape[-1], dtype=dtype, device=device)
    rows = [torch.stack([boundary.get(CHUNK_LEVELS + j, zero) for _, boundary, _ in states]) for j in range(bits)]
    spare = max(0, level_scales.shape[-1] - CHUNK_LEVELS - bits)
    levels = torch.stack(rows + [torch.stack([zero] * len(ends))] * spare) if rows or spare else zero[None, None][:0]
    beta = raws[3] if len(raws) > 3 else None
    return LogLinearState(torch.tensor(ends, device=device), levels, k, v, raws[2], beta, max(ends))


def parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    level_scales: Tensor | None = None,
    *,
    scale: float = 1.0,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """``o = (P * D * M) v``: O(T^2) time and memory.

    ``D_ts = exp(G_t - G_s)``, ``M_ts = lambda_{t, level(t,s)}``, ``P = tril(q k^T)``, for the delta rule
    ``P = tril(q k^T) (I + strictly_lower(diag(beta) k k^T))^{-1} diag(beta)``.
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    outputs = []
    for tokens in _documents(q, k, v, g, beta, level_scales, cu_seqlens):
        q_, k_, v_, g_, beta_, scales = (None if x is None else x.to(dtype).transpose(1, 2) for x in tokens)
        T, heads = v_.shape[2], v_.shape[1] // k_.shape[1]
        q_, k_ = (x.repeat_interleave(heads, 1) for x in (q_, k_))
        P = (scale * q_ @ k_.mT).tril()
        if beta_ is not None:
            inverse = torch.linalg.inv(
                torch.eye(T, dtype=dtype, device=v.device) + (beta_[..., None] * (k_ @ k_.mT)).tril(-1)
            )
            P = P @ inverse * beta_[..., None, :]
        G = g_.cumsum(-1)
        D = (G[..., :, None] - G[..., None, :]).tril().exp().tril()
        A = P * D
        if scales is not None:
            index = level_matrix(T, v.device).clamp(max=scales.shape[-1] - 1)
            A = A * scales.gather(-1, index.expand(*scales.shape[:2], T, T))
        outputs.append((A @ v_).transpose(1, 2).to(v.dtype))
    return torch.cat(outputs, 1 if cu_seqlens is not None else 0)


def _documents(q, k, v, g, beta, scales, cu_seqlens):
    """Each row or document by itself, as ``[1, T_n, …]``."""
    tensors = (q, k, v, g, beta, scales)
    if cu_seqlens is None:
        return [[None if x is None else x[n : n + 1] for x in tensors] for n in range(v.shape[0])]
    ends = cu_seqlens.tolist()
    return [[None if x is None else x[:, a:b] for x in tensors] for a, b in zip(ends[:-1], ends[1:], strict=True)]
