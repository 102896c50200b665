"""The short causal convolution that linear models place before their recurrence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from src.ops.checks import check_cu_seqlens, check_float, check_length, check_same, check_shape, check_state
from src.ops.chunks import document_lengths, document_of
from src.ops.state import ConvolutionState


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial_state: ConvolutionState | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, ConvolutionState | None]:
    """Depthwise and causal: ``y_t = bias + sum_{i<W} weight[:, W-1-i] * x_{t-i}``; inputs before the start are 0.

    ``x [B, T, D]``, ``weight [D, W]`` (the last column meets the token itself, as in ``torch.nn.Conv1d``),
    ``bias [D]``; sums in fp32. Returns ``(y [B, T, D], state or None)``; no activation. ``cu_seqlens`` and states as in
    ``src/ops/__init__.py``. Errors: ``ValueError``.
    """
    check_shape("x", x, "B T D")
    check_float("x", x)
    T, D = x.shape[1:]
    check_shape("weight", weight, "D W", D=D)
    check_same("weight", weight, "x", x, dtype=False)
    if bias is not None:
        check_shape("bias", bias, "D", D=D)
    check_length(T, cu_seqlens)
    check_cu_seqlens(cu_seqlens, x, "x")
    before = weight.shape[1] - 1
    lengths = document_lengths(x, cu_seqlens)
    documents = len(lengths)
    check_state(initial_state, ConvolutionState, documents, x)
    if initial_state is not None:
        past = initial_state.inputs.to(x.dtype)
        check_shape("initial_state.inputs", past, "N W-1 D", **{"N": documents, "W-1": before, "D": D})
    else:
        past = x.new_zeros(documents, before, D)

    if cu_seqlens is None:
        line = torch.cat([past, x], 1)
        taps = [line[:, before - i : before - i + T] for i in range(before + 1)]
        last = line[:, T:]
    else:
        starts = cu_seqlens[:-1].long()
        token = torch.arange(T, device=x.device)
        owner = document_of(token, cu_seqlens.long())
        offset = token - starts[owner]  # in the token's own document
        taps = [torch.where((offset >= i)[:, None], F.pad(x, (0, 0, i, 0))[:, :T], 0) for i in range(before + 1)]
        # All inputs in one list, the past of every document behind the tokens: what reaches before this call.
        line = torch.cat([x[0], past.flatten(0, 1)])
        if initial_state is not None:
            for i in range(1, before + 1):
                place = torch.where(offset < i, T + owner * before + before + offset - i, 0)
                taps[i] = torch.where((offset < i)[:, None], line.index_select(0, place), taps[i])
        offset = lengths[:, None] - torch.arange(before, 0, -1, device=x.device)
        in_past = T + torch.arange(documents, device=x.device)[:, None] * before + before + offset
        last = line[torch.where(offset >= 0, starts[:, None] + offset, in_past)]

    dtype = torch.promote_types(x.dtype, torch.float32)
    weight = weight.to(dtype)
    y = sum(weight[:, before - i] * tap for i, tap in enumerate(taps))
    if bias is not None:
        y = y + bias
    y = y.to(x.dtype)
    if not return_state:
        return y, None
    positions = lengths if initial_state is None else initial_state.positions + lengths
    return y, ConvolutionState(positions, last)
