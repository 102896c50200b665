"""The kernels as a GPU's compiler makes them, by the plans that calls get."""

import itertools
import random
from collections.abc import Callable

import pytest
import torch
import triton
from torch import Tensor

from src.ops.kernels import check, launch
from src.ops.reference import parallel
from tests.ops.helpers import assert_close, assert_same_with_gradients, inputs, leaves, operator, part
from tests.ops.kernels import DELTA, DEVICE, FAMILIES, KEYS, SCALE, assert_exact, both, matrices, run

pytestmark = pytest.mark.gpu

PRECISIONS = [(torch.bfloat16, 1e-2), (torch.float32, 1e-5)]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("K", "V"), [(128, 64), (16, 16), (64, 64)])
@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_head_dims(family: str, dtype: torch.dtype, bound: float, K: int, V: int, seed: int) -> None:
    for T in (1, 63, 129, 1000):
        assert_exact(family, inputs(family, T, B=2, G=2, H=4, K=K, V=V), dtype=dtype, bound=bound)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("K", "V"), [(48, 80), (256, 32), (256, 512)])
@pytest.mark.parametrize("family", FAMILIES)
def test_odd_and_large_head_dims(family: str, K: int, V: int, seed: int) -> None:
    for dtype, bound in PRECISIONS:
        assert_exact(family, inputs(family, 300, G=1, H=2, K=K, V=V), dtype=dtype, bound=bound)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents(family: str, dtype: torch.dtype, bound: float, seed: int) -> None:
    cuts = [0, 0, 1, 16, 80, 208, 208, 1000, 1777]
    assert_exact(family, inputs(family, 1777, G=1, H=8, K=64, V=64, L=8), cuts, dtype=dtype, bound=bound)


@pytest.mark.parametrize("adapt", KEYS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
@pytest.mark.parametrize("family", DELTA)
def test_keys_and_write_strengths(family: str, dtype: torch.dtype, bound: float, adapt: Callable, seed: int) -> None:
    arguments = inputs(family, 300, K=64, V=64, decay=0.5 if adapt.__name__ == "long_keys" else 0.01)
    adapt(arguments)
    assert_exact(family, arguments, dtype=dtype, bound=bound)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_three_calls_are_one(family: str, dtype: torch.dtype, bound: float, packed: bool, seed: int) -> None:
    """Rows, or one packed document in each call; states and gradients cross every cut."""
    T = 700
    given, exact = both(inputs(family, T, H=4, K=64, V=64, decay=0.02), dtype)
    tensors, exact_tensors = leaves(given), leaves(exact)
    cuts = [0, *sorted(random.sample(range(1, T), 2)), T]
    print("cuts", cuts)
    state, pieces = None, []
    for a, b in itertools.pairwise(cuts):
        o, state = operator(family)(
            **part(given, a, b),
            scale=SCALE,
            initial_state=state,
            return_state=True,
            cu_seqlens=torch.tensor([0, b - a], device=DEVICE) if packed else None,
            backend="triton",
        )
        pieces.append(o)
    expected, _ = operator(family)(**exact, scale=SCALE, backend="torch")
    assert_same_with_gradients(torch.cat(pieces, 1), expected, tensors, bound, exact_tensors)


@pytest.mark.parametrize("family", FAMILIES)
def test_gates_and_scales_of_bf16(family: str, seed: int) -> None:
    given = {n: None if x is None else x.to(DEVICE, torch.bfloat16) for n, x in inputs(family, 300, K=64).items()}
    exact = {name: None if x is None else x.double() for name, x in given.items()}
    tensors, exact_tensors = leaves(given), leaves(exact)
    expected, _ = operator(family)(**exact, scale=SCALE, backend="torch")
    assert_same_with_gradients(run(family, given), expected, tensors, 1e-2, exact_tensors)


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_takes_kernels(family: str, seed: int) -> None:
    """For fp32 and bf16; fp64 is left to PyTorch."""
    for dtype in (torch.float32, torch.bfloat16):
        given, _ = both(inputs(family, 200), dtype)
        o, _ = operator(family)(**given, scale=SCALE)
        assert torch.equal(o, run(family, given))
    exact = {name: None if x is None else x.to(DEVICE) for name, x in inputs(family, 200).items()}
    auto, _ = operator(family)(**exact)
    assert torch.equal(auto, operator(family)(**exact, backend="torch")[0])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_by_inductor(family: str, packed: bool, seed: int) -> None:
    torch._dynamo.reset()
    given, _ = both(inputs(family, 300), torch.bfloat16)
    tensors = leaves(given)
    cu = torch.tensor([0, 70, 70, 300], device=DEVICE) if packed else None
    compiled = torch.compile(lambda **a: run(family, a, cu_seqlens=cu), fullgraph=True)
    assert_same_with_gradients(compiled(**given), run(family, given, cu_seqlens=cu), tensors, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_never_waits_for_the_device(family: str, dtype: torch.dtype, seed: int) -> None:
    """Packed, continued and back, once everything is compiled and checked."""
    first, second = (both(inputs(family, 300, L=9), dtype)[0] for _ in range(2))
    leaves(first), leaves(second)
    cu, more = (torch.tensor(cuts, device=DEVICE) for cuts in ([0, 0, 5, 70, 300], [0, 100, 101, 180, 300]))

    def step() -> None:
        options = {"scale": SCALE, "return_state": True, "backend": "triton"}
        run(family, first).sum().backward()
        _, state = operator(family)(**first, **options, cu_seqlens=cu)
        o, state = operator(family)(**second, **options, cu_seqlens=more, initial_state=state)
        (o.sum() + matrices(state).sum()).backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # any synchronisation raises
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_runs_are_bit_equal(family: str, packed: bool, seed: int) -> None:
    given, _ = both(inputs(family, 16_384, G=2, H=8, K=64, V=64, decay=1e-3), torch.bfloat16)
    tensors = leaves(given)
    cu = torch.tensor([0, 300, 300, 16_384], device=DEVICE) if packed else None
    weight = torch.randn_like(given["v"])
    runs = []
    for _ in range(3):
        o = run(family, given, cu_seqlens=cu)
        runs.append([o, *torch.autograd.grad(o, list(tensors.values()), weight)])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*runs, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_long_sequence_is_its_pieces(family: str, seed: int) -> None:
    """131,072 tokens at once, and in calls of odd lengths; the decay lets the first reach the last."""
    T = 131_072
    given, _ = both(inputs(family, T, H=2, K=64, V=64, decay=1e-5), torch.bfloat16)
    cuts = [0, 1, 4097, 30_000, 30_063, 65_536, 100_001, T]
    with torch.no_grad():
        whole, end = operator(family)(**given, scale=SCALE, return_state=True, backend="triton")
        state, pieces = None, []
        for a, b in itertools.pairwise(cuts):
            o, state = operator(family)(
                **part(given, a, b), scale=SCALE, initial_state=state, return_state=True, backend="triton"
            )
            pieces.append(o)
    assert_close(torch.cat(pieces, 1), whole, 1e-2, "output")
    assert_close(matrices(state), matrices(end), 1e-2, "states")


@pytest.mark.parametrize("family", FAMILIES)
def test_long_gradients_are_those_in_fp32(family: str, seed: int) -> None:
    """Too long for fp64 squares: bf16 kernels against the fp32 ones, which the other tests compare with fp64."""
    given, _ = both(inputs(family, 16_384, H=2, K=64, V=64, decay=1e-4), torch.bfloat16)
    single = {name: None if x is None else x.float() for name, x in given.items()}
    tensors, single_tensors = leaves(given), leaves(single)
    expected: Tensor = run(family, single)
    assert_same_with_gradients(run(family, given), expected, tensors, 2e-2, single_tensors)


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_ahead(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels of a step, side by side, of head dims that no other test has; then a step compiles nothing."""
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda *, fn, **_: compiled.append(fn.name))
    monkeypatch.setattr(check, "ensure", lambda *_: None)
    given, exact = both(inputs(family, 300, K=48, V=16))
    tensors, exact_tensors = leaves(given), leaves(exact)
    # In this thread, because the backward pass must not run either.
    with torch.autograd.set_multithreading_enabled(False), launch.compiling_ahead():
        run(family, given).sum().backward()
    assert len(compiled) > 5
    compiled.clear()
    assert_same_with_gradients(run(family, given), parallel(**exact, scale=SCALE), tensors, 1e-5, exact_tensors)
    assert not compiled
