"""Parameter groups and learning-rate schedules, as pure functions.

Choices: AdamW; decay only on matrices that are not embeddings; the schedule is a function of the optimizer
step and `max_steps` alone, so that a resumed run needs no state but its step.
"""

import math
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from src.errors import UserError


@dataclass
class OptimConfig:
    lr: float = 3e-3
    """Peak learning rate of AdamW."""
    weight_decay: float = 0.1
    """Decay of the weight matrices; vectors, embeddings and flagged parameters are never decayed."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's averaging factors of the gradient and of its square."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: half a cosine, flat with a linear decay at the end (WSD), or flat."""
    warmup_steps: int = 50
    """Optimizer steps over which the learning rate rises linearly to its peak."""
    decay_steps: int | None = None
    """Last optimizer steps over which WSD decays; null: a fifth of trainer.max_steps."""
    min_lr_ratio: float = 0.1
    """Learning rate at the end of cosine and WSD, as a share of the peak."""

    def __post_init__(self) -> None:
        checks = [
            ("lr", self.lr > 0, "above 0"),
            ("weight_decay", self.weight_decay >= 0, "0 or more"),
            ("betas", all(0 <= b < 1 for b in self.betas), "two numbers in [0, 1)"),
            ("eps", self.eps > 0, "above 0"),
            ("warmup_steps", self.warmup_steps >= 0, "0 or more"),
            ("decay_steps", self.decay_steps is None or self.decay_steps > 0, "null or above 0"),
            ("min_lr_ratio", 0 <= self.min_lr_ratio <= 1, "between 0 and 1"),
        ]
        for key, right, allowed in checks:
            if not right:
                raise UserError(f"optim.{key}={getattr(self, key)}: must be {allowed}")


def lr_at(step: int, config: OptimConfig, max_steps: int) -> float:
    """Learning rate of optimizer step `step` (0 is the first) as a share of `config.lr`.

    Warm-up: (step + 1) / warmup_steps, so that no step is wasted at 0. Then, with r = min_lr_ratio and p the
    share of the decay that is over: cosine r + (1 - r)(1 + cos πp)/2 from the end of the warm-up to
    `max_steps`; WSD (Hu et al. 2024, arXiv:2404.06395) 1 - (1 - r) p over the last `decay_steps`.
    Steps after `max_steps` keep the last value. A warm-up longer than the run never reaches the peak.
    """
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    floor = config.min_lr_ratio
    if config.schedule == "cosine":
        start = min(config.warmup_steps, max_steps)
        p = _share(step, start, max_steps)
        return warm * (floor + (1 - floor) * (1 + math.cos(math.pi * p)) / 2)
    if config.schedule == "wsd":
        decay_steps = config.decay_steps or max(1, max_steps // 5)
        p = _share(step, max_steps - decay_steps, max_steps)
        return warm * (1 - (1 - floor) * p)
    return warm


def _share(step: int, start: int, end: int) -> float:
    return min(1.0, max(0.0, (step - start) / (end - start))) if end > start else 0.0


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two AdamW groups, decayed and not, that hold every trainable parameter of `model` exactly once.

    Not decayed: parameters of fewer than two dimensions (norms, biases, gates), those that carry
    `no_weight_decay = True`, and embeddings, a head tied to one included (one parameter under two names).
    """
    trainable = dict(p for p in model.named_parameters() if p[1].requires_grad)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    decayed, kept = [], []
    for p in trainable.values():
        plain = p.ndim < 2 or id(p) in embeddings or getattr(p, "no_weight_decay", False)
        (kept if plain else decayed).append(p)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    # Lazily built or shared modules have escaped optimizers unnoticed elsewhere: count by identity.
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted({id(p) for p in model.parameters() if p.requires_grad})
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: OptimConfig, max_steps: int) -> dict:
    """AdamW and its schedule under the keys that Lightning's `configure_optimizers` expects.

    The schedule advances once an optimizer step ("interval": "step"); Lightning counts epochs otherwise.
    """
    groups = parameter_groups(model, config.weight_decay)
    # One kernel for the whole update where the backend has it: on CUDA about a third of the foreach time.
    fused = all(p.device.type in {"cuda", "cpu"} for group in groups for p in group["params"])
    optimizer = AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
    scheduler = LambdaLR(optimizer, lambda step: lr_at(step, config, max_steps))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
