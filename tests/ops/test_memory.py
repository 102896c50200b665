"""What the operators allocate and keep: O(T), never T x T, never every level's states."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.helpers import FAMILIES, inputs, leaves, operator


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                # An expanded view counts what it stores.
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_tensor_grows_faster_than_the_sequence(family: str, packed: bool, seed: int) -> None:
    sizes = []
    for T in (1024, 4096):
        arguments = inputs(family, T, H=1, dtype=torch.float32)
        cu = torch.tensor([0, T // 3, T]) if packed else None
        with Largest() as largest, torch.no_grad():
            operator(family)(**arguments, cu_seqlens=cu)
        sizes.append(largest.numel)
    assert sizes[1] <= 4.2 * sizes[0]
    assert sizes[1] < 4096 * 4096 / 8


@pytest.mark.parametrize("family", FAMILIES)
def test_training_keeps_the_inputs_only(family: str, seed: int) -> None:
    arguments = inputs(family, 2048, dtype=torch.float32)
    tensors = leaves(arguments)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        operator(family)(**arguments)
    given = {x.untyped_storage().data_ptr() for x in tensors.values()}
    assert sum(x.numel() for x in kept if x.untyped_storage().data_ptr() not in given) < 2048
