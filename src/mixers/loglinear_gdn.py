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

    **The query is divided by sqrt(K)**, as in Gated DeltaNet, so that all scales 1 give Gated DeltaNet exactly and a
    comparison of the two is one of levels. Published code divides λ by that same factor, which cancels it
    (`query_scale=1`, for published weights). The norm of a head hides a constant factor up to its epsilon, which
    counts while outputs are small: without the division the default run was at a validation loss of 4.89 after 100
    steps, with it at 4.82, as Gated DeltaNet.
    """

    @dataclass
    class Config(LevelOptions, GatedDeltaNet.Config):
        query_scale: float | None = None
        """Factor on the queries; null: 1 / sqrt(head_dim), as in Gated DeltaNet; 1: as in the published models."""

    config: Config

    def __init__(self, config: Config, *, d_model: int, layer_idx: int, n_layers: int, max_seq_len: int) -> None:
        super().__init__(config, d_model=d_model, layer_idx=layer_idx, n_layers=n_layers, max_seq_len=max_seq_len)
        self.level_scales = config.level_scales(d_model, self.n_v_heads, max_seq_len)

    def recurrence(
        self, x: Tensor, *inputs: Tensor, **call: Tensor | State | bool | str | None
    ) -> tuple[Tensor, State | None]:
        scale = self.head_dim**-0.5 if self.config.query_scale is None else self.config.query_scale
        return ops.loglinear_gated_delta_rule(*inputs, self.level_scales(x), scale=scale, **call)

    def flops_per_token(self, seq_len: int) -> float:
        scales = self.level_scales.proj.flops_per_token()
        return self._layer_flops() + scales + costs.loglinear_gated_delta_rule(seq_len, *self._sizes())

    def state_bytes(self, seq_len: int, dtype: torch.dtype = torch.float32) -> int:
        memory = costs.loglinear_state(seq_len, *self._sizes(), dtype, beta=True)
        return self.conv.state_bytes(dtype) + memory
