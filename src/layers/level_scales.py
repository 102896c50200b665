"""The scales that weigh the levels of a log-linear mixer's memory."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from src.layers.linear import Linear
from src.layers.norm import upcast


class LevelScales(nn.Module):
    """`λ[t, h, l] = softplus(L[h, l] · (W x_t)[h, l])`, at least 0, in fp32 (Guo et al., 2506.04761).

    `L [n_heads, n_levels]` starts at 1 and is not decayed, `W` has no bias. Published code keeps W as further
    rows of the mixer's input projection; it is a layer of its own here, so that the weights of the linear
    mixer load into the log-linear one unchanged.
    """

    def __init__(self, d_model: int, n_heads: int, n_levels: int) -> None:
        super().__init__()
        self.proj = Linear(d_model, n_heads * n_levels)
        self.L = nn.Parameter(torch.empty(n_heads, n_levels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.L)
        self.L.no_weight_decay = True

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(self.L * upcast(self.proj(x)).unflatten(-1, self.L.shape))
