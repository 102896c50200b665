"""Softmax attention, with the same conventions as the other operators: packing, states, any length."""

from __future__ import annotations

from inspect import signature

import torch
import torch.nn.functional as F
from torch import Tensor, library

from src.ops.checks import (
    check_cu_seqlens,
    check_float,
    check_length,
    check_same,
    check_shape,
    check_state,
    check_state_tensor,
)
from src.ops.chunks import document_lengths
from src.ops.state import AttentionState


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    initial_state: AttentionState | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, AttentionState | None]:
    """Causal ``o_t = sum_{s <= t} softmax_s(q_t . k_s / sqrt(K)) v_s``.

    ``q [B, T, H, K]``, ``k [B, T, G, K]``, ``v [B, T, G, V]``, ``H % G == 0``: each key-value head serves
    ``H/G`` consecutive query heads. Returns ``(o [B, T, H, V], state or None)``; the state is the key-value
    cache. Packed documents go through variable-length attention on CUDA and one by one elsewhere, never
    through a dense mask. ``cu_seqlens`` and states as in ``src/ops/__init__.py``. Errors: ``ValueError``.
    """
    check_shape("q", q, "B T H K")
    check_float("q", q)
    B, T, H, K = q.shape
    check_shape("k", k, "B T G K", B=B, T=T, K=K)
    G = k.shape[2]
    check_shape("v", v, "B T G V", B=B, T=T, G=G)
    check_same("k", k, "q", q)
    check_same("v", v, "q", q)
    if G < 1 or H % G:
        raise ValueError(f"k must have a number of heads that divides the H={H} heads of q, got {G}")
    check_length(T, cu_seqlens)
    check_cu_seqlens(cu_seqlens, q, "q")
    lengths = document_lengths(q, cu_seqlens)
    check_state(initial_state, AttentionState, len(lengths), q)

    if initial_state is None:
        o = _sdpa(q, k, v, is_causal=True) if cu_seqlens is None else _packed(q, k, v, cu_seqlens)
        if not return_state:
            return o, None
        if cu_seqlens is None:
            return o, AttentionState(lengths, k, v, ragged=False)
        return o, _join(None, k, v, cu_seqlens)
    check_state_tensor("k", initial_state.k, tuple(k.shape[2:]))
    check_state_tensor("v", initial_state.v, tuple(v.shape[2:]))
    if cu_seqlens is not None:
        o, state = _continue_packed(q, k, v, initial_state, cu_seqlens)
        return o, state if return_state else None
    state = initial_state.append(k, v)
    return _continued(q, state), state if return_state else None


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1]
    )
    return o.transpose(1, 2)


def _continued(q: Tensor, state: AttentionState) -> Tensor:
    """New tokens ``q [B, T, H, K]`` against a cache whose last ``T`` entries are their own."""
    T, S = q.shape[1], state.k.shape[1]
    if T == 1 and not state.ragged:
        return _sdpa(q, state.k, state.v)
    place = torch.arange(S, device=q.device)
    mask = place <= S - T + torch.arange(T, device=q.device)[:, None]  # [T, S]
    if state.ragged:
        mask = mask & (place >= S - state.positions[:, None, None])  # [B, T, S]
        mask = mask[:, None]
    return _sdpa(q, state.k, state.v, mask)


def _packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    if q.device.type == "cuda" and q.dtype == torch.bfloat16 and q.shape[-1] == v.shape[-1] <= 256:
        return _varlen(q, k, v, cu_seqlens)  # what FlashAttention's kernel takes
    return attention_by_document(q, k, v, cu_seqlens)


def _varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # here, because it imports Triton

    # The option that makes it causal has changed its name between torch 2.11 and 2.13.
    windowed = "window_size" in signature(varlen_attn).parameters
    causal = {"window_size": (-1, 0)} if windowed else {"is_causal": True}
    repeat = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(repeat, 2) if repeat > 1 else x for x in (k, v))
    cu, longest = cu_seqlens.int(), q.shape[1]
    return varlen_attn(q[0], k[0], v[0], cu, cu, longest, longest, **causal)[None]


def _slices(cu_seqlens: Tensor) -> list[slice]:
    ends = cu_seqlens.tolist()
    return [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]


# One opaque operator, so that the loop over documents, whose number of steps depends on the data, neither breaks
# a compiled graph nor is unrolled into one.
@library.custom_op("loglinear::attention_by_document", mutates_args=())
def attention_by_document(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    o = q.new_zeros(*q.shape[:3], v.shape[-1])
    for part in _slices(cu_seqlens):
        if part.stop > part.start:
            o[:, part] = _sdpa(q[:, part], k[:, part], v[:, part], is_causal=True)
    return o


@attention_by_document.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[-1])


BLOCK = 512
"""Queries whose scores stand in memory at once in the backward pass below."""


@library.custom_op("loglinear::attention_by_document_backward", mutates_args=())
def attention_by_document_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """With ``P`` the weights: ``dV = P^T dO``, ``dS = P * (dO V^T - rowsum(dO * O))``, ``dQ = dS K, dK = dS^T Q``."""
    H, G = q.shape[2], k.shape[2]
    scale = q.shape[-1] ** -0.5
    dtype = q.dtype
    do, q, k, v, o = (x.to(torch.promote_types(dtype, torch.float32)) for x in (do, q, k, v, o))
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for part in _slices(cu_seqlens):
        # [G, H/G, T, …] for what queries own, [G, 1, T, …] for keys and values
        queries = [x[0, part].unflatten(1, (G, H // G)).permute(1, 2, 0, 3) for x in (q, o, do)]
        keys, values = (x[0, part].transpose(0, 1)[:, None] for x in (k, v))
        for start in range(0, part.stop - part.start, BLOCK):
            q_, o_, do_ = (x[:, :, start : start + BLOCK] for x in queries)
            end = start + q_.shape[2]
            k_, v_ = keys[:, :, :end], values[:, :, :end]
            future = torch.ones(end - start, end, dtype=torch.bool, device=q.device).triu(start + 1)
            P = (scale * q_ @ k_.mT).masked_fill(future, -torch.inf).softmax(-1)
            dS = scale * P * (do_ @ v_.mT - (do_ * o_).sum(-1, keepdim=True))
            here, past = slice(part.start + start, part.start + end), slice(part.start, part.start + end)
            dq[0, here] = (dS @ k_).permute(2, 0, 1, 3).flatten(1, 2)
            dk[0, past] += (dS.mT @ q_).sum(1).transpose(0, 1)
            dv[0, past] += (P.mT @ do_).sum(1).transpose(0, 1)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


@attention_by_document_backward.register_fake
def _(do, q, k, v, o, cu_seqlens):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep_inputs(ctx, inputs, output) -> None:
    q, k, v, cu_seqlens = inputs
    ctx.save_for_backward(q, k, v, output, cu_seqlens)


def _backward(ctx, do: Tensor):
    return *attention_by_document_backward(do, *ctx.saved_tensors), None


attention_by_document.register_autograd(_backward, setup_context=_keep_inputs)


def _join(old: AttentionState | None, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> AttentionState:
    """Append each document's keys and values to its row of the cache, aligned at the right."""
    parts = _slices(cu_seqlens)
    rows: list[list[Tensor]] = [[], []]
    for n, part in enumerate(parts):
        for row, new, name in zip(rows, (k, v), ("k", "v"), strict=True):
            live = new[0, part]
            if old is not None:
                cache = getattr(old, name)[n].to(new.dtype)
                live = torch.cat([cache[cache.shape[0] - int(old.positions[n]) :], live])
            row.append(live)
    longest = max(len(x) for x in rows[0])
    k, v = (torch.stack([F.pad(x, (0, 0, 0, 0, longest - len(x), 0)) for x in row]) for row in rows)
    lengths = torch.tensor([len(x) for x in rows[0]], device=k.device)
    return AttentionState(lengths, k, v, ragged=bool((lengths < longest).any()))


def _continue_packed(q, k, v, old: AttentionState, cu_seqlens: Tensor) -> tuple[Tensor, AttentionState]:
    state = _join(old, k, v, cu_seqlens)
    outputs = []
    for n, part in enumerate(_slices(cu_seqlens)):
        if part.stop > part.start:
            S, live = state.k.shape[1], int(state.positions[n])
            row = AttentionState(
                state.positions[n : n + 1],
                state.k[n : n + 1, S - live :],
                state.v[n : n + 1, S - live :],
                False,
            )
            outputs.append(_continued(q[:, part], row))
    return torch.cat(outputs, 1) if outputs else torch.empty_like(v[:, :0]), state
