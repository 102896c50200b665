"""The kernels as operators of PyTorch: registered, and inside compiled graphs."""

import pytest
import torch
from torch import Tensor, library

from src.ops.kernels.delta.ops import delta_backward, delta_forward
from src.ops.kernels.ssd import documents_of, ssd_backward, ssd_forward
from tests.ops.helpers import assert_close, assert_same_with_gradients, inputs, leaves, operator
from tests.ops.kernels import DELTA, DEVICE, FAMILIES, LOGLINEAR, ONE_KIND, SCALE, both, matrices

pytestmark = pytest.mark.usefixtures("pair", "poisoned")


def registered(family: str, packed: bool, gradients: bool) -> tuple:
    """Arguments of the registered operators up to ``max_chunk``; with documents, states from before too, and then
    neither they nor the level scales are dense."""
    given, _ = both(inputs(family, 8, H=1, L=8))
    names = ("q", "k", "v", "g", "beta") if family in DELTA else ("q", "k", "v", "g")
    tensors = [given[name].requires_grad_(gradients) for name in names]
    scales = given["level_scales"]
    if scales is not None:
        scales = (apart(scales) if packed else scales).requires_grad_(gradients)
    documents = roots = None
    if packed:
        documents = documents_of(torch.tensor([0, 3, 3, 8], device=DEVICE))
        roots = torch.randn(3, 1, 16, 16, device=DEVICE)
        if family in LOGLINEAR:
            documents[2] = torch.tensor([1, 0, 2], device=DEVICE)
            roots = roots * torch.tensor([[1.0, 0, 0], [0, 0, 1]], device=DEVICE)[..., None, None, None]
        roots = apart(roots).requires_grad_(gradients)
    return *tensors, scales, documents, roots, SCALE, 2 if packed else 0


def apart(x: Tensor) -> Tensor:
    """The same values in other strides."""
    return x.mT.contiguous().mT


@pytest.mark.parametrize("pair", [0], indirect=True)
@pytest.mark.parametrize(
    ("family", "packed"),
    [
        ("ssd", False),
        ("loglinear_ssd", True),
        ("gated_delta_rule", False),
        pytest.param("gated_delta_rule", True, marks=pytest.mark.slow),
        ("loglinear_gated_delta_rule", True),
    ],
)
def test_registered_operators(family: str, packed: bool, seed: int) -> None:
    """Schema, autograd, stand-ins, and tracing with dynamic shapes."""
    forward, backward = (delta_forward, delta_backward) if family in DELTA else (ssd_forward, ssd_backward)
    library.opcheck(forward, (*registered(family, packed, True), 2 if packed else -1))
    arguments = registered(family, packed, False)
    with torch.no_grad():
        o, levels = forward(*arguments, 2 if packed else -1)
    library.opcheck(backward, (o, levels if packed else None, *arguments))


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
        return o, matrices(state)

    made, expected = torch.compile(call, fullgraph=True, backend="aot_eager")(), call()
    for a, b in zip(made, expected, strict=True):
        assert_close(a, b, 1e-6, "output or state")
    names = ("k", "v", "g", "beta") if family in DELTA else ("k", "v", "g")
    wanted = [tensors[name] for name in names]
    grads, exact = (torch.autograd.grad([x.square().sum() for x in run], wanted) for run in (made, expected))
    for name, a, b in zip(names, grads, exact, strict=True):
        assert_close(a, b, 1e-6, f"gradient of {name}")
