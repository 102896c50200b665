"""What the log-linear mixers share: the options of their level scales."""

from dataclasses import dataclass

from src import ops
from src.errors import UserError
from src.layers import Beyond, LevelScales


@dataclass
class LevelOptions:
    """Options that a log-linear mixer adds to those of the linear one."""

    beyond: Beyond = "last"
    """Scales of levels beyond the trained length: the last one, the mean, or the last one halved each time."""
    level_init: float = 1.0
    """Initial weights of the level scales over model.init_std; 0: all levels weigh the same at the start."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level_init < 0:
            raise UserError(f"mixer.level_init={self.level_init}: must be at least 0")

    def level_scales(self, d_model: int, n_heads: int, max_seq_len: int) -> LevelScales:
        """The layer, with a scale for each level of the longest training sequence."""
        return LevelScales(d_model, n_heads, ops.num_levels(max_seq_len), beyond=self.beyond, init=self.level_init)
