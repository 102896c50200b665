"""An exponential moving average: the smallest complete mixer. Use it with `plugins=[tests/plugins/ema.py]`.

The file's name is the mixer's name (`mixer=ema`), and the fields of `Config` are its options
(`mixer.slowest=100`), typed, checked and listed by `--help`.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from src import ops
from src.errors import UserError
from src.layers import Linear
from src.mixers import Mixer
from src.ops import costs
from src.ops.state import State

HEAD_DIM = 16


class EMA(Mixer):
    """`h_t = a h_{t-1} + (1 - a) W_in x_t`, `y_t = W_out h_t`; a learned `a` in (0, 1) for 16 channels each."""

    @dataclass
    class Config(Mixer.Config):
        slowest: float = 64.0
        """Longest time constant `a / (1 - a)` at the start, in tokens; the shortest is 1."""

        def __post_init__(self) -> None:
            if self.slowest < 1:
                raise UserError(f"mixer.slowest={self.slowest}: must be at least 1 token")

    def __init__(self, config: Config, *, d_model: int, layer_idx: int, n_layers: int, max_seq_len: int) -> None:
        super().__init__(config, d_model=d_model, layer_idx=layer_idx, n_layers=n_layers, max_seq_len=max_seq_len)
        self.n_heads = d_model // HEAD_DIM
        self.in_proj = Linear(d_model, d_model)
        self.logit = nn.Parameter(torch.empty(self.n_heads))
        self.out_proj = Linear(d_model, d_model, std_scale=self.residual_scale)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.logit, 0, math.log(self.config.slowest))
        self.logit.no_weight_decay = True

    def mix(
        self, x: Tensor, state: State | None, cu_seqlens: Tensor | None, return_state: bool
    ) -> tuple[Tensor, State | None]:
        # An average is a linear recurrence whose queries and keys are one fixed vector of length 1. Stated
        # so, the operator brings the chunked form, packed documents, the decoding state and torch.compile.
        B, T, _ = x.shape
        unit = x.new_full((B, T, 1, 16), 0.25)
        v = F.sigmoid(-self.logit)[:, None] * self.in_proj(x).unflatten(-1, (self.n_heads, HEAD_DIM))
        g = F.logsigmoid(self.logit).expand(B, T, -1)
        h, state = ops.ssd(unit, unit, v, g, initial_state=state, return_state=return_state, cu_seqlens=cu_seqlens)
        return self.out_proj(h.flatten(-2)), state

    def flops_per_token(self, seq_len: int) -> float:
        recurrence = costs.ssd(seq_len, 1, self.n_heads, 16, HEAD_DIM)
        return self.in_proj.flops_per_token() + recurrence + self.out_proj.flops_per_token()

    def state_bytes(self, seq_len: int, dtype: torch.dtype = torch.float32) -> int:
        return costs.linear_state(self.n_heads, 16, HEAD_DIM, dtype)
