"""Ctrl-C and SIGTERM: finish the step, save, say where; before the first step, end in order."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from src.callbacks.checkpoint import save


class Preempted(BaseException):
    """Training was stopped by a signal and its state is saved in `path`."""

    def __init__(self, signum: int, step: int, path: Path) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} after step {step}; state saved in {path}")
        self.signum = signum
        self.exit_status = 128 + signum


class Unstarted(BaseException):
    """Stopped by a signal before the first step: nothing had to be saved."""

    def __init__(self, signum: int) -> None:
        super().__init__(
            f"stopped by {signal.Signals(signum).name} before training began: "
            "the same command starts again, and what is tokenised is kept"
        )
        self.exit_status = 128 + signum


@contextlib.contextmanager
def before_training() -> Iterator[None]:
    """In here SIGTERM ends the process like Ctrl-C: both raise Unstarted."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Unstarted(signum)

    before = signal.getsignal(signal.SIGTERM)
    mine = before is signal.SIG_DFL and threading.current_thread() is threading.main_thread()
    if mine:
        signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        raise Unstarted(signal.SIGINT) from None
    finally:
        if mine:
            signal.signal(signal.SIGTERM, before)


class Aborted(BaseException):
    """A second Ctrl-C: stop at once, nothing saved."""


class Preemption(Callback):
    """On SIGTERM or SIGINT saves at the end of the optimizer step, on all ranks, and raises Preempted.

    The handler only sets a flag: saving inside a signal handler hangs when the signal comes during a
    collective or a save. It is enough that one of several ranks gets the signal: at each step's end they start to
    compare their flags and at the next one read the answer, so all stop after the same step and none waits.
    A second Ctrl-C raises Aborted at once, without saving.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.received = 0
        self._group: Any = None
        self._asked: tuple[Any, torch.Tensor] | None = None

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        # Lightning has put its own SIGTERM handler in place by now, which broadcasts inside the handler and
        # stops without saving; this one replaces it. Lightning puts the original ones back in the end.
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._handle)
        if trainer.world_size > 1:
            # Flags are compared on the host: a collective on a GPU could only be read by waiting for the GPU.
            self._group = dist.new_group(backend="gloo")
            # Lightning asks for a flag of its own before every micro-batch, which waits; nobody sets that flag here.
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None

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
        if not module.ends_step(index):
            return
        signum = self.received if self._group is None else self._answer()
        if trainer.global_step == trainer.max_steps:  # what is left is quicker done than made up for
            return
        if signum:
            save(trainer, self.path)
            raise Preempted(signum, trainer.global_step, self.path)
        if self._group is not None:
            flag = torch.tensor(self.received)
            self._asked = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True), flag

    def _answer(self) -> int:
        """The signal that any rank had received at the end of the step before; 0 for none."""
        if self._asked is None:
            return 0
        work, flag = self._asked
        work.wait()
        return int(flag)
