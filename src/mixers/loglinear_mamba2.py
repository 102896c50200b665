"""Log-linear Mamba-2 (Guo et al., 2506.04761): Mamba-2 with O(log T) memories."""

from dataclasses import dataclass

import torch
from torch import Tensor

from src import ops
from src.mixers._levels import LevelOptions
from src.mixers.mamba2 import Mamba2
from src.ops import costs
from src.ops.state import State


class LogLinearMamba2(Mamba2):
    """`y_t = Σ_l λ_{t,l} C_tᵀ S_t^(l) + D x_t`, a memory for each level of the partition in `ops/fenwick.py`.

    Everything else is Mamba-2, options and parameter names included; `level_scales` is what is added. With
    all scales 1 it equals Mamba-2 exactly. A model has `num_levels(max_seq_len)` scales a head; further
    levels use the last one.
    """

    @dataclass
    class Config(LevelOptions, Mamba2.Config):
        pass

    config: Config

    def __init__(self, config: Config, *, d_model: int, layer_idx: int, n_layers: int, max_seq_len: int) -> None:
        super().__init__(config, d_model=d_model, layer_idx=layer_idx, n_layers=n_layers, max_seq_len=max_seq_len)
        self.level_scales = config.level_scales(d_model, self.n_heads, max_seq_len)

    def recurrence(
        self, x: Tensor, *inputs: Tensor, **call: Tensor | State | bool | str | None
    ) -> tuple[Tensor, State | None]:
        return ops.loglinear_ssd(*inputs, self.level_scales(x), **call)

    def flops_per_token(self, seq_len: int) -> float:
        scales = self.level_scales.proj.flops_per_token()
        return self._layer_flops() + scales + costs.loglinear_ssd(seq_len, *self._sizes())

    def state_bytes(self, seq_len: int, dtype: torch.dtype = torch.float32) -> int:
        memory = costs.loglinear_state(seq_len, *self._sizes(), dtype, beta=False)
        return self.conv.state_bytes(dtype) + memory
