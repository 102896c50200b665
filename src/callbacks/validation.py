"""Validation before the first and after the last step."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class EdgeValidation(Callback):
    """Validates at step 0, after the last step, and where a resumed run was stopped just before it.

    Lightning itself validates every `val_check_interval` batches and nowhere else. Running its own loop from
    inside `fit` keeps the step number, the best checkpoint and the loaders as they are. The last validation runs
    at its step's end, so that the checkpoint that is written next (`LastCheckpoint`) knows of it.
    """

    def __init__(self, every: int) -> None:
        self.every = every

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        step = trainer.global_step
        if step % self.every == 0 and module.validated_step != step:
            self._validate(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if module.ends_step(index) and trainer.global_step == trainer.max_steps:
            self._validate(trainer)
            trainer.fit_loop.epoch_loop._skip_next_val = True  # Lightning's own, where it is due at this step too

    @staticmethod
    def _validate(trainer: Trainer) -> None:
        loop, connector = trainer.fit_loop.epoch_loop.val_loop, trainer._logger_connector
        first = connector._first_loop_iter  # as Lightning keeps it around a validation inside an epoch
        loop.restarting = False
        trainer.validating = True
        loop.run()
        trainer.training = True
        connector._first_loop_iter = first
