"""Checkpoints: the last, by step, and the best, after validation. Both replace their file atomically."""

import math
import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


def save(trainer: Trainer, path: Path, weights_only: bool = False) -> None:
    """Save on all ranks; a process killed half-way leaves the previous file as it was."""
    for logger in trainer.loggers:
        logger.save()
    partial = path.with_name(path.name + ".partial")
    trainer.save_checkpoint(partial, weights_only=weights_only)
    if trainer.is_global_zero:
        os.replace(partial, path)
    trainer.strategy.barrier()


class LastCheckpoint(Callback):
    """Writes `last.ckpt`, which a run resumes from, every `every` optimizer steps and at the end.

    Always between two steps of the training loop, before a validation that is due: Lightning's loop counters
    are exact there, and a resumed run makes up for the validation. Only the last step is saved after its
    validation (`EdgeValidation` stands before this callback), and the one before it in any case: a run that is
    killed while it validates for the last time repeats one step and validates.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self.path = folder / "last.ckpt"
        self.every = every

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        step = trainer.global_step
        if module.ends_step(index) and (step % self.every == 0 or step >= trainer.max_steps - 1):
            save(trainer, self.path)


class BestCheckpoint(Callback):
    """Writes `best.ckpt`, weights only, after a validation whose `monitor` is below that of all earlier ones.

    The untrained model's validation at step 0 does not count.
    """

    def __init__(self, folder: Path, monitor: str = "val/loss") -> None:
        self.path = folder / "best.ckpt"
        self.monitor = monitor
        self.best = math.inf

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        value = module.metrics.get(self.monitor, math.inf)
        if trainer.state.fn == "fit" and trainer.global_step > 0 and value < self.best:
            self.best = value
            save(trainer, self.path, weights_only=True)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]
