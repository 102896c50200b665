"""What Mamba-2 and Gated DeltaNet share: options, and the bookkeeping around a convolution and a recurrence."""

from dataclasses import dataclass
from typing import Literal

from src.errors import UserError
from src.layers import Linear, ShortConvolution
from src.mixers import Mixer


class RecurrentMixer(Mixer):
    """`in_proj`, short convolution, a linear recurrence with data-dependent decay, gated norm, `out_proj`."""

    @dataclass
    class Config(Mixer.Config):
        conv_width: int = 4
        """Taps of the short convolution."""
        dt_min: float = 1e-3
        """Smallest initial time step."""
        dt_max: float = 0.1
        """Largest initial time step."""
        dt_floor: float = 1e-4
        """Lower clamp of the initial time step."""
        norm_eps: float = 1e-5
        """Added to the mean square in the gated norm."""
        backend: Literal["auto", "torch", "triton"] = "auto"
        """Implementation of the recurrence; auto: Triton on CUDA where the operator has kernels, else PyTorch."""

        def __post_init__(self) -> None:
            if self.conv_width < 2:
                raise UserError(f"mixer.conv_width={self.conv_width}: must be at least 2")
            if not 0 < self.dt_min <= self.dt_max:
                raise UserError(f"mixer.dt_min={self.dt_min}: must be above 0 and at most dt_max={self.dt_max}")

    in_proj: Linear
    conv: ShortConvolution
    out_proj: Linear

    def _layer_flops(self) -> float:
        return self.in_proj.flops_per_token() + self.conv.flops_per_token() + self.out_proj.flops_per_token()
