"""Tokens a second and model FLOPs utilisation, without a synchronisation per step."""

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

# Dense bf16 FLOP/s by a part of `torch.cuda.get_device_name()`, from NVIDIA's data sheets (the figures with
# sparsity halved). The first match counts, so that a longer name stands before one that it contains.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835.5e12,
    "H100": 989e12,
    "H200 NVL": 835.5e12,
    "H200": 989e12,
    "GH200": 989e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A40": 149.7e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}
# Words that make another card of a known name, or a slice of one.
OTHER_CARDS = {"Laptop", "Max", "Ti", "SUPER", "D", "MIG"}


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak of a card, or None for one that the table does not know (then no MFU is logged)."""
    words = device_name.replace("-", " ").split()
    if OTHER_CARDS & set(words):
        return None
    for name, peak in PEAK_FLOPS.items():
        parts = name.split()
        if all(part in words for part in parts):
            return peak
    return None


class Throughput(Callback):
    """Logs `perf/tokens_per_s` and, on known cards, `perf/mfu` with every `train/loss`.

    Tokens are input tokens over all ranks, labelled or not; there is no padding among them (rows are full
    or packed). Time is wall-clock time between two log steps, less validation and checkpoints: the device is
    waited for only where the clock stops. The first `warmup` steps of a process (compilation, tuning) are
    left out.

        mfu = 3 · forward FLOPs / (seconds · peak · ranks)

    The FLOPs are `module.flops` of every micro-batch; a backward pass costs twice a forward pass, and
    recomputation does not count.

    Args:
        warmup: optimizer steps left out.
    """

    def __init__(self, warmup: int = 3) -> None:
        self.warmup = warmup
        self.clock = time.perf_counter
        self.total_tokens, self.total_seconds = 0.0, 0.0

    @property
    def mean(self) -> float | None:
        """Tokens/s over all windows of this process, or None before the first."""
        return self.total_tokens / self.total_seconds if self.total_seconds else None

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._first = trainer.global_step + self.warmup
        self._tokens, self._flops, self._seconds = 0, 0.0, 0.0
        self._since: float | None = None  # None: the clock stands
        device = trainer.strategy.root_device
        self._peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, index: int) -> None:
        if self._since is None and trainer.global_step >= self._first:
            self._wait(trainer)
            self._since = self.clock()

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if self._since is None:
            return
        self._tokens += batch["input_ids"].numel()
        self._flops += module.flops(batch)
        if module.ends_step(index) and module.is_log_step(trainer.global_step):
            self._stop(trainer)
            self._since = self.clock()
            self._report(trainer, module)

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._stop(trainer)

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict) -> None:
        self._stop(trainer)

    def _stop(self, trainer: Trainer) -> None:
        """Stop the clock; the next micro-batch starts it again."""
        if getattr(self, "_since", None) is not None:
            self._wait(trainer)
            self._seconds += self.clock() - self._since
            self._since = None

    @staticmethod
    def _wait(trainer: Trainer) -> None:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize(trainer.strategy.root_device)

    def _report(self, trainer: Trainer, module: LightningModule) -> None:
        numbers = torch.tensor([self._tokens, self._flops, self._seconds], device=module.device)
        tokens, flops = trainer.strategy.reduce(numbers[:2].clone(), reduce_op="sum").tolist()
        seconds = float(trainer.strategy.reduce(numbers[2:].clone(), reduce_op="max"))
        self._tokens, self._flops, self._seconds = 0, 0.0, 0.0
        self.total_tokens += tokens
        self.total_seconds += seconds
        rate = tokens / seconds
        values = {"perf/tokens_per_s": rate}
        if self._peak is not None:
            values["perf/mfu"] = 3 * flops / (seconds * self._peak * trainer.world_size)
        module.record(values, trainer.global_step)
