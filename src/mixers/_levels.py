"""What the log-linear mixers share: the options of their level scales."""

from dataclasses import dataclass

from src import ops
from src.layers import Beyond, LevelScales


@dataclass
class LevelOptions:
    """Options that a log-linear mixer adds to those of the linear one."""

    beyond: Beyond = "last"
    """Scales of levels beyond the trained length: the last one, the mean, or the last one halved each time."""

    def level_scales(self, d_model: int, n_heads: int, max_seq_len: int) -> LevelScales:
        """The layer, with a scale for each level of the longest training sequence."""
        return LevelScales(d_model, n_heads, ops.num_levels(max_seq_len), self.beyond)
