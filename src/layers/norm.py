"""Normalisations. Statistics are taken in fp32 (fp64 for fp64 inputs) whatever the activations' dtype."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def upcast(x: Tensor) -> Tensor:
    """To fp32 if `x` is narrower; fp64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def l2_normalise(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`x / sqrt(Σ x² + eps)` over the last axis, in x's dtype.

    `eps` stands inside the root, as in flash-linear-attention: dividing by a norm has a NaN gradient at a
    zero vector, this has a finite one.
    """
    x32 = upcast(x)
    return (x32 * torch.rsqrt(x32.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


class RMSNorm(nn.Module):
    """`y = weight · x / sqrt(mean(x²) + eps)` over the last axis, in x's dtype."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        x32 = upcast(x)
        return F.rms_norm(x32, x32.shape[-1:], self.weight.to(x32.dtype), self.eps).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """RMSNorm with a SiLU gate `z`: `norm(x · silu(z))` if `gate_first`, else `norm(x) · silu(z)`.

    Mamba-2 (`RMSNormGated` of mamba-ssm) gates first and normalises over groups of `group_size` channels of
    one `dim`-wide vector; Gated DeltaNet gates last and normalises every head, with one weight for all.
    """

    def __init__(self, dim: int, *, gate_first: bool, group_size: int | None = None, eps: float = 1e-5) -> None:
        super().__init__()
        self.gate_first = gate_first
        self.group_size = dim if group_size is None else group_size
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        x32, gate = upcast(x), F.silu(upcast(z))
        if self.gate_first:
            x32 = x32 * gate
        grouped = x32.unflatten(-1, (-1, self.group_size))
        y = F.rms_norm(grouped, (self.group_size,), None, self.eps).flatten(-2) * self.weight.to(x32.dtype)
        return (y if self.gate_first else y * gate).to(x.dtype)
