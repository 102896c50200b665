from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from src.callbacks.throughput import Throughput, peak_flops


class Module:
    """Records what is logged; every second step is a log step."""

    device = torch.device("cpu")

    def __init__(self, accumulation: int) -> None:
        self.accumulation = accumulation
        self.rows: list[tuple[int, dict[str, float]]] = []

    def ends_step(self, index: int) -> bool:
        return (index + 1) % self.accumulation == 0

    def flops(self, batch: dict[str, Any]) -> float:
        return 100.0 * batch["input_ids"].numel() + 7.0 * batch["n_tokens"]

    def is_log_step(self, step: int) -> bool:
        return step % 2 == 0

    def record(self, values: dict[str, float], step: int) -> None:
        self.rows.append((step, values))


class Run:
    """A training loop on a clock that this test turns."""

    def __init__(self, warmup: int, accumulation: int = 1) -> None:
        self.time = 0.0
        self.module = Module(accumulation)
        self.trainer: Any = SimpleNamespace(
            global_step=0,
            accumulate_grad_batches=accumulation,
            world_size=1,
            strategy=SimpleNamespace(root_device=torch.device("cpu"), reduce=lambda tensor, reduce_op: tensor),
        )
        self.callback = Throughput(warmup)
        self.callback.clock = lambda: self.time
        self.callback.on_train_start(self.trainer, self.module)
        self.index = 0

    def step(self, seconds: float, tokens: int, labelled: int = 0) -> None:
        batch = {"input_ids": torch.zeros(1, tokens), "n_tokens": labelled}
        for _ in range(self.trainer.accumulate_grad_batches):
            self.callback.on_train_batch_start(self.trainer, self.module, batch, self.index)
            self.time += seconds
            last = (self.index + 1) % self.trainer.accumulate_grad_batches == 0
            self.trainer.global_step += last
            self.callback.on_train_batch_end(self.trainer, self.module, None, batch, self.index)
            self.index += 1


def test_rate_is_tokens_over_time_without_validation_and_checkpoints():
    run = Run(warmup=2)
    run.step(50.0, 7)  # compilation
    run.step(50.0, 7)
    assert run.module.rows == []
    run.step(1.0, 100)
    run.callback.on_validation_start(run.trainer, run.module)
    run.time += 1000.0
    run.step(1.0, 300)
    run.callback.on_save_checkpoint(run.trainer, run.module, {})
    run.time += 1000.0
    run.step(4.0, 100)
    run.time += 2.0  # waiting for data counts
    run.step(4.0, 100)
    assert run.module.rows == [(4, {"perf/tokens_per_s": 200.0}), (6, {"perf/tokens_per_s": 20.0})]
    assert run.callback.mean == pytest.approx(600 / 12)


def test_micro_batches_count():
    run = Run(warmup=0, accumulation=3)
    run.step(1.0, 10)
    run.step(1.0, 10)
    assert run.module.rows == [(2, {"perf/tokens_per_s": 10.0})]


def test_utilisation_is_three_forwards_over_the_peak():
    run = Run(warmup=0)
    run.callback._peak = 1e5
    run.step(1.0, 100, labelled=10)
    run.step(1.0, 300, labelled=20)
    assert run.module.rows[0][1]["perf/mfu"] == pytest.approx(3 * (400 * 100 + 30 * 7) / 2 / 1e5)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5090 D", None),
        ("NVIDIA A1000", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("Tesla T4", None),
    ],
)
def test_peak_of_known_cards_only(name, peak):
    assert peak_flops(name) == peak


def test_trainer_reduces_by_the_name_of_the_operation():
    """`strategy.reduce` takes "sum" and "max": a mean of sums would be wrong without a sound."""
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert float(trainer.strategy.reduce(torch.tensor(3.0), reduce_op="max")) == 3.0
