"""Rotary position embedding (Su et al., 2104.09864)."""

import torch
from torch import Tensor

from src.ops.chunks import document_of


def token_positions(
    batch: int,
    seq_len: int,
    device: torch.device,
    cu_seqlens: Tensor | None = None,
    start: Tensor | None = None,
) -> Tensor:
    """The position of every token in its own sequence, int64 `[B, T]`.

    With `cu_seqlens` they count from each document's begin; `start [N]` (a state's `.positions`, one a row
    or document) is what came before this call.
    """
    index = torch.arange(seq_len, device=device)
    if cu_seqlens is None:
        positions = index.expand(batch, seq_len)
        return positions if start is None else positions + start[:, None]
    document = document_of(index, cu_seqlens)
    positions = index - cu_seqlens.to(index.dtype)[document]
    return (positions if start is None else positions + start[document])[None]


def apply_rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate `x [B, T, H, K]` by its positions `[B, T]`; pairs are channels `(i, i + K/2)`, as in Llama.

    Angles `position · theta^(-2i/K)` are taken in fp32 (bf16 would lose whole turns); there is no table and
    so no longest length.
    """
    K = x.shape[-1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    frequency = theta ** (-torch.arange(0, K, 2, device=x.device, dtype=dtype) / K)
    angle = positions[..., None, None].to(dtype) * frequency  # [B, T, 1, K/2]
    cos, sin = angle.cos(), angle.sin()
    a, b = x.to(dtype).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
