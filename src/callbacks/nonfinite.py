"""Stop at the first non-finite gradient, with the name of the layer where it arose."""

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from src.ops.state import ModelState

# Micro-batches after which to look although nothing is logged: 64 of 64 Ki tokens are 64 MiB.
MOST_KEPT = 64


class NonFiniteError(RuntimeError):
    """Loss or gradient is not finite; the message is one line and names the layer."""


class NonFiniteGuard(Callback):
    """Raises NonFiniteError when a gradient norm was NaN or infinite since the last log step.

    `LanguageModule` keeps a flag on the device and stops updating the parameters once it is set, so that
    looking at log steps is soon enough: the batches since the last look are kept (token ids only, and the states
    that they continued) and run again, with hooks, on the parameters that failed. No checkpoint is written once the
    flag is set.
    """

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []
        self.states: list[dict[int, ModelState]] = []

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, index: int) -> None:
        self.batches.append(batch)
        micro_batch = index % trainer.accumulate_grad_batches
        own = module.carried.states.get(micro_batch)
        self.states.append({} if own is None else {0: own})  # never changed in place

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if module.ends_step(index) and (module.is_log_step(trainer.global_step) or len(self.batches) >= MOST_KEPT):
            self._check(trainer, module)
            self.batches.clear()
            self.states.clear()

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict) -> None:
        self._check(trainer, module)

    def _check(self, trainer: Trainer, module: LightningModule) -> None:
        if not float(module.failed):
            return
        with trainer.precision_plugin.train_step_context():
            where = next(filter(None, self._layers(module)), "no single layer: the norm itself overflowed")
        last = trainer.global_step
        raise NonFiniteError(
            f"loss or gradient is not finite at step {last} or shortly before; first in {where}"
            " (try a smaller optim.lr, or trainer.precision=32-true)"
        )

    def _layers(self, module: LightningModule) -> Iterator[str | None]:
        for batch, states in zip(self.batches, self.states, strict=True):
            module.carried.states = states
            yield first_nonfinite(module, batch)


def first_nonfinite(module: LightningModule, batch: dict[str, Any]) -> str | None:
    """Where NaN or infinity first arises in a loss and its gradient, or None if all is finite.

    Looked at in this order: parameters; outputs of layers, the innermost first, in the order of computation;
    the loss; gradients of parameters, from the last layer backwards. `module` is in training mode and has
    `model` and `nll_sum(batch)`.
    """
    model: nn.Module = module.model
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return f"parameter {name}"

    found: list[str] = []

    def watch(name: str):
        def hook(layer: nn.Module, inputs: Any, output: Any) -> None:
            tensors = output if isinstance(output, tuple) else (output,)
            bad = any(isinstance(t, Tensor) and t.is_floating_point() and not t.isfinite().all() for t in tensors)
            if bad and not found:
                found.append(f"the output of {name} ({type(layer).__name__})")

        return hook

    handles = [layer.register_forward_hook(watch(name)) for name, layer in model.named_modules() if name]
    try:
        # Compiled blocks would skip hooks of their inner layers.
        with torch.compiler.set_stance("force_eager"), torch.enable_grad():
            loss = module.nll_sum(batch)
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return found[0]
    if not loss.isfinite():
        return "the loss (all layers' outputs are finite)"
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    # Not backward(): that would fire the hooks of data-parallel wrappers.
    gradients = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
    for (name, _), gradient in reversed(list(zip(named, gradients, strict=True))):
        if gradient is not None and not gradient.isfinite().all():
            return f"the gradient of {name}"
    return None
