"""The feed-forward half of a block."""

import torch.nn.functional as F
from torch import Tensor, nn

from src.layers.linear import Linear


class SwiGLU(nn.Module):
    """`y = W_down (silu(W_gate x) · W_up x)`, the gate and the value in one product (Shazeer, 2002.05202)."""

    def __init__(self, d_model: int, hidden: int, *, std_scale: float = 1.0) -> None:
        super().__init__()
        self.up_proj = Linear(d_model, 2 * hidden)
        self.down_proj = Linear(hidden, d_model, std_scale=std_scale)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * value)

    def flops_per_token(self) -> float:
        return self.up_proj.flops_per_token() + self.down_proj.flops_per_token()
