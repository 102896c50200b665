"""Data modules: each file of this folder is one choice of `data=`, a corpus or a task.

A new one is a file with one subclass of `DataModule` that says its vocabulary and draws a batch:

    class Copy(DataModule):
        @dataclass
        class Config(DataModule.Config):
            seq_len: int = 64

        vocab_size = 16

        def n_samples(self, split): ...             # of validation and test
        def batch(self, split, samples): ...        # a Batch of these sample numbers

Everything else (steps, ranks, accumulation, resuming) is here. A text corpus subclasses
`src.data.common.corpus.Corpus` instead and gives documents.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from src.data.common.lanes import Carry
from src.data.common.sampling import Draw, EvalSampler, StepSampler, accumulation
from src.errors import UserError

if TYPE_CHECKING:
    from src.data.common.tokenizer import Tokenizer

Split = Literal["train", "val", "test"]
IGNORE = -100  # the label of a place without loss: what torch's cross_entropy ignores


class Batch(TypedDict):
    """What every loader gives: B rows of T tokens, or B = 1 with all documents flattened into one row."""

    input_ids: Tensor
    """int64 [B, T]"""
    labels: Tensor
    """int64 [B, T]: the token to predict at each place (already shifted), -100 where there is no loss."""
    cu_seqlens: Tensor | None
    """int32 [N+1]: where documents begin in the flattened row, then its length (repeated). None: B rows."""
    n_bytes: float | None
    """UTF-8 bytes of the labelled text, a cut document's in proportion to its labels. None: not a text."""
    n_words: float | None
    """Words of it (between white space), in proportion likewise. None: not a text."""
    n_pairs: int | None
    """Key–value pairs per row (associative recall). None: another kind of data."""
    examples: NotRequired[bool]
    """Whether every document is an example, which is right if all its labels are. Missing: no."""
    carry: NotRequired[Carry]
    """How the rows continue those of the step before. Missing: every document is at its beginning."""


class DataModule(LightningDataModule):
    """Base of every corpus and task.

    A subclass sets `vocab_size` (at the latest in `setup`) and writes `n_samples` and `batch`. Training
    sample i must be a pure function of (seed, i): then a run is resumed by its step number alone.
    """

    @dataclass
    class Config:
        name: str = ""
        """The chosen data module (set by `data=`)."""
        seq_len: int = 512
        """Tokens per row."""
        batch_size: int = 16
        """Rows per optimizer step, over all ranks and micro-batches."""
        val_batch_size: int | None = None
        """Rows per validation or test batch of one rank; null: as many as one training forward pass has."""
        num_workers: int = 0
        """Loader processes per rank; 0 draws batches in the training process."""

    vocab_size: int
    tokenizer: "Tokenizer | None" = None
    fingerprint: str = ""
    """Identifies the content (hex); what a run's log records."""

    def __init__(self, config: Config, *, seed: int = 0, micro_batch_size: int | None = None) -> None:
        super().__init__()
        for key, least in (("seq_len", 1), ("batch_size", 1), ("val_batch_size", 1), ("num_workers", 0)):
            value = getattr(config, key)
            if value is not None and value < least:
                raise UserError(f"data.{key}={value}: must be at least {least}")
        self.config, self.seed, self.micro_batch_size = config, seed, micro_batch_size

    # What a subclass writes

    def n_samples(self, split: Split) -> int:
        """Samples of the validation or test split (0: there is none); training samples never end."""
        raise NotImplementedError

    def batch(self, split: Split, samples: Sequence[int]) -> Batch:
        """The batch of these samples: global indices 0, 1, 2, … in training, range(n_samples) otherwise."""
        raise NotImplementedError

    # What a subclass may override

    @property
    def longest(self) -> int:
        """Tokens of the longest training example. Known from the options alone."""
        return self.config.seq_len

    @property
    def max_seq_len(self) -> int:
        """Tokens that a training step can have behind it, for which mixers have level scales. After setup()."""
        return self.longest

    def eval_batches(self, split: Split, batch_size: int) -> list[Sequence[int]]:
        """The samples of each evaluation batch, in order, over all ranks."""
        n = self.n_samples(split)
        return [range(i, min(i + batch_size, n)) for i in range(0, n, batch_size)]

    def describe(self) -> dict[str, object]:
        """Facts for the start of a run, flat and printable. After setup()."""
        return {"data": self.config.name, "fingerprint": self.fingerprint, "vocabulary": self.vocab_size}

    def notes(self) -> list[str]:
        """What a user would hardly want, a line each, for the start of a run. After setup()."""
        return []

    # Loaders

    @property
    def world_size(self) -> int:
        return 1 if self.trainer is None else self.trainer.world_size

    @property
    def rank(self) -> int:
        return 0 if self.trainer is None else self.trainer.global_rank

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step, on the attached trainer's ranks (one where none is attached)."""
        return accumulation(self.config.batch_size, self.micro_batch_size, self.world_size)

    def train_dataloader(self) -> DataLoader:
        """Micro-batches without end, from the trainer's present step on."""
        sampler = StepSampler(
            self.config.batch_size, self.micro_batch_size, self.rank, self.world_size, start=self._step
        )
        return self._loader("train", sampler)

    def val_dataloader(self) -> DataLoader:
        return self._eval_loader("val")

    def test_dataloader(self) -> DataLoader:
        return self._eval_loader("test")

    def _step(self) -> int:
        return 0 if self.trainer is None else self.trainer.global_step

    def _eval_loader(self, split: Split) -> DataLoader:
        if self.n_samples(split) == 0:
            raise UserError(f"data={self.config.name} has no {split} split")
        per_pass = self.config.batch_size // (self.accumulation * self.world_size)
        batches = self.eval_batches(split, self.config.val_batch_size or per_pass)
        return self._loader(split, EvalSampler(batches, self.rank, self.world_size))

    def _loader(self, split: Split, sampler: StepSampler | EvalSampler) -> DataLoader:
        on_cuda = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return DataLoader(
            _Draws(self, split),
            batch_size=None,  # a Draw is a whole batch already
            sampler=sampler,
            collate_fn=_unchanged,
            num_workers=self.config.num_workers,
            persistent_workers=self.config.num_workers > 0,
            pin_memory=on_cuda,
            # Its own: an iterator draws a seed for its workers, which would shift the training's numbers.
            generator=torch.Generator().manual_seed(self.seed),
        )

    def __getstate__(self) -> dict[str, object]:
        # Loader processes get a copy; the trainer cannot and need not travel with it.
        return {**self.__dict__, "trainer": None}

    # A run folder and its checkpoints

    def state_dict(self) -> dict[str, str]:
        """What a checkpoint says about the data: the same content, which a run must be continued on."""
        return {"fingerprint": self.fingerprint}

    def save_tokenizer(self, run_dir: Path) -> None:
        """Keep the tokenizer with a run, so that generation needs no corpus. Nothing for a synthetic task."""
        if self.tokenizer is not None:
            self.tokenizer.save(run_dir)

    def options(self) -> dict[str, object]:
        """The options as a plain dict (logs, fingerprints)."""
        return asdict(self.config)


class _Draws(Dataset):
    """Draw -> Batch, for the loader's processes."""

    def __init__(self, module: DataModule, split: Split) -> None:
        self.module, self.split = module, split

    def __getitem__(self, draw: Draw) -> Batch:
        batch = self.module.batch(self.split, draw.samples)
        if not draw.counts:
            batch["labels"] = torch.full_like(batch["labels"], IGNORE)
            for key in ("n_bytes", "n_words"):
                batch[key] = None if batch[key] is None else 0.0
        return batch


def _unchanged(batch: Batch) -> Batch:
    return batch
