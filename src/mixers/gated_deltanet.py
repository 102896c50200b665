"""Gated DeltaNet (Yang et al., 2412.06464): a memory decayed, corrected and written at every token."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from src import ops
from src.errors import UserError
from src.layers import GatedRMSNorm, Linear, ShortConvolution, init_decay, l2_normalise, upcast
from src.mixers._heads import MAX_VALUE_DIM, check_dim, check_divides, split_heads
from src.mixers._recurrent import RecurrentMixer
from src.ops import costs
from src.ops.state import MixerState, State


class GatedDeltaNet(RecurrentMixer):
    """`S_t = exp(g_t) (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ`, `o_t = S_tᵀ q_t / sqrt(K)`.

    As `transformers`' `Qwen3NextGatedDeltaNet` and flash-linear-attention: q, k, v through a causal depthwise
    convolution with SiLU, q and k then of length 1; `β = sigmoid(b)`;
    `g = -exp(A_log) · softplus(a + dt_bias)`; the output is
    `norm(o) · silu(z)`, the norm over a head. One `in_proj` gives
    `[q, k, v, z, b, a]`, heads in order: fla's separate projections stacked, or Qwen3-Next's `in_proj_qkvz`
    and `in_proj_ba` with the rows of their key heads sorted. g and β are fp32 under autocast too.
    """

    @dataclass
    class Config(RecurrentMixer.Config):
        n_heads: int | None = None
        """Heads of q and k; null: from head_dim and three quarters of d_model."""
        head_dim: int | None = None
        """Width K of a q/k head, a multiple of 16 up to 256; null: a sixth of k's width, or 64 if more."""
        n_v_heads: int | None = None
        """Heads of v, a multiple of n_heads: each q/k head serves as many; null: n_heads."""
        expand_v: float = 2.0
        """Width of a v head over that of a q/k head."""
        conv_bias: bool = False
        """Give the convolution a bias."""

    config: Config

    def __init__(self, config: Config, *, d_model: int, layer_idx: int, n_layers: int, max_seq_len: int) -> None:
        super().__init__(config, d_model=d_model, layer_idx=layer_idx, n_layers=n_layers, max_seq_len=max_seq_len)
        # Three quarters of the width for q and k, twice that for v and z: 6 d_model² parameters as published.
        key_dim = max(16, 3 * d_model // 4 // 16 * 16)
        self.n_heads, self.head_dim = split_heads(
            key_dim, config.n_heads, config.head_dim, prefer=min(256, max(64, key_dim // 6))
        )
        self.n_v_heads = self.n_heads if config.n_v_heads is None else config.n_v_heads
        if self.n_v_heads < 1:
            raise UserError(f"mixer.n_v_heads={self.n_v_heads}: must be at least 1")
        check_divides("mixer.n_heads", self.n_heads, "n_v_heads", self.n_v_heads)
        self.v_head_dim = int(config.expand_v * self.head_dim)
        check_dim(f"mixer.expand_v={config.expand_v} · head_dim", self.v_head_dim, MAX_VALUE_DIM)

        self.key_dim, self.value_dim = self.n_heads * self.head_dim, self.n_v_heads * self.v_head_dim
        self.in_proj = Linear(d_model, 2 * self.key_dim + 2 * self.value_dim + 2 * self.n_v_heads)
        self.conv = ShortConvolution(2 * self.key_dim + self.value_dim, config.conv_width, bias=config.conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(self.n_v_heads))
        self.A_log = nn.Parameter(torch.empty(self.n_v_heads))
        self.norm = GatedRMSNorm(self.v_head_dim, gate_first=False, eps=config.norm_eps)
        self.out_proj = Linear(self.value_dim, d_model, std_scale=self.residual_scale)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_decay(self.A_log, self.dt_bias, self.config.dt_min, self.config.dt_max, self.config.dt_floor)
        for parameter in (self.A_log, self.dt_bias):
            parameter.no_weight_decay = True

    def mix(
        self, x: Tensor, state: State | None, cu_seqlens: Tensor | None, return_state: bool
    ) -> tuple[Tensor, State | None]:
        conv_state, memory = (None, None) if state is None else (state["conv"], state["memory"])
        qkv, z, b, a = self.in_proj(x).split([self.conv.dim, self.value_dim, self.n_v_heads, self.n_v_heads], dim=-1)
        qkv, conv_state = self.conv(qkv, conv_state, cu_seqlens, return_state)
        q, k, v = qkv.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        q = l2_normalise(q.unflatten(-1, (self.n_heads, self.head_dim)))
        k = l2_normalise(k.unflatten(-1, (self.n_heads, self.head_dim)))
        v = v.unflatten(-1, (self.n_v_heads, self.v_head_dim))

        beta = upcast(b).sigmoid()  # [B, T, H]
        g = -self.A_log.exp() * F.softplus(upcast(a) + self.dt_bias)
        o, memory = self.recurrence(
            x,
            q,
            k,
            v,
            g,
            beta,
            initial_state=memory,
            return_state=return_state,
            cu_seqlens=cu_seqlens,
            backend=self.config.backend,
        )
        o = self.norm(o, z.unflatten(-1, (self.n_v_heads, self.v_head_dim)))
        y = self.out_proj(o.flatten(-2))
        return y, MixerState({"conv": conv_state, "memory": memory}) if return_state else None

    def recurrence(
        self, x: Tensor, *inputs: Tensor, **call: Tensor | State | bool | str | None
    ) -> tuple[Tensor, State | None]:
        """The operator on `q, k, v, g, β`; `x` is the mixer's input, for variants that read more from it."""
        return ops.gated_delta_rule(*inputs, scale=self.head_dim**-0.5, **call)

    def flops_per_token(self, seq_len: int) -> float:
        return self._layer_flops() + costs.gated_delta_rule(seq_len, *self._sizes())

    def state_bytes(self, seq_len: int, dtype: torch.dtype = torch.float32) -> int:
        return self.conv.state_bytes(dtype) + costs.linear_state(*self._sizes()[1:], dtype)

    def _sizes(self) -> tuple[int, int, int, int]:
        return self.n_heads, self.n_v_heads, self.head_dim, self.v_head_dim
