"""The four recurrent operators over packed documents and from call to call."""

import itertools
import random

import pytest
import torch

from src.ops.reference import parallel, recurrent
from tests.ops.helpers import (
    FAMILIES,
    LOGLINEAR,
    assert_close,
    assert_same_with_gradients,
    inputs,
    leaves,
    operator,
    part,
)

CUTS = [
    [0, 0, 5, 5, 70],
    [0, 1, 2, 66, 130, 131, 259, 259],
    [0, 300],
    [0, 64, 128, 143, 400, 400, 400, 465],
]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_separate(family: str, cuts: list[int], dtype: torch.dtype, seed: int) -> None:
    arguments = inputs(family, cuts[-1], L=5)
    tensors = leaves(arguments)
    o, state = operator(family)(**arguments, cu_seqlens=torch.tensor(cuts, dtype=dtype), return_state=True)
    pieces = [parallel(**part(arguments, a, b)) for a, b in zip(cuts[:-1], cuts[1:], strict=True) if b > a]
    assert_same_with_gradients(o, torch.cat(pieces, 1), tensors, 1e-10)
    assert state.positions.tolist() == torch.tensor(cuts).diff().tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_cannot_reach_another(family: str, seed: int) -> None:
    cu = torch.tensor([0, 40, 40, 150, 300])
    arguments = inputs(family, 300)
    for x in arguments.values():
        if x is not None:
            x[:, 40:150] = torch.nan
    arguments = {name: x if x is None else x.requires_grad_() for name, x in arguments.items()}
    o, _ = operator(family)(**arguments, cu_seqlens=cu)
    keep = torch.ones(300, dtype=torch.bool)
    keep[40:150] = False
    assert o[:, keep].isfinite().all()
    grads = torch.autograd.grad(o[:, keep].sum(), [x for x in arguments.values() if x is not None])
    assert all(x[:, keep].isfinite().all() for x in grads)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_split_into_calls(family: str, seed: int) -> None:
    T = 420
    arguments = inputs(family, T, B=2, decay=0.02)
    tensors = leaves(arguments)
    whole = parallel(**arguments)
    cuts = sorted({0, T, 64, 65, 70, 71, 128, *random.sample(range(1, T), 5)})
    print("cuts", cuts)
    state, pieces = None, []
    for a, b in zip(cuts[:-1], cuts[1:], strict=True):
        o, state = operator(family)(**part(arguments, a, b), initial_state=state, return_state=True)
        pieces.append(o)
    assert_same_with_gradients(torch.cat(pieces, 1), whole, tensors, 1e-10)
    assert state.positions.tolist() == [T, T]


@pytest.mark.parametrize("n", [1, 63, 64, 65, 70, 127, 128, 129, 1000])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_then_decode(family: str, n: int, seed: int) -> None:
    steps = 70 if n == 1 else 3
    arguments = inputs(family, n + steps, decay=0.01, dtype=torch.float32)
    whole, _ = operator(family)(**arguments)
    _, state = operator(family)(**part(arguments, 0, n), return_state=True)
    for t in range(n, n + steps):
        o, state = operator(family)(**part(arguments, t, t + 1), initial_state=state, return_state=True)
        assert_close(o, whole[:, t : t + 1], 2e-5, f"token {t}")


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_prefill_then_decode(family: str, seed: int) -> None:
    """Documents of all the awkward lengths in one prefill, then three tokens each, as rows of a batch."""
    lengths = torch.tensor([1, 63, 64, 0, 65, 70, 127, 128, 129, 1000])
    cuts = [0, *lengths.cumsum(0).tolist()]
    arguments = inputs(family, cuts[-1], L=11, H=1)
    more = inputs(family, 3, B=len(lengths), L=11, H=1)
    _, state = operator(family)(**arguments, cu_seqlens=torch.tensor(cuts), return_state=True)
    outputs = []
    for t in range(3):
        o, state = operator(family)(**part(more, t, t + 1), initial_state=state, return_state=True)
        outputs.append(o)
    assert state.positions.tolist() == (lengths + 3).tolist()
    for n, (a, b) in enumerate(itertools.pairwise(cuts)):
        given = {name: x for name, x in arguments.items() if x is not None}
        row = {name: torch.cat([x[:, a:b], more[name][n : n + 1]], 1) for name, x in given.items()}
        whole, _ = operator(family)(**row)
        assert_close(torch.cat(outputs, 1)[n : n + 1], whole[:, b - a :], 1e-10, f"document of {b - a}")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_long_sequence_is_its_pieces(family: str, seed: int) -> None:
    T = 131_072
    arguments = inputs(family, T, H=1, decay=1e-4, dtype=torch.float32)
    with torch.no_grad():
        whole, _ = operator(family)(**arguments)
        state, at = None, 0
        for size in (1, 50_000, 15_535, 65_536):
            o, state = operator(family)(**part(arguments, at, at + size), initial_state=state, return_state=True)
            assert_close(o, whole[:, at : at + size], 1e-4, f"tokens from {at}")
            at += size
    assert at == T


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_dtypes(family: str, seed: int) -> None:
    """bf16 inputs with fp32 or bf16 gates, continued from a state that was moved to another dtype."""
    exact = inputs(family, 150, dtype=torch.float32)
    rounded = {name: None if x is None else x.bfloat16() for name, x in exact.items()}
    expected = parallel(**{name: None if x is None else x.double() for name, x in rounded.items()})
    for dtype in (None, torch.float64, torch.bfloat16):
        first, state = operator(family)(**part(rounded, 0, 100), return_state=True)
        state = state if dtype is None else state.to(dtype)
        second, _ = operator(family)(**part(rounded, 100, 150), initial_state=state)
        assert second.dtype == torch.bfloat16
        assert_close(torch.cat([first, second], 1), expected, 2e-2, f"state in {dtype}")
    if exact["level_scales"] is not None:
        o, _ = operator(family)(**{**exact, "level_scales": exact["level_scales"].double()})
        assert torch.equal(o, operator(family)(**exact)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_at_different_positions(family: str, seed: int) -> None:
    """Prefill three packed documents, select and reset rows, continue dense; the recurrent form alike."""
    cu = torch.tensor([0, 70, 70, 261])
    arguments = inputs(family, 261)
    _, state = operator(family)(**arguments, cu_seqlens=cu, return_state=True)
    _, slow = recurrent(**arguments, cu_seqlens=cu, return_state=True)
    state, slow = (s.select([2, 0, 1, 2]).reset([3]) for s in (state, slow))
    assert state.positions.tolist() == [191, 70, 0, 0]
    more = inputs(family, 80, B=4, L=9)
    o, end = operator(family)(**more, initial_state=state, return_state=True)
    expected, slow_end = recurrent(**more, initial_state=slow, return_state=True)
    assert_close(o, expected, 1e-10, "output")
    assert end.num_bytes == slow_end.num_bytes
    fresh, _ = operator(family)(**{name: None if x is None else x[2:] for name, x in more.items()})
    assert_close(o[2:], fresh, 1e-10, "rows at 0")
    cu = torch.tensor([0, 3, 3, 70, 80])
    row = {name: None if x is None else x[:1] for name, x in more.items()}
    o, _ = operator(family)(**row, initial_state=end, cu_seqlens=cu)
    expected, _ = recurrent(**row, initial_state=slow_end, cu_seqlens=cu)
    assert_close(o, expected, 1e-10, "packed continuation")


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_through_the_state(family: str, seed: int) -> None:
    first, second = inputs(family, 150), inputs(family, 100, L=9)
    tensors = leaves(first)
    _, state = operator(family)(**first, return_state=True)
    o, _ = operator(family)(**second, initial_state=state)
    _, slow = recurrent(**first, return_state=True)
    expected, _ = recurrent(**second, initial_state=slow)
    del tensors["q"]
    tensors.pop("level_scales", None)
    assert_same_with_gradients(o, expected, tensors, 1e-10)
    o, _ = operator(family)(**second, initial_state=state.detach())
    assert not o.requires_grad


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_changed_in_place(family: str, seed: int) -> None:
    arguments = inputs(family, 100)
    _, state = operator(family)(**arguments, return_state=True)
    copy = state.clone()
    first, _ = operator(family)(**arguments, initial_state=state)
    second, _ = operator(family)(**arguments, initial_state=state)
    assert torch.equal(first, second)
    third, _ = operator(family)(**arguments, initial_state=copy)
    assert torch.equal(first, third)


@pytest.mark.parametrize("family", FAMILIES)
def test_state_of_a_sequence_shorter_than_a_chunk(family: str, seed: int) -> None:
    arguments = inputs(family, 9, L=4)
    whole, _ = operator(family)(**arguments)
    _, state = operator(family)(**part(arguments, 0, 5), return_state=True)
    o, _ = operator(family)(**part(arguments, 5, 9), initial_state=state)
    assert_close(o, whole[:, 5:], 1e-12, "output")


@pytest.mark.parametrize("family", LOGLINEAR)
def test_state_is_logarithmic(family: str, seed: int) -> None:
    for T in (64, 1000, 4096, 16383):
        arguments = inputs(family, T, H=1, dtype=torch.float32)
        _, state = operator(family)(**arguments, return_state=True)
        matrices, tokens = (T // 64).bit_count(), T % 64
        per_token = 4 * (16 + 16 + 1 + ("delta" in family))
        assert state.num_bytes == matrices * 16 * 16 * 4 + tokens * per_token
        assert state.num_bytes <= state.capacity_bytes <= 8 * 16 * 16 * 4 + 63 * per_token


@pytest.mark.parametrize("family", LOGLINEAR)
def test_levels_stay_as_they_are_inside_a_chunk(family: str, seed: int) -> None:
    """No work on them between two ends of chunks; what dead ones hold (kernels do not clear them) is not read."""
    arguments = inputs(family, 200, L=8)
    cu = torch.tensor([0, 65, 65, 200])
    _, state = operator(family)(**arguments, cu_seqlens=cu, return_state=True)
    dirty = state.clone()
    for n, chunks in enumerate((state.positions // 64).tolist()):
        for j in range(len(dirty.levels)):
            if not chunks >> j & 1:
                dirty.levels[j, n] = torch.randn_like(dirty.levels[j, n])
    more = inputs(family, 3, B=3, L=8)
    o, after = operator(family)(**more, initial_state=state, return_state=True)
    assert after.levels is state.levels
    assert torch.equal(operator(family)(**more, initial_state=dirty)[0], o)
    _, decoding = operator(family)(**more, initial_state=state.for_decoding(9), return_state=True, backend="torch")
    assert torch.equal(decoding.levels[: len(state.levels)], state.levels)
