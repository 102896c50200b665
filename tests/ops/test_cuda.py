"""The PyTorch operators on a CUDA device: right, deterministic, without waiting for the device."""

import pytest
import torch

from src.ops import attention, short_convolution, softmax_attention
from src.ops.reference import parallel, recurrent
from tests.ops.helpers import (
    FAMILIES,
    assert_close,
    assert_same_with_gradients,
    inputs,
    leaves,
    operator,
    part,
)

pytestmark = pytest.mark.gpu


def on_cuda(arguments: dict) -> dict:
    return {name: x if x is None else x.cuda() for name, x in arguments.items()}


@pytest.mark.parametrize("T", [1, 17, 64, 129, 1000])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_fp64_on_the_cpu(family: str, T: int, seed: int) -> None:
    exact = inputs(family, T, B=2, H=4, G=2, K=64, V=32)
    exact_tensors = leaves(exact)
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        given = on_cuda({name: None if x is None else x.detach().to(dtype) for name, x in exact.items()})
        tensors = leaves(given)
        weight = torch.randn(2, T, 4, 32, dtype=torch.float64)
        o, _ = operator(family)(**given)
        reference = parallel(**exact)
        got = torch.autograd.grad(o, list(tensors.values()), weight.to(dtype).cuda())
        expected = torch.autograd.grad(
            reference, list(exact_tensors.values()), weight, allow_unused=True, materialize_grads=True
        )
        assert_close(o.cpu(), reference, bound, "output")
        for name, a, b in zip(tensors, got, expected, strict=True):
            assert_close(a.cpu(), b, bound, f"gradient of {name}, {dtype}")


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_and_continued_without_waiting(family: str, seed: int) -> None:
    cu = torch.tensor([0, 0, 5, 70, 261, 300])
    more = torch.tensor([0, 100, 101, 101, 180, 300])
    first, second = inputs(family, 300, L=10), inputs(family, 300, L=10)
    _, state = operator(family)(**first, cu_seqlens=cu, return_state=True)
    expected, _ = operator(family)(**second, cu_seqlens=more, initial_state=state)
    first, second, cu, more = on_cuda(first), on_cuda(second), cu.cuda(), more.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # any synchronisation raises
    try:
        _, state = operator(family)(**first, cu_seqlens=cu, return_state=True)
        o, _ = operator(family)(**second, cu_seqlens=more, initial_state=state)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close(o.cpu(), expected, 1e-10, "output")


@pytest.mark.parametrize("family", FAMILIES)
def test_two_runs_are_bit_equal(family: str, seed: int) -> None:
    """Long enough that dozens of chunks read the same state: sums of that many by atomics would differ."""
    given = on_cuda(inputs(family, 16_384, H=4, G=2, K=32, V=32, decay=1e-3, dtype=torch.float32))
    tensors = leaves(given)
    cu = torch.tensor([0, 300, 300, 16_384]).cuda()
    runs = []
    for _ in range(3):
        o, _ = operator(family)(**given, cu_seqlens=cu)
        runs.append([o, *torch.autograd.grad(o.square().sum(), list(tensors.values()))])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*runs, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_forms_run_there(family: str, seed: int) -> None:
    exact = inputs(family, 70)
    given = on_cuda(exact)
    expected = parallel(**exact)
    assert_close(parallel(**given).cpu(), expected, 1e-10, "parallel")
    assert_close(recurrent(**given)[0].cpu(), expected, 1e-10, "recurrent")


@pytest.mark.parametrize("family", FAMILIES)
def test_state_rows_by_tensors_there(family: str, seed: int) -> None:
    _, state = operator(family)(**on_cuda(inputs(family, 70, B=3)), return_state=True)
    assert state.select(torch.tensor([2, 0]).cuda()).positions.tolist() == [70, 70]
    assert state.reset(torch.tensor([True, False, False]).cuda()).positions.tolist() == [0, 70, 70]


@pytest.mark.parametrize("family", FAMILIES)
def test_decodes_token_by_token(family: str, seed: int) -> None:
    given = on_cuda(inputs(family, 140, B=2))
    whole, _ = operator(family)(**given)
    _, state = operator(family)(**part(given, 0, 70), return_state=True)
    for t in range(70, 140):
        o, state = operator(family)(**part(given, t, t + 1), initial_state=state, return_state=True)
        assert_close(o, whole[:, t : t + 1], 1e-10, f"token {t}")


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_by_inductor(family: str, seed: int) -> None:
    torch._dynamo.reset()
    given = on_cuda(inputs(family, 300, dtype=torch.float32))
    tensors = leaves(given)
    cu = torch.tensor([0, 70, 70, 300]).cuda()
    compiled = torch.compile(lambda **a: operator(family)(**a)[0], fullgraph=True)
    expected, _ = operator(family)(**given, cu_seqlens=cu)
    assert_same_with_gradients(compiled(**given, cu_seqlens=cu), expected, tensors, 1e-5)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-5)])
def test_packed_attention(dtype: torch.dtype, bound: float, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 through variable-length attention, fp32 document by document."""
    by_document = []
    original = attention.attention_by_document
    monkeypatch.setattr(attention, "attention_by_document", lambda *a: by_document.append(a) or original(*a))
    exact = {name: torch.randn(1, 300, 4, 32).to(dtype).double().requires_grad_() for name in ("q", "k", "v")}
    given = {name: x.detach().to(dtype).cuda().requires_grad_() for name, x in exact.items()}
    cu = torch.tensor([0, 0, 5, 70, 300])
    o, _ = softmax_attention(**given, cu_seqlens=cu.cuda().int())
    assert bool(by_document) == (dtype == torch.float32)
    expected, _ = softmax_attention(**exact, cu_seqlens=cu)
    weight = torch.randn_like(expected)
    assert_close(o.cpu(), expected, bound, "output")
    got = torch.autograd.grad(o, list(given.values()), weight.to(dtype).cuda())
    for name, a, b in zip(given, got, torch.autograd.grad(expected, list(exact.values()), weight), strict=True):
        assert_close(a.cpu(), b, bound, f"gradient of {name}")


def test_packed_convolution(seed: int) -> None:
    x, weight = torch.randn(1, 300, 6), torch.randn(6, 4)
    cu = torch.tensor([0, 0, 5, 70, 300])
    expected, state = short_convolution(x, weight, cu_seqlens=cu, return_state=True)
    y, on_device = short_convolution(x.cuda(), weight.cuda(), cu_seqlens=cu.cuda(), return_state=True)
    assert_close(y.cpu(), expected, 1e-6, "output")
    assert torch.equal(on_device.inputs.cpu(), state.inputs)
