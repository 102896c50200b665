"""The sizes that `tools.bench` knows by name, and the tokens that all candidates of a length share."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from src import ops
from src.ops.linear import _without_kernels

FAMILIES = {"ssd": ("ssd", "loglinear_ssd"), "delta_rule": ("gated_delta_rule", "loglinear_gated_delta_rule")}
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of one call; `lengths` are the default ones on a CUDA device."""

    batch: int
    heads: int
    groups: int
    key_dim: int
    value_dim: int
    lengths: tuple[int, ...]
    attention: tuple[int, int] | None = None
    """Heads of softmax peers and their dim; None: as many heads as ours, as wide as the values."""


DELTA_LENGTHS = (2048, 4096, 8192, 16384, 131072)
SHAPES = {
    "cpu": Shape(1, 4, 4, 32, 32, (4096, 16384)),
    "paper": Shape(2, 48, 1, 128, 64, (4096, 16384, 131072)),
    "heads16": Shape(1, 16, 16, 128, 128, (4096, 16384, 65536)),
    "delta": Shape(2, 16, 16, 128, 128, DELTA_LENGTHS),
    "delta1": Shape(1, 16, 16, 128, 128, DELTA_LENGTHS),
    # The paper's Gated DeltaNet, beside its Transformer: that has 16 heads of 96 where a layer of this one has 6.
    "paper_delta": Shape(2, 6, 6, 192, 384, DELTA_LENGTHS, attention=(16, 96)),
    "small": Shape(8, 4, 4, 64, 64, (512,)),
    "mqar": Shape(64, 2, 2, 16, 16, (64, 256)),
}
SLOWEST, FASTEST = 1e-4, 1e-1
"""Log decays of a token, at most, of the heads that forget least and most."""
SMALL = ("small", "mqar")
"""Shapes at which the PyTorch forms are quick enough to be timed beside the kernels without being asked for."""


@dataclass(frozen=True)
class Setup:
    """Everything about a call but its length."""

    family: str
    shape: str
    batch: int
    heads: int
    groups: int
    key_dim: int
    value_dim: int
    dtype: str
    device: str
    attention: tuple[int, int] | None = None

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")

    def __str__(self) -> str:
        sizes = f"batch {self.batch}, heads {self.heads}, groups {self.groups}, K {self.key_dim}, V {self.value_dim}"
        softmax = ", softmax {} x {}".format(*self.attention) if self.attention else ""
        return f"{self.family}, {self.shape}: {sizes}{softmax}, {self.dtype}"


def draw(setup: Setup, T: int, levels: int | None = None) -> Tensors:
    """Fresh random tokens: unit keys, gates and scales in fp32.

    Heads decay at rates spread logarithmically between :data:`SLOWEST` (a single head: this one) and :data:`FASTEST`,
    `g = -rate * rand`: were all of them fast, a comparison at a long length would see neighbouring tiles only.
    """
    dtype, device = getattr(torch, setup.dtype), setup.device
    gates = torch.promote_types(dtype, torch.float32)
    B, G, H, K, V = setup.batch, setup.groups, setup.heads, setup.key_dim, setup.value_dim
    rates = torch.logspace(math.log10(SLOWEST), math.log10(FASTEST), H, dtype=gates, device=device)
    made = {
        "q": torch.randn(B, T, G, K, dtype=dtype, device=device),
        "k": F.normalize(torch.randn(B, T, G, K, device=device), dim=-1).to(dtype),
        "v": torch.randn(B, T, H, V, dtype=dtype, device=device),
        "g": -rates * torch.rand(B, T, H, dtype=gates, device=device),
    }
    if setup.family == "delta_rule":
        made["beta"] = torch.rand(B, T, H, dtype=gates, device=device)
    made["level_scales"] = torch.rand(B, T, H, levels or ops.num_levels(T), dtype=gates, device=device)
    return made


def auto_takes(setup: Setup) -> str:
    """What `backend="auto"` is here, as the operators decide it."""
    token = draw(replace(setup, batch=1), 1)
    missing = _without_kernels(token["v"])
    return "torch" if missing or not token["v"].is_cuda else "triton"
