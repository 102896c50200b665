"""The scales that weigh the levels of a log-linear mixer's memory."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from src.layers.linear import Linear
from src.layers.norm import upcast

Beyond = Literal["last", "mean", "decay"]
FURTHER = 8
"""Levels that decay says a scale for: 256 times the trained length; the last of them serves all higher ones."""


class LevelScales(nn.Module):
    """`λ[t, h, l] = softplus(L[h, l] · (W x_t)[h, l])`, at least 0, in fp32 (Guo et al., 2506.04761).

    `L [n_heads, n_levels]` starts at 1 and is not decayed, `W` has no bias. Published code keeps W as further
    rows of the mixer's input projection; it is a layer of its own here, so that the weights of the linear
    mixer load into the log-linear one unchanged.

    A sequence beyond the trained length has levels without a scale. `beyond` says what serves them: "last" the scale
    of the last trained level (which the operators take by themselves), "mean" the mean of all trained levels, "decay"
    half the last one, then a quarter, and so on.
    """

    def __init__(self, d_model: int, n_heads: int, n_levels: int, beyond: Beyond = "last") -> None:
        super().__init__()
        self.beyond = beyond
        self.proj = Linear(d_model, n_heads * n_levels)
        self.L = nn.Parameter(torch.empty(n_heads, n_levels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.L)
        self.L.no_weight_decay = True

    def forward(self, x: Tensor) -> Tensor:
        scales = F.softplus(self.L * upcast(self.proj(x)).unflatten(-1, self.L.shape))  # [B, T, H, L]
        if self.beyond == "mean":
            return torch.cat([scales, scales.mean(-1, keepdim=True)], -1)
        if self.beyond == "decay":
            halves = 0.5 ** torch.arange(1, FURTHER + 1, device=x.device, dtype=scales.dtype)
            return torch.cat([scales, scales[..., -1:] * halves], -1)
        return scales
