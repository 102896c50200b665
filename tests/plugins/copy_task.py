"""A complete data module in one file: repeat a random string after a separator.

python -m src.train plugins=[tests/plugins/copy_task.py] data=copy_task mixer=softmax
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from src.data import IGNORE, Batch, DataModule, Split
from src.data.common.sampling import hash_bits


class CopyTask(DataModule):
    """x1 … xn 0 x1 … xn: the second half is predicted from the first."""

    @dataclass
    class Config(DataModule.Config):
        seq_len: int = 32
        symbols: int = 8
        """Different symbols."""

    config: Config

    def __init__(self, config: Config, *, seed: int = 0, micro_batch_size: int | None = None) -> None:
        super().__init__(config, seed=seed, micro_batch_size=micro_batch_size)
        self.vocab_size = config.symbols + 1

    def n_samples(self, split: Split) -> int:
        return 100

    def batch(self, split: Split, samples: Sequence[int]) -> Batch:
        n = self.config.seq_len // 2
        stream = ("train", "val", "test").index(split)
        bits = hash_bits(self.seed, stream, np.asarray(samples)[:, None], np.arange(n))
        half = torch.from_numpy((bits % self.config.symbols).astype(np.int64) + 1)
        input_ids = torch.cat([half, torch.zeros_like(half[:, :1]), half[:, :-1]], dim=1)
        labels = torch.cat([torch.full_like(half, IGNORE), half], dim=1)
        return Batch(input_ids=input_ids, labels=labels, cu_seqlens=None, n_bytes=None, n_words=None, n_pairs=None)
