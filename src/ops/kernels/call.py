"""The four recurrent operators on kernels: documents, states and decoding around those of ``ssd.py`` and ``delta/``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from src.ops.chunks import document_lengths, packed_chunks
from src.ops.fenwick import CHUNK_BITS, CHUNK_LEVELS, CHUNK_SIZE
from src.ops.kernels.decode import step
from src.ops.kernels.decode_delta import step_delta
from src.ops.kernels.delta.ops import delta_forward
from src.ops.kernels.ssd import documents_of, ssd_forward
from src.ops.state import LinearState, LogLinearState


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    scales: Tensor | None,
    *,
    scale: float,
    initial_state: LinearState | LogLinearState | None,
    return_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, LinearState | LogLinearState | None]:
    """``beta`` makes it the delta rule, ``scales`` log-linear; arguments are taken as valid."""
    one_token = v.shape[1] == 1 and cu_seqlens is None and return_state and initial_state is not None
    if one_token and not _needs_gradients((q, k, v, g, beta, scales), initial_state):
        if beta is None:
            return step(q, k, v, g, scales, initial_state, scale)
        return step_delta(q, k, v, g, beta, scales, initial_state, scale)
    if scales is None:
        return _linear(q, k, v, g, beta, scale, initial_state, return_state, cu_seqlens)
    if initial_state is not None:
        return _continued(q, k, v, g, beta, scales, scale, initial_state, return_state, cu_seqlens)
    T = v.shape[1]
    capacity = max((T >> CHUNK_BITS).bit_length(), scales.shape[-1] - CHUNK_LEVELS) if return_state else -1
    documents = None if cu_seqlens is None else documents_of(cu_seqlens)
    o, levels = _forward(q, k, v, g, beta, scales, documents, None, scale, 0, capacity)
    if not return_state:
        return o, None
    lengths = document_lengths(v, cu_seqlens)
    raw = (None if x is None else _unfinished(x, cu_seqlens, lengths) for x in (k, v, g, beta))
    return o, LogLinearState(lengths, levels, *raw, max_position=T)


def _forward(q, k, v, g, beta, *rest):
    return ssd_forward(q, k, v, g, *rest) if beta is None else delta_forward(q, k, v, g, beta, *rest)


def _needs_gradients(tensors: tuple[Tensor | None, ...], state: LinearState | LogLinearState) -> bool:
    if isinstance(state, LinearState):
        carried = [state.memory]
    else:
        carried = [state.levels, state.k, state.v, state.g, state.beta]
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in [*tensors, *carried])


def _linear(q, k, v, g, beta, scale, old, return_state, cu_seqlens):
    documents = None if cu_seqlens is None else documents_of(cu_seqlens)
    memory = None if old is None else old.memory
    o, memory = _forward(q, k, v, g, beta, None, documents, memory, scale, 0, 0 if return_state else -1)
    if not return_state:
        return o, None
    positions = document_lengths(v, cu_seqlens)
    return o, LinearState(positions if old is None else old.positions + positions, memory)


def _continued(q, k, v, g, beta, scales, scale, old, return_state, cu_seqlens):
    """The tokens of the state's unfinished chunk come first, so that every document begins at a chunk boundary."""
    bound = old.max_position
    if old.in_place:  # decoding may have gone on behind what was asked for: as far as the levels reach
        bound = max(bound, (CHUNK_SIZE << len(old.levels)) - 1)
    chunks = packed_chunks(v, cu_seqlens, old.positions, bound, keep_last=return_state)
    q, scales = chunks.gather(q), chunks.gather(scales)
    old_raw = (old.k, old.v, old.g, old.beta)
    k, v, g, beta = (
        None if x is None else chunks.gather(x, raw) for x, raw in zip((k, v, g, beta), old_raw, strict=True)
    )
    seen = chunks.seq_len if cu_seqlens is None else cu_seqlens.diff().long()
    documents = torch.stack(
        [
            chunks.first * CHUNK_SIZE,
            old.positions % CHUNK_SIZE + seen,
            (old.positions >> CHUNK_BITS).clamp(max=bound >> CHUNK_BITS),
        ]
    )
    flat = [None if x is None else x.flatten(0, 1)[None] for x in (q, k, v, g, beta, scales)]
    most = bound + chunks.seq_len
    capacity = max((most >> CHUNK_BITS).bit_length(), scales.shape[-1] - CHUNK_LEVELS, len(old.levels))
    roots = old.levels if len(old.levels) else None
    o, levels = _forward(*flat, documents, roots, scale, bound >> CHUNK_BITS, capacity if return_state else -1)
    o = chunks.scatter(o[0].unflatten(0, (-1, CHUNK_SIZE)))
    if not return_state:
        return o, None
    raw = (None if x is None else x.index_select(0, chunks.last)[:, : CHUNK_SIZE - 1] for x in (k, v, g, beta))
    return o, LogLinearState(old.positions + seen, levels, *raw, max_position=most)


def _unfinished(x: Tensor, cu_seqlens: Tensor | None, lengths: Tensor) -> Tensor:
    """``[N, 63, *]``: the tokens behind each document's last chunk boundary, zeros behind them."""
    if cu_seqlens is None:
        rest = x[:, x.shape[1] >> CHUNK_BITS << CHUNK_BITS :]
        return F.pad(rest, [0, 0] * (x.ndim - 2) + [0, CHUNK_SIZE - 1 - rest.shape[1]])
    slot = torch.arange(CHUNK_SIZE - 1, device=x.device)
    token = (cu_seqlens[:-1].long() + (lengths >> CHUNK_BITS << CHUNK_BITS))[:, None] + slot
    there = token < cu_seqlens.long()[1:, None]
    taken = x[0].index_select(0, token.clamp(max=x.shape[1] - 1).flatten()).unflatten(0, token.shape)
    return torch.where(there.view(*there.shape, *[1] * (x.ndim - 2)), taken, 0)
