"""The published initialisation of data-dependent decay (Mamba-2, and Gated DeltaNet after it)."""

import math

import torch
from torch import Tensor, nn


@torch.no_grad()
def init_decay(A_log: Tensor, dt_bias: Tensor, dt_min: float, dt_max: float, dt_floor: float) -> None:
    """`exp(A_log) ~ U(1, 16)`; `softplus(dt_bias)` log-uniform in `[dt_min, dt_max]`, at least `dt_floor`.

    A time step outside that range costs quality visibly: with dt near 1 a head forgets within one token.
    """
    nn.init.uniform_(A_log, 1, 16).log_()
    nn.init.uniform_(dt_bias, math.log(dt_min), math.log(dt_max)).exp_().clamp_(min=dt_floor)
    dt_bias.add_(torch.log(-torch.expm1(-dt_bias)))  # the inverse of softplus, exact for small dt
