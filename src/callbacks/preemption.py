"""Ctrl-C and SIGTERM: finish the step, save, say where."""

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from src.callbacks.checkpoint import save


class Preempted(BaseException):
    """Training was stopped by a signal and its state is saved in `path`."""

    def __init__(self, signum: int, step: int, path: Path) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} after step {step}; state saved in {path}")
        self.signum = signum
        self.exit_status = 128 + signum


class Aborted(BaseException):
    """A second Ctrl-C: stop at once, nothing saved."""


class Preemption(Callback):
    """On SIGTERM or SIGINT saves at the end of the optimizer step, on all ranks, and raises Preempted.

    The handler only sets a flag: saving inside a signal handler hangs when the signal comes during a
    collective or a save. With several ranks the flag is agreed on at every step's end, so it is enough that
    one rank gets the signal. A second Ctrl-C raises Aborted at once, without saving.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.received = 0

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        # Lightning has put its own SIGTERM handler in place by now, which broadcasts inside the handler and
        # stops without saving; this one replaces it. Lightning puts the original ones back in the end.
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received and signum == signal.SIGINT:
            raise Aborted  # not KeyboardInterrupt: Lightning turns that into exit status 1
        self.received = signum
        what = "saving at the end of this step"
        if signum == signal.SIGINT:
            what += "; Ctrl-C again aborts without saving"
        sys.stderr.write(f"\n{signal.Signals(signum).name} received: {what}\n")

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        last = trainer.global_step == trainer.max_steps  # what is left is quicker done than made up for
        if (index + 1) % trainer.accumulate_grad_batches or last:
            return
        stop = bool(self.received)
        if trainer.world_size > 1:
            stop = trainer.strategy.reduce_boolean_decision(stop, all=False)
        if stop:
            save(trainer, self.path)
            raise Preempted(self.received or signal.SIGTERM, trainer.global_step, self.path)
