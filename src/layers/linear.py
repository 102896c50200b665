"""The linear layer, the embedding and the output head, and the one way parameters are initialised."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from src.ops import costs


class Linear(nn.Linear):
    """`y = x Wᵀ (+ b)` with `W ~ N(0, (init_std · std_scale)²)` and `b = 0`, as GPT-2 initialises it.

    Args:
        std_scale: factor on `init_std`; a projection back into the residual stream passes
            `Mixer.residual_scale`. The model sets `init_std` on its layers from its config.
    """

    init_std: float = 0.02

    def __init__(self, d_in: int, d_out: int, *, bias: bool = False, std_scale: float = 1.0) -> None:
        self.std_scale = std_scale
        super().__init__(d_in, d_out, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.init_std * self.std_scale)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def flops_per_token(self) -> float:
        return costs.linear(self.in_features, self.out_features)


def padded_linear(x: Tensor, weight: Tensor, multiple: int) -> Tensor:
    """`x Wᵀ` of `x [..., D]` and `weight [V, D]`, multiplied with zero rows up to a multiple of so many, then cut.

    For a vocabulary like GPT-2's 50,257 entries: cuBLAS has its fast kernels only for matrices whose rows begin at
    multiples of 16 bytes, and an odd number of logits takes the ones made for a chip of 2018.
    """
    V = weight.shape[0]
    return F.linear(x, F.pad(weight, (0, 0, 0, -V % multiple)))[..., :V]


def vocabulary_linear(h: Tensor, weight: Tensor) -> Tensor:
    """`h Wᵀ` to one logit for each of V tokens: `padded_linear` where that is faster, on a GPU and for many tokens."""
    if h.device.type == "cuda" and weight.shape[0] % 8 and h.numel() >= 256 * h.shape[-1]:
        return padded_linear(h, weight, 64)
    return F.linear(h, weight)


class Head(Linear):
    """An output matrix that is not the embedding's."""

    def forward(self, h: Tensor) -> Tensor:
        return vocabulary_linear(h, self.weight)


class Embedding(nn.Embedding):
    """`nn.Embedding` that starts at `N(0, init_std²)`; PyTorch's 1 would make a tied head's logits huge."""

    init_std: float = 0.02

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.init_std)


@torch.no_grad()
def initialise(model: nn.Module) -> None:
    """Call `reset_parameters` of every module that owns parameters, in the order of `model.modules()`.

    That is also what Lightning does after it has materialised a meta-device model, so a sharded run and a
    plain one draw the same numbers. A module that owns parameters without the method raises TypeError: it
    would keep uninitialised memory.
    """
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is None:
            continue
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise TypeError(f"{name} ({type(module).__name__}) owns parameters but has no reset_parameters()")
        reset()
