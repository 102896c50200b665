"""The short causal convolution in front of a recurrence."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from src import ops
from src.ops import costs
from src.ops.state import State


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over time and SiLU: `y_t = silu(Σ_i w_i · x_{t-W+1+i} + b)`.

    `weight [D, W]` is `conv1d.weight [D, 1, W]` of published checkpoints without its middle axis; the last
    tap meets the current token. Initialised as `nn.Conv1d`.
    """

    def __init__(self, dim: int, width: int, *, bias: bool) -> None:
        super().__init__()
        self.dim, self.width = dim, width
        self.weight = nn.Parameter(torch.empty(dim, width))
        self.bias = nn.Parameter(torch.empty(dim)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.width**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(
        self, x: Tensor, state: State | None, cu_seqlens: Tensor | None, return_state: bool
    ) -> tuple[Tensor, State | None]:
        y, state = ops.short_convolution(
            x, self.weight, self.bias, initial_state=state, return_state=return_state, cu_seqlens=cu_seqlens
        )
        return F.silu(y), state

    def flops_per_token(self) -> float:
        return costs.short_convolution(self.dim, self.width)

    def state_bytes(self, dtype: torch.dtype) -> int:
        return costs.convolution_state(self.dim, self.width, dtype)
