"""The protocol of a sequence mixer: what a plugin gives and what every other part may ask of it.

A mixer is one file beside this one (or outside the repository), with one subclass of `Mixer` in it. The
plugin writes a nested `Config` (its options), its parameters and `mix`; `forward` and `step` follow.
`tests/plugins/ema.py` is the shortest complete example.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from src.ops.state import State


class Mixer(nn.Module, ABC):
    """Maps a sequence `x [B, T, D]` to a sequence of the same shape, causally.

    Args:
        config: an instance of the class's own `Config`.
        d_model: `D`, the width of the residual stream; any multiple of 16.
        layer_idx: this layer, from 0.
        n_layers: layers of the whole model; output projections start smaller by `residual_scale`.
        max_seq_len: tokens of the longest training sequence; level scales are made for it.

    `cu_seqlens [N + 1]` packs N documents into one row (`B == 1`, the FlashAttention convention): nothing
    may cross from one to the next. There are no padding masks; ragged batches are packed.
    """

    @dataclass
    class Config:
        name: str = ""
        """The chosen mixer."""

    bounded_state: bool = True
    """Whether the state stays small, O(log T) at most, however many tokens it has read."""

    def __init__(
        self, config: "Mixer.Config", *, d_model: int, layer_idx: int, n_layers: int, max_seq_len: int
    ) -> None:
        super().__init__()
        self.config = config
        self.d_model = d_model
        self.layer_idx = layer_idx
        self.n_layers = n_layers
        self.max_seq_len = max_seq_len
        # Two residual branches a block, as in GPT-2: the stream's variance then does not grow with depth.
        self.residual_scale = (2 * n_layers) ** -0.5

    @abstractmethod
    def mix(
        self, x: Tensor, state: State | None, cu_seqlens: Tensor | None, return_state: bool
    ) -> tuple[Tensor, State | None]:
        """`x [B, T, D]` and the state before it (None: position 0) give `y [B, T, D]` and the state after it.

        The state is None unless `return_state`. Any split of a sequence into calls gives the same `y`.
        """

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Whole sequences, or packed documents: the form that training uses."""
        return self.mix(x, None, cu_seqlens, False)[0]

    def step(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, State]:
        """One token or more after `state`; `state=None` starts at position 0, so this is the prefill too."""
        y, state = self.mix(x, state, cu_seqlens, True)
        assert state is not None, f"{type(self).__name__}.mix returned no state though it was asked for one"
        return y, state

    @abstractmethod
    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs a token, the mean over a sequence of `seq_len`: 2 a multiply-add.

        Projections included, causal attention counted as half of the square, element-wise work left out.
        """

    @abstractmethod
    def state_bytes(self, seq_len: int, dtype: torch.dtype = torch.float32) -> int:
        """Live bytes of one sequence's decoding state after `seq_len` tokens with activations in `dtype`.

        Equal to `step(...)[1].num_bytes` for a batch of one.
        """

    def reset_parameters(self) -> None:
        """(Re-)initialise the parameters that this module itself owns; submodules have their own method.

        Called once after the whole model is built, also when it was built on the meta device. Parameters
        that weight decay must leave alone get `no_weight_decay = True` here: moving a parameter off the meta
        device makes a new object.
        """
