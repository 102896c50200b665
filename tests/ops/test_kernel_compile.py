"""The kernels of ``ssd`` and ``loglinear_ssd`` as operators of PyTorch: registered, and inside compiled graphs."""

import pytest
import torch
from torch import Tensor

from src.ops.kernels.ssd import documents_of, ssd_backward, ssd_forward
from tests.ops.helpers import assert_close, assert_same_with_gradients, inputs, leaves, operator
from tests.ops.kernels import DEVICE, FAMILIES, ONE_KIND, SCALE, both

pytestmark = pytest.mark.usefixtures("pair", "poisoned")


def registered(family: str, packed: bool, gradients: bool) -> tuple:
    """Arguments of the registered operators up to ``max_chunk``; with documents, states from before too."""
    given, _ = both(inputs(family, 8, H=1, L=8))
    tensors = [None if given[n] is None else given[n].requires_grad_(gradients) for n in ("q", "k", "v", "g")]
    scales = given["level_scales"]
    scales = None if scales is None else scales.requires_grad_(gradients)
    documents = roots = None
    if packed:
        documents = documents_of(torch.tensor([0, 3, 3, 8], device=DEVICE))
        roots = torch.randn(3, 1, 16, 16, device=DEVICE)
        if family == "loglinear_ssd":
            documents[2] = torch.tensor([1, 0, 2], device=DEVICE)
            roots = roots * torch.tensor([[1.0, 0, 0], [0, 0, 1]], device=DEVICE)[..., None, None, None]
        roots.requires_grad_(gradients)
    return *tensors, scales, documents, roots, SCALE, 2 if packed else 0


@pytest.mark.parametrize("pair", [0], indirect=True)
@pytest.mark.parametrize(("family", "packed"), [("ssd", False), ("loglinear_ssd", True)])
def test_registered_operators(family: str, packed: bool, seed: int) -> None:
    """Schema, autograd, stand-ins, and tracing with dynamic shapes."""
    torch.library.opcheck(ssd_forward, (*registered(family, packed, True), 2 if packed else -1))
    arguments = registered(family, packed, False)
    with torch.no_grad():
        o, levels = ssd_forward(*arguments, 2 if packed else -1)
    torch.library.opcheck(ssd_backward, (o, levels if packed else None, *arguments))


@pytest.mark.parametrize("pair", [0], indirect=True)
@pytest.mark.parametrize("family", FAMILIES)
def test_compiles_whole(family: str, seed: int) -> None:
    """Nothing depends on where documents end: three packings, one graph."""
    torch._dynamo.reset()
    given, _ = both(inputs(family, 70, H=1))
    tensors = leaves(given)

    def call(cu: Tensor) -> Tensor:
        return operator(family)(**given, scale=SCALE, cu_seqlens=cu, backend="triton")[0]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for cuts in ([0, 30, 30, 70], [0, 1, 2, 70], [0, 64, 65, 70]):
            cu = torch.tensor(cuts, device=DEVICE)
            assert_same_with_gradients(compiled(cu), call(cu), tensors, 1e-6)


@ONE_KIND
@pytest.mark.parametrize("family", FAMILIES)
def test_states_pass_through_compiled_calls(family: str, seed: int) -> None:
    """Rows, then the same rows continued."""
    torch._dynamo.reset()
    first, second = (both(inputs(family, T, H=1, L=8))[0] for T in (70, 20))
    tensors = leaves(first)

    def call() -> tuple[Tensor, Tensor]:
        options = {"scale": SCALE, "return_state": True, "backend": "triton"}
        _, state = operator(family)(**first, **options)
        o, state = operator(family)(**second, **options, initial_state=state)
        return o, state.memory if family == "ssd" else state.levels

    made, expected = torch.compile(call, fullgraph=True, backend="aot_eager")(), call()
    for a, b in zip(made, expected, strict=True):
        assert_close(a, b, 1e-6, "output or state")
    wanted = [tensors[name] for name in ("k", "v", "g")]
    grads, exact = (torch.autograd.grad([x.square().sum() for x in run], wanted) for run in (made, expected))
    for name, a, b in zip(("k", "v", "g"), grads, exact, strict=True):
        assert_close(a, b, 1e-6, f"gradient of {name}")
