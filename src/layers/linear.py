"""The linear layer, the embedding, and the one way parameters are initialised."""

import torch
from torch import nn

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
