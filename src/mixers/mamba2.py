"""Mamba-2 (Dao and Gu, 2405.21060): a linear recurrence with one scalar decay a head."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from src import ops
from src.errors import UserError
from src.layers import GatedRMSNorm, Linear, ShortConvolution, init_decay, upcast
from src.mixers._heads import (
    MAX_KEY_DIM,
    MAX_VALUE_DIM,
    check_dim,
    check_divides,
    split_heads,
)
from src.mixers._recurrent import RecurrentMixer
from src.ops import costs
from src.ops.state import MixerState, State


class Mamba2(RecurrentMixer):
    """`S_t = exp(A dt_t) S_{t-1} + B_t (dt_t x_t)ᵀ`, `y_t = C_tᵀ S_t + D x_t`, then `norm(y · silu(z))`.

    Parameters are those of `transformers`' `Mamba2Mixer` and of mamba-ssm, by the same names: one `in_proj`
    to `[z, x, B, C, dt]`, a causal depthwise convolution with SiLU over `x, B, C` (`conv.weight [D, W]` is
    their `conv1d.weight [D, 1, W]`), `dt = softplus(dt + dt_bias)`, `A = -exp(A_log)`, skip `D`, `norm`,
    `out_proj`. Decay and time step are fp32 under autocast too.
    """

    @dataclass
    class Config(RecurrentMixer.Config):
        expand: int = 2
        """Inner width over d_model."""
        n_heads: int | None = None
        """Heads; null: from head_dim."""
        head_dim: int | None = None
        """Channels of a head, a multiple of 16 up to 512; null: 64 if it divides the inner width."""
        d_state: int | None = None
        """State width N of B and C, a multiple of 16 up to 256; null: d_model / 2, between 16 and 128."""
        n_groups: int = 1
        """B and C are shared by n_heads / n_groups consecutive heads."""
        conv_bias: bool = True
        """Give the convolution a bias."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.expand < 1:
                raise UserError(f"mixer.expand={self.expand}: must be at least 1")

    config: Config

    def __init__(self, config: Config, *, d_model: int, layer_idx: int, n_layers: int, max_seq_len: int) -> None:
        super().__init__(config, d_model=d_model, layer_idx=layer_idx, n_layers=n_layers, max_seq_len=max_seq_len)
        self.d_inner = config.expand * d_model
        self.n_heads, self.head_dim = split_heads(
            self.d_inner, config.n_heads, config.head_dim, prefer=64, limit=MAX_VALUE_DIM
        )
        if self.n_heads * self.head_dim != self.d_inner:
            raise UserError(
                f"mixer.n_heads={self.n_heads} with mixer.head_dim={self.head_dim}: their product must be "
                f"expand · d_model = {self.d_inner}"
            )
        self.d_state = min(128, max(16, d_model // 32 * 16)) if config.d_state is None else config.d_state
        check_dim("mixer.d_state", self.d_state, MAX_KEY_DIM)
        self.n_groups = config.n_groups
        check_divides("mixer.n_groups", self.n_groups, "n_heads", self.n_heads)

        self.d_conv = self.d_inner + 2 * self.n_groups * self.d_state
        self.in_proj = Linear(d_model, self.d_inner + self.d_conv + self.n_heads)
        self.conv = ShortConvolution(self.d_conv, config.conv_width, bias=config.conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(self.n_heads))
        self.A_log = nn.Parameter(torch.empty(self.n_heads))
        self.D = nn.Parameter(torch.empty(self.n_heads))
        self.norm = GatedRMSNorm(
            self.d_inner, gate_first=True, group_size=self.d_inner // self.n_groups, eps=config.norm_eps
        )
        self.out_proj = Linear(self.d_inner, d_model, std_scale=self.residual_scale)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_decay(self.A_log, self.dt_bias, self.config.dt_min, self.config.dt_max, self.config.dt_floor)
        nn.init.ones_(self.D)
        for parameter in (self.A_log, self.dt_bias, self.D):
            parameter.no_weight_decay = True

    def mix(
        self, x: Tensor, state: State | None, cu_seqlens: Tensor | None, return_state: bool
    ) -> tuple[Tensor, State | None]:
        conv_state, memory = (None, None) if state is None else (state["conv"], state["memory"])
        z, xBC, dt = self.in_proj(x).split([self.d_inner, self.d_conv, self.n_heads], dim=-1)
        xBC, conv_state = self.conv(xBC, conv_state, cu_seqlens, return_state)
        BC_dim = self.n_groups * self.d_state
        u, B, C = xBC.split([self.d_inner, BC_dim, BC_dim], dim=-1)
        u = u.unflatten(-1, (self.n_heads, self.head_dim))
        B = B.unflatten(-1, (self.n_groups, self.d_state))
        C = C.unflatten(-1, (self.n_groups, self.d_state))

        dt = F.softplus(upcast(dt) + self.dt_bias)  # [B, T, H]
        g = -self.A_log.exp() * dt
        y, memory = self.recurrence(
            x,
            C,
            B,
            (u * dt[..., None]).to(u.dtype),
            g,
            initial_state=memory,
            return_state=return_state,
            cu_seqlens=cu_seqlens,
            backend=self.config.backend,
        )
        y = y + self.D[:, None] * u
        y = self.out_proj(self.norm(y.flatten(-2), z))
        return y, MixerState({"conv": conv_state, "memory": memory}) if return_state else None

    def recurrence(
        self, x: Tensor, *inputs: Tensor, **call: Tensor | State | bool | str | None
    ) -> tuple[Tensor, State | None]:
        """The operator on `q, k, v, g`; `x` is the mixer's input, for variants that read more from it."""
        return ops.ssd(*inputs, **call)

    def flops_per_token(self, seq_len: int) -> float:
        return self._layer_flops() + costs.ssd(seq_len, *self._sizes())

    def state_bytes(self, seq_len: int, dtype: torch.dtype = torch.float32) -> int:
        return self.conv.state_bytes(dtype) + costs.linear_state(*self._sizes()[1:], dtype)

    def _sizes(self) -> tuple[int, int, int, int]:
        return self.n_groups, self.n_heads, self.d_state, self.head_dim
