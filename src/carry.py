"""Training with state: truncated back-propagation through time, over rows that continue each other.

A step's loss is differentiated within its rows; the state with which they begin is a constant. Lanes and their
rows are those of `src/data/common/lanes.py`.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from src.data import Batch
from src.errors import UserError
from src.model import LanguageModel
from src.ops.state import ModelState


class CarriedStates:
    """The lanes' states of one rank, by micro-batch of an optimizer step."""

    def __init__(self) -> None:
        self.states: dict[int, ModelState] = {}

    def hidden(self, model: LanguageModel, batch: Batch, micro_batch: int) -> Tensor:
        """`model.hidden` of a packed batch whose first documents go on from the step before."""
        carry, before = batch["carry"], None
        if len(carry.fresh) < len(carry.lane):  # both on the host's side of a shape: nothing waits for the device
            before = self.states[micro_batch].select(carry.lane).reset(carry.fresh)
        hidden, after = model.hidden_step(batch["input_ids"], before, batch["cu_seqlens"])
        self.states[micro_batch] = after.select(carry.last).detach()
        return hidden

    def save(self) -> list[dict[int, ModelState]]:
        """The states of all ranks, on the CPU, for a checkpoint. Every rank calls it."""
        own = {m: state.to("cpu") for m, state in self.states.items()}
        if not dist.is_initialized():
            return [own]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        return everyone

    def load(self, saved: list[dict[int, ModelState]], rank: int, world_size: int, micro_batches: int) -> None:
        """Raises UserError where the lanes are divided otherwise than when they were saved."""
        if (len(saved), len(saved[0])) != (world_size, micro_batches):
            raise UserError(
                f"data.carry_state=true: states were saved of {len(saved)} ranks with {len(saved[0])} micro-batches,"
                f" not of {world_size} with {micro_batches}: keep the number of ranks and trainer.micro_batch_size"
            )
        self.states = saved[rank]

    def to(self, device: torch.device) -> None:
        self.states = {m: state.to(device) for m, state in self.states.items()}


def check_bounded(model: LanguageModel, mixer: str) -> None:
    """Raises UserError for a mixer whose state grows with the text."""
    if not all(block.mixer.bounded_state for block in model.blocks):
        raise UserError(
            f"data.carry_state=true: mixer={mixer} keeps keys and values of every token, without bound;"
            " use a mixer with states (mamba2, gated_deltanet, loglinear_mamba2, loglinear_gdn)"
        )
