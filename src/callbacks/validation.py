"""Validation before the first and after the last step."""

from lightning.pytorch import Callback, LightningModule, Trainer


class EdgeValidation(Callback):
    """Validates at step 0, at the end of training, and where a resumed run was stopped just before it.

    Lightning itself validates every `val_check_interval` batches and nowhere else. Running its own loop from
    inside `fit` keeps the step number, the best checkpoint and the loaders as they are.
    """

    def __init__(self, every: int) -> None:
        self.every = every

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        step = trainer.global_step
        if step % self.every == 0 and module.validated_step != step:
            self._validate(trainer)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        if module.validated_step != trainer.global_step:
            self._validate(trainer)

    @staticmethod
    def _validate(trainer: Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop.val_loop
        loop.restarting = False
        trainer.validating = True
        loop.run()
        trainer.training = True
