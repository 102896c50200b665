"""Log-linear Gated DeltaNet (Guo et al., 2506.04761): Gated DeltaNet with O(log T) memories."""

from dataclasses import dataclass

import torch
from torch import Tensor

from src import ops
from src.mixers._levels import LevelOptions
from src.mixers.gated_deltanet import GatedDeltaNet
from src.ops import costs
from src.ops.state import State


class LogLinearGatedDeltaNet(GatedDeltaNet):
    """`o_t = Σ_l λ_{t,l} S_t^(l)ᵀ q_t`, one memory a level of the Fenwick partition (`ops/fenwick.py`).

    Everything else is Gated DeltaNet, options and parameter names included; `level_scales` is what is added.
    A model has `num_levels(max_seq_len)` scales a head; further levels use the last one.

    **The query is not divided by sqrt(K)** here. Published code divides λ by that same factor, which cancels
    it; leaving both out is the same function, so published weights give the same outputs, and λ alone says
    how strongly a level is read. The norm of a head that follows hides a constant factor up to its epsilon.
    Hence scales of `1 / sqrt(K)`, not of 1, give Gated DeltaNet exactly.
    """

    @dataclass
    class Config(LevelOptions, GatedDeltaNet.Config):
        pass

    config: Config

    def __init__(self, config: Config, *, d_model: int, layer_idx: int, n_layers: int, max_seq_len: int) -> None:
        super().__init__(config, d_model=d_model, layer_idx=layer_idx, n_layers=n_layers, max_seq_len=max_seq_len)
        self.level_scales = config.level_scales(d_model, self.n_v_heads, max_seq_len)

    def recurrence(
        self, x: Tensor, *inputs: Tensor, **call: Tensor | State | bool | str | None
    ) -> tuple[Tensor, State | None]:
        return ops.loglinear_gated_delta_rule(*inputs, self.level_scales(x), scale=1.0, **call)

    def flops_per_token(self, seq_len: int) -> float:
        scales = self.level_scales.proj.flops_per_token()
        return self._layer_flops() + scales + costs.loglinear_gated_delta_rule(seq_len, *self._sizes())

    def state_bytes(self, seq_len: int, dtype: torch.dtype = torch.float32) -> int:
        memory = costs.loglinear_state(seq_len, *self._sizes(), dtype, beta=True)
        return self.conv.state_bytes(dtype) + memory
