"""Softmax attention against its formula."""

import pytest
import torch
from torch import library

from src.ops import AttentionState, softmax_attention
from tests.ops.helpers import assert_close, assert_same_with_gradients


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Last queries of a sequence against all its keys."""
    repeat = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)))
    T, S = q.shape[2], k.shape[2]
    keep = torch.ones(T, S, dtype=torch.bool).tril(S - T)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~keep, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def arguments(T: int, B: int = 2, H: int = 4, G: int = 2) -> dict[str, torch.Tensor]:
    shapes = {"q": (B, T, H, 16), "k": (B, T, G, 16), "v": (B, T, G, 32)}
    return {name: torch.randn(shape, dtype=torch.float64, requires_grad=True) for name, shape in shapes.items()}


def part(given: dict[str, torch.Tensor], start: int, stop: int) -> dict[str, torch.Tensor]:
    return {name: x[:, start:stop] for name, x in given.items()}


@pytest.mark.parametrize("G", [1, 2, 4])
@pytest.mark.parametrize("T", [1, 2, 65])
def test_is_causal_softmax(T: int, G: int, seed: int) -> None:
    given = arguments(T, G=G)
    o, _ = softmax_attention(**given)
    assert_same_with_gradients(o, plain(**given), given, 1e-12)


def test_packed_documents_are_separate(seed: int) -> None:
    given = arguments(70, B=1)
    cuts = [0, 0, 5, 5, 6, 70]
    o, state = softmax_attention(**given, cu_seqlens=torch.tensor(cuts), return_state=True)
    pieces = [plain(**part(given, a, b)) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
    assert_same_with_gradients(o, torch.cat(pieces, 1), given, 1e-12)
    assert state.positions.tolist() == [0, 5, 0, 1, 64]
    assert state.num_bytes == 70 * 2 * (16 + 32) * 8
    assert state.capacity_bytes == 5 * 64 * 2 * (16 + 32) * 8


@pytest.mark.parametrize("cuts", [[0, 9, 10, 11, 40], [0, 1, 2, 3, 4, 5, 6, 40]])
def test_any_split_into_calls(cuts: list[int], seed: int) -> None:
    given = arguments(40)
    state, pieces = None, []
    for a, b in zip(cuts[:-1], cuts[1:], strict=True):
        o, state = softmax_attention(**part(given, a, b), initial_state=state, return_state=True)
        pieces.append(o)
    assert_same_with_gradients(torch.cat(pieces, 1), plain(**given), given, 1e-12)


def test_rows_at_different_positions(seed: int) -> None:
    given = arguments(30, B=1)
    cu = torch.tensor([0, 10, 10, 30])
    _, state = softmax_attention(**given, cu_seqlens=cu, return_state=True)
    state = state.select([2, 0, 1, 2]).reset([3])
    more = arguments(3, B=4)
    o, _ = softmax_attention(**more, initial_state=state, return_state=True)
    for row, (a, b) in enumerate([(10, 30), (0, 10), (0, 0), (0, 0)]):
        own = {name: x[row : row + 1] for name, x in more.items()}
        k, v = (torch.cat([given[name][:, a:b], own[name]], 1) for name in ("k", "v"))
        assert_close(o[row : row + 1], plain(own["q"], k, v), 1e-12, f"row {row}")
    packed = arguments(12, B=1)
    cu = torch.tensor([0, 4, 4, 5, 12])
    o, end = softmax_attention(**packed, initial_state=state, cu_seqlens=cu, return_state=True)
    assert end.positions.tolist() == [24, 10, 1, 7]
    own = part(packed, 0, 4)
    k, v = (torch.cat([given[name][:, 10:], own[name]], 1) for name in ("k", "v"))
    assert_close(o[:, :4], plain(own["q"], k, v), 1e-12, "packed continuation")


def test_packed_compiles_whole(seed: int) -> None:
    torch._dynamo.reset()
    given = arguments(50, B=1)
    compiled = torch.compile(
        lambda cu: softmax_attention(**given, cu_seqlens=cu)[0], fullgraph=True, backend="aot_eager"
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for cuts in ([0, 3, 50], [0, 49, 50], [0, 0, 50]):
            cu = torch.tensor(cuts)
            expected, _ = softmax_attention(**given, cu_seqlens=cu)
            assert_same_with_gradients(compiled(cu), expected, given, 1e-12)


def test_custom_operator_keeps_its_promises() -> None:
    given = [x.detach().requires_grad_() for x in arguments(12, B=1).values()]
    library.opcheck(torch.ops.loglinear.attention_by_document.default, (*given, torch.tensor([0, 4, 4, 12])))


@pytest.mark.parametrize("packed", [False, True])
def test_returns_a_state_only_when_asked(packed: bool, seed: int) -> None:
    given = arguments(12, B=1)
    cu = torch.tensor([0, 12]) if packed else None
    _, none = softmax_attention(**given, cu_seqlens=cu)
    _, state = softmax_attention(**given, cu_seqlens=cu, return_state=True)
    _, still_none = softmax_attention(**given, cu_seqlens=cu, initial_state=state)
    assert none is None
    assert still_none is None
    with pytest.raises(ValueError, match=r"initial_state.k must end in \[2, 16\]"):
        softmax_attention(**given, initial_state=AttentionState(state.positions, state.k[:, :, :1], state.v, False))


def test_errors() -> None:
    given = arguments(3)
    with pytest.raises(ValueError, match="divides the H=4 heads of q, got 3"):
        softmax_attention(given["q"], torch.zeros(2, 3, 3, 16).double(), torch.zeros(2, 3, 3, 16).double())


def test_cache_for_decoding_grows_without_a_copy(seed: int) -> None:
    """Within its room, for rows at different positions; with copies behind it, and where rows are chosen anew."""
    cu = torch.tensor([0, 10, 10, 30])
    with torch.no_grad():
        _, state = softmax_attention(**arguments(30, B=1), cu_seqlens=cu, return_state=True)
        decoding = state.for_decoding(5)
        assert decoding.num_bytes == state.num_bytes
        assert decoding.capacity_bytes == 3 * 25 * 2 * (16 + 32) * 8
        home = decoding.k.data_ptr(), decoding.v.data_ptr()
        for token in range(8):
            more = arguments(1, B=3)
            o, decoding = softmax_attention(**more, initial_state=decoding, return_state=True)
            expected, state = softmax_attention(**more, initial_state=state, return_state=True)
            assert torch.equal(decoding.k, state.k)
            assert torch.equal(decoding.v, state.v)
            assert_close(o, expected, 1e-12, f"token {token}")
            assert ((decoding.k.data_ptr(), decoding.v.data_ptr()) == home) == (token < 5)
        more = arguments(2, B=2)
        o, _ = softmax_attention(**more, initial_state=decoding.select([2, 1]).for_decoding(4), return_state=True)
        expected, _ = softmax_attention(**more, initial_state=state.select([2, 1]))
        assert_close(o, expected, 1e-12, "chosen rows")


def test_cache_for_decoding_keeps_gradients(seed: int) -> None:
    given = arguments(9)
    _, state = softmax_attention(**part(given, 0, 6), return_state=True)
    more = part(given, 6, 9)
    o, _ = softmax_attention(**more, initial_state=state.for_decoding(9), return_state=True)
    expected, _ = softmax_attention(**more, initial_state=state.detach())
    assert_same_with_gradients(o, expected, more, 1e-12)
