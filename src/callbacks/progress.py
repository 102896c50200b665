"""A progress bar on a terminal, a line now and then elsewhere."""

import sys
import time
from typing import Any, TextIO

from lightning.pytorch import Callback, LightningModule, Trainer
from tqdm import tqdm


class Progress(Callback):
    """Shows step, loss and tokens/s. On a terminal a bar; in a file or pipe some plain lines.

    Args:
        bar: True or False; None asks whether `stream` is a terminal.
        lines: plain lines per run; a slow run has one every `seconds` besides.
        stream: None is standard output.
    """

    def __init__(
        self, bar: bool | None = None, lines: int = 12, seconds: float = 30.0, stream: TextIO | None = None
    ) -> None:
        self.stream = stream or sys.stdout
        self.bar = self.stream.isatty() if bar is None else bar
        self.lines = lines
        self.seconds = seconds
        self._tqdm: tqdm | None = None

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._next_line, self._next_time = 0.0, 0.0
        if self.bar and trainer.is_global_zero:
            self._tqdm = tqdm(
                total=trainer.max_steps,
                initial=trainer.global_step,
                file=self.stream,
                unit="step",
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}",
            )

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if not trainer.is_global_zero or not module.ends_step(index):
            return
        step = trainer.global_step
        if self._tqdm is not None:
            if module.is_log_step(step):
                self._tqdm.set_postfix_str(self._text(module), refresh=False)
            self._tqdm.update()
        elif module.is_log_step(step) and (
            step >= self._next_line or time.monotonic() >= self._next_time or step == trainer.max_steps
        ):
            self._next_line = step + trainer.max_steps / self.lines
            self._next_time = time.monotonic() + self.seconds
            width = len(str(trainer.max_steps))
            self._line(f"step {step:{width}}/{trainer.max_steps}  {self._text(module)}")

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.is_global_zero and trainer.state.fn == "fit" and "val/loss" in module.metrics:
            text = f"validation at step {trainer.global_step}: loss {module.metrics['val/loss']:.4f}"
            if "val/accuracy" in module.metrics:
                text += f", accuracy {module.metrics['val/accuracy']:.1%}"
            self._line(text)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        self._close()

    @staticmethod
    def _text(module: LightningModule) -> str:
        text = f"loss {module.metrics['train/loss']:.4f}"
        rate = module.metrics.get("perf/tokens_per_s")
        return text if rate is None else f"{text}  {rate:,.0f} tokens/s"

    def _line(self, text: str) -> None:
        if self._tqdm is not None:
            self._tqdm.write(text, file=self.stream)
        else:
            self.stream.write(text + "\n")
            self.stream.flush()

    def _close(self) -> None:
        if self._tqdm is not None:
            self._tqdm.close()
            self._tqdm = None
