"""A pattern of other mixers over the layers, such as a softmax layer after every log-linear one."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from src.errors import UserError
from src.mixers import Mixer
from src.ops.state import State
from src.registry import MIXERS, build_options


class Hybrid(Mixer):
    """Layer `i` is the mixer `pattern[i % len(pattern)]`, built with `options[that name]`.

    `python -m src.train mixer=hybrid mixer.pattern=[mamba2,mamba2,softmax] mixer.options.mamba2.d_state=64`
    """

    @dataclass
    class Config(Mixer.Config):
        pattern: list[str] = field(default_factory=lambda: ["loglinear_gdn", "softmax"])
        """Mixers of the layers from the first on, repeated."""
        options: dict[str, dict[str, Any]] = field(default_factory=dict)
        """Options of the mixers in the pattern, by name."""

        def __post_init__(self) -> None:
            if not self.pattern:
                raise UserError("mixer.pattern=[]: must name at least one mixer")
            if "hybrid" in self.pattern:
                raise UserError("mixer.pattern: a hybrid cannot contain a hybrid; name the mixers themselves")
            for name in self.options:
                if name not in self.pattern:
                    raise UserError(f"mixer.options.{name}: not in mixer.pattern=[{','.join(self.pattern)}]")

    config: Config

    def __init__(self, config: Config, *, d_model: int, layer_idx: int, n_layers: int, max_seq_len: int) -> None:
        super().__init__(config, d_model=d_model, layer_idx=layer_idx, n_layers=n_layers, max_seq_len=max_seq_len)
        pattern = config.pattern
        if len(pattern) > n_layers:
            raise UserError(
                f"mixer.pattern=[{','.join(pattern)}]: {len(pattern)} entries for model.n_layers={n_layers}; "
                f"the last ones would never be used"
            )
        # All entries, not only this layer's: a mistake in another's options should not wait for its layer.
        built = {
            name: build_options(MIXERS.get(name), config.options.get(name, {}), where=f"mixer.options.{name}")
            for name in dict.fromkeys(pattern)
        }
        name = pattern[layer_idx % len(pattern)]
        try:
            self.layer = MIXERS.get(name)(
                built[name], d_model=d_model, layer_idx=layer_idx, n_layers=n_layers, max_seq_len=max_seq_len
            )
        except UserError as error:
            raise UserError(f"mixer.options.{name}: {error}") from error
        self.bounded_state = self.layer.bounded_state

    def mix(
        self, x: Tensor, state: State | None, cu_seqlens: Tensor | None, return_state: bool
    ) -> tuple[Tensor, State | None]:
        return self.layer.mix(x, state, cu_seqlens, return_state)

    def flops_per_token(self, seq_len: int) -> float:
        return self.layer.flops_per_token(seq_len)

    def state_bytes(self, seq_len: int, dtype: torch.dtype = torch.float32) -> int:
        return self.layer.state_bytes(seq_len, dtype)
