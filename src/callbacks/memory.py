"""Memory of the training process."""

from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

MIB = 2**20


class Memory(Callback):
    """Logs memory in MiB with every `train/loss`, the largest over ranks.

    On CUDA: `mem/peak_allocated` and `mem/peak_reserved` since the last log step, and `mem/alloc_retries`
    (how often since the start the allocator had to empty its cache). Elsewhere: `mem/resident`, the resident
    set of the process.
    """

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if not module.ends_step(index) or not module.is_log_step(trainer.global_step):
            return
        device = trainer.strategy.root_device
        if device.type == "cuda":
            values = {
                "mem/peak_allocated": torch.cuda.max_memory_allocated(device) / MIB,
                "mem/peak_reserved": torch.cuda.max_memory_reserved(device) / MIB,
                "mem/alloc_retries": torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
            }
            torch.cuda.reset_peak_memory_stats(device)
        else:
            values = {"mem/resident": psutil.Process().memory_info().rss / MIB}
        largest = trainer.strategy.reduce(
            torch.tensor(list(values.values()), dtype=torch.float32, device=device), reduce_op="max"
        )
        module.record(dict(zip(values, largest.tolist(), strict=True)), trainer.global_step)
