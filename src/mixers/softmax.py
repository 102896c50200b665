"""Softmax attention with rotary positions: the Transformer's mixer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from src import ops
from src.errors import UserError
from src.layers import Linear, apply_rope, token_positions
from src.mixers import Mixer
from src.mixers._heads import check_divides, split_heads
from src.ops import costs
from src.ops.state import State


class SoftmaxAttention(Mixer):
    """`o_t = Σ_{s≤t} softmax_s(q_tᵀ k_s / sqrt(K)) v_s`, q and k rotated by their position in the document.

    RoPE in the half-split layout of Llama (channels `i` and `i + K/2` turn together; weights of interleaved
    checkpoints need their rows permuted). `n_kv_heads < n_heads` is grouped-query attention. One `in_proj`
    gives `[q, k, v]`. The decoding state is the key-value cache, keys already rotated.
    """

    @dataclass
    class Config(Mixer.Config):
        n_heads: int | None = None
        """Query heads; null: from head_dim and d_model."""
        head_dim: int | None = None
        """Width of a head, a multiple of 16 up to 256; null: up to a sixteenth of d_model, or 64 if more."""
        n_kv_heads: int | None = None
        """Key/value heads, a divisor of n_heads; null: n_heads."""
        rope_theta: float = 10_000.0
        """Base of the rotary wavelengths (the paper's models: 500000)."""

        def __post_init__(self) -> None:
            if self.rope_theta <= 1:
                raise UserError(f"mixer.rope_theta={self.rope_theta}: must be above 1")

    config: Config
    bounded_state = False

    def __init__(self, config: Config, *, d_model: int, layer_idx: int, n_layers: int, max_seq_len: int) -> None:
        super().__init__(config, d_model=d_model, layer_idx=layer_idx, n_layers=n_layers, max_seq_len=max_seq_len)
        self.n_heads, self.head_dim = split_heads(
            d_model, config.n_heads, config.head_dim, prefer=min(256, max(64, d_model // 16))
        )
        self.n_kv_heads = self.n_heads if config.n_kv_heads is None else config.n_kv_heads
        check_divides("mixer.n_kv_heads", self.n_kv_heads, "n_heads", self.n_heads)
        self.in_proj = Linear(d_model, (self.n_heads + 2 * self.n_kv_heads) * self.head_dim)
        self.out_proj = Linear(self.n_heads * self.head_dim, d_model, std_scale=self.residual_scale)

    def mix(
        self, x: Tensor, state: State | None, cu_seqlens: Tensor | None, return_state: bool
    ) -> tuple[Tensor, State | None]:
        heads = self.in_proj(x).unflatten(-1, (-1, self.head_dim))  # [B, T, H + 2 Hkv, K]
        q, k, v = heads.split([self.n_heads, self.n_kv_heads, self.n_kv_heads], dim=2)
        start = None if state is None else state.positions
        positions = token_positions(*x.shape[:2], x.device, cu_seqlens, start)
        q = apply_rope(q, positions, self.config.rope_theta)
        k = apply_rope(k, positions, self.config.rope_theta)
        o, state = ops.softmax_attention(q, k, v, initial_state=state, return_state=return_state, cu_seqlens=cu_seqlens)
        return self.out_proj(o.flatten(-2)), state

    def flops_per_token(self, seq_len: int) -> float:
        attention = costs.softmax_attention(seq_len, self.n_heads, self.head_dim, self.head_dim)
        return self.in_proj.flops_per_token() + attention + self.out_proj.flops_per_token()

    def state_bytes(self, seq_len: int, dtype: torch.dtype = torch.float32) -> int:
        return costs.attention_state(seq_len, self.n_kv_heads, self.head_dim, self.head_dim, dtype)
