"""The kernels from call to call: states, and gradients through them.

The PyTorch operators in fp64 are the reference; ``test_linear_states.py`` compares those with the definition.
"""

import itertools
import random

import pytest
import torch
from torch import Tensor

from src.ops import LinearState, State
from src.ops.reference import parallel
from tests.ops.helpers import assert_close, assert_same_with_gradients, inputs, leaves, operator, part
from tests.ops.kernels import DEVICE, FAMILIES, LINEAR_ONCE, LOGLINEAR, ONE_KIND, SCALE, both, deal

pytestmark = pytest.mark.usefixtures("pair", "poisoned")

Calls = list[tuple[dict[str, Tensor | None], list[int] | None]]
"""Arguments and cuts (None: rows) of calls that continue each other."""


def play(
    family: str, calls: Calls, backends: list[str] | str, state: State | None = None
) -> tuple[list[Tensor], State | None]:
    """Outputs of all calls and the last state."""
    outputs = []
    backends = [backends] * len(calls) if isinstance(backends, str) else backends
    for (arguments, cuts), backend in zip(calls, backends, strict=True):
        cu = None if cuts is None else torch.tensor(cuts, device=DEVICE)
        o, state = operator(family)(
            **arguments, scale=SCALE, initial_state=state, return_state=True, cu_seqlens=cu, backend=backend
        )
        outputs.append(o)
    return outputs, state


def contents(state: State) -> dict[str, Tensor]:
    """All of a state that means something: of the buffer the places up to each row's position."""
    if isinstance(state, LinearState):
        return {"memory": state.memory}
    there = torch.arange(63, device=DEVICE) < (state.positions % 64)[:, None]
    raw = {n: getattr(state, n) for n in ("k", "v", "g", "beta") if getattr(state, n) is not None}
    raw = {name: torch.where(there.view(*there.shape, *[1] * (x.ndim - 2)), x, 0) for name, x in raw.items()}
    return {"levels": state.levels, **raw}


def assert_same_calls(family: str, calls: Calls, backends: list[str] | str = "triton", bound: float = 1e-5) -> None:
    """Every output, the last state, and the gradients that both send to the tensors of every call."""
    runs = []
    rounded = [(both(arguments), cuts) for arguments, cuts in calls]
    for i in range(2):
        mine = [(arguments[i], cuts) for arguments, cuts in rounded]
        tensors = [leaves(arguments) for arguments, _ in mine]
        outputs, state = play(family, mine, backends if i == 0 else "torch")
        made = {"output": torch.cat([o.flatten() for o in outputs])} | contents(state)
        runs.append((made, tensors, state))
    (made, tensors, state), (expected, exact_tensors, exact_state) = runs
    assert torch.equal(state.positions, exact_state.positions)
    if "levels" in made:
        most, count = int(state.positions.max()), len(expected["levels"])
        assert state.max_position >= most
        assert not made["levels"][count:].any(), "room for more levels, which are not zero"
        assert most < 64 << len(made["levels"])
        made["levels"], expected["levels"] = made["levels"][:count], expected["levels"][: len(made["levels"])]
    for name, x in made.items():
        assert_close(x, expected[name], bound, name)
    names = [name for name, x in expected.items() if x.requires_grad]
    weights = [torch.randn_like(expected[name], dtype=torch.float32) for name in names]
    grads = gradients([made[name] for name in names], tensors, weights)
    wanted = gradients([expected[name] for name in names], exact_tensors, [w.double() for w in weights])
    for name, x in grads.items():
        assert_close(x, wanted[name], bound, f"gradient of {name}")


def gradients(made: list[Tensor], tensors: list[dict[str, Tensor]], weights: list[Tensor]) -> dict[str, Tensor]:
    """By name, all calls in one: of the few numbers that a call of one token has, any may happen to cancel."""
    flat = iter(torch.autograd.grad(made, [x for call in tensors for x in call.values()], weights))
    by_call = [{name: next(flat).flatten() for name in call} for call in tensors]
    return {name: torch.cat([call[name] for call in by_call]) for name in by_call[0]}


def calls_of(family: str, lengths: list[int], **sizes) -> Calls:
    if lengths[0] == 1:
        sizes = {"B": 2, "G": 2, "H": 2, **sizes}
    return [(inputs(family, T, **{"H": 1, "L": 9, **sizes}), None) for T in lengths]


def packed(family: str, lengths: list[int], **sizes) -> Calls:
    """One call of documents of these lengths."""
    cuts = [0, *itertools.accumulate(lengths)]
    return [(inputs(family, cuts[-1], **{"H": 1, "L": 9, **sizes}), cuts)]


@pytest.mark.parametrize("family", FAMILIES)
def test_returned_state(family: str, seed: int) -> None:
    assert_same_calls(family, calls_of(family, [200], V=32))


@LINEAR_ONCE
def test_returned_state_of_documents(family: str, seed: int) -> None:
    """Ends at the first token, in a chunk, at its end, at the end of a tile of two, one token behind."""
    assert_same_calls(family, packed(family, [0, 1, 15, 64, 0, 128, 129]))


SPLITS = [[1, 1], [5, 59, 1], [64, 64], [63, 64, 2], [64, 130], pytest.param([200, 3, 300], marks=pytest.mark.slow)]


@pytest.mark.parametrize("lengths", SPLITS)
@pytest.mark.parametrize("family", LOGLINEAR)
def test_continued(family: str, lengths: list[int], seed: int) -> None:
    """At chunk boundaries, inside chunks, over them, in two calls or three."""
    assert_same_calls(family, calls_of(family, lengths))


@pytest.mark.parametrize("family", LOGLINEAR)
def test_groups_that_began_in_an_earlier_call(family: str, pair: int, seed: int) -> None:
    """The second four tiles complete a group of eight, of which this call has the right half only."""
    four = 256 << pair
    assert_same_calls(family, calls_of(family, [four + 5, four]), ["torch", "triton"])


@LINEAR_ONCE
def test_continued_trees_of_several_levels(family: str, pair: int, seed: int) -> None:
    """A decay that lets the first token of the first call reach the last of the second."""
    tile = 64 << pair
    assert_same_calls(family, calls_of(family, [9 * tile + 10, 8 * tile], decay=1e-4))


@pytest.mark.parametrize("lengths", [[1, 1], [64, 64], [130, 3, 70]])
@pytest.mark.parametrize("family", ["ssd", "gated_delta_rule"])
def test_continued_linear(family: str, lengths: list[int], seed: int) -> None:
    assert_same_calls(family, calls_of(family, lengths, V=32))


@LINEAR_ONCE
def test_documents_at_different_positions(family: str, seed: int) -> None:
    """Three packed calls; each document stands elsewhere in its chunk, and some get nothing in one."""
    calls = [(0, 5, 60), (1, 1, 1), (64, 64, 1), (70, 58, 0), (0, 0, 0), (130, 2, 65)]
    assert_same_calls(family, [call for lengths in zip(*calls, strict=True) for call in packed(family, list(lengths))])


@LINEAR_ONCE
def test_rows_at_different_positions(family: str, seed: int) -> None:
    """Packed, then rows of a batch, then packed again."""
    calls = packed(family, [5, 127, 0]) + calls_of(family, [20], B=3) + packed(family, [50, 0, 44])
    assert_same_calls(family, calls)


@ONE_KIND
@pytest.mark.parametrize("family", FAMILIES)
def test_heads_of_groups(family: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads a program; the backward pass takes one q/k group after the other."""
    deal(monkeypatch, 2, 1)
    assert_same_calls(family, calls_of(family, [70, 70], G=2, H=4))


@ONE_KIND
@pytest.mark.parametrize("L", [1, 7, 8])
@pytest.mark.parametrize("family", LOGLINEAR)
def test_last_scale_serves_all_higher_levels(family: str, L: int, seed: int) -> None:
    """Also of the levels at which groups of earlier calls are seen."""
    assert_same_calls(family, calls_of(family, [140, 70], L=L))


@LINEAR_ONCE
def test_any_three_calls_are_one(family: str, seed: int) -> None:
    T = 210
    given, exact = both(inputs(family, T, H=1, decay=0.02))
    tensors, exact_tensors = leaves(given), leaves(exact)
    cuts = [0, *sorted(random.sample(range(1, T), 2)), T]
    print("cuts", cuts)
    pieces, state = play(family, [(part(given, a, b), None) for a, b in itertools.pairwise(cuts)], "triton")
    assert state.positions.tolist() == [T]
    expected = parallel(**exact, scale=SCALE)
    assert_same_with_gradients(torch.cat(pieces, 1), expected, tensors, 1e-5, exact_tensors)


@pytest.mark.parametrize("backends", [["torch", "triton"], ["triton", "torch"]])
@LINEAR_ONCE
def test_state_of_the_other_backend(family: str, backends: list[str], seed: int) -> None:
    assert_same_calls(family, packed(family, [5, 128, 0]) + packed(family, [62, 3, 10]), backends)


@LINEAR_ONCE
def test_gradient_of_the_initial_state(family: str, seed: int) -> None:
    """Itself a leaf. What is dead in it has none."""
    before, after = packed(family, [5, 64, 200]), packed(family, [60, 3, 0])
    exact_before = [(both(before[0][0])[1], before[0][1])]
    _, exact_state = play(family, exact_before, "torch")
    results = []
    for dtype, backend in ((torch.float32, "triton"), (torch.float64, "torch")):
        state = exact_state.to(torch.float32).to(dtype).detach()
        tensors = {n: getattr(state, n).requires_grad_() for n in contents(state)}
        call = [(both(after[0][0])[dtype == torch.float64], after[0][1])]
        outputs, end = play(family, call, backend, state)
        made = [*outputs, *contents(end).values()]
        torch.manual_seed(seed)
        weights = [torch.randn_like(x, dtype=torch.float32).to(x.dtype) for x in made]
        results.append(dict(zip(tensors, torch.autograd.grad(made, list(tensors.values()), weights), strict=True)))
    for name, x in results[0].items():
        assert_close(x, results[1][name], 1e-5, f"gradient of {name}")
        if name == "levels":
            assert not x[1:, :2].any(), "of levels above position 64"


@ONE_KIND
@pytest.mark.parametrize("family", FAMILIES)
def test_one_state_continued_twice(family: str, seed: int) -> None:
    first, second = (both(inputs(family, T, H=1, L=9))[0] for T in (70, 65))
    tensors = leaves(first)
    _, state = play(family, [(first, None)], "triton")
    copy = {name: x.clone() for name, x in contents(state).items()}
    (a,), (b,) = (play(family, [(second, None)], "triton", state)[0] for _ in range(2))
    assert torch.equal(a, b)
    assert all(torch.equal(x, copy[name]) for name, x in contents(state).items())
    names = [name for name in tensors if name not in ("q", "level_scales")]
    wanted = [tensors[name] for name in names]
    once = torch.autograd.grad(a.square().sum(), wanted, retain_graph=True)
    twice = torch.autograd.grad(a.square().sum() + b.square().sum(), wanted)
    for name, x, y in zip(names, twice, once, strict=True):
        assert_close(x, 2 * y, 1e-6, f"gradient of {name}")


@LINEAR_ONCE
def test_prefill_then_decode(family: str, seed: int) -> None:
    """One token at a time over a chunk boundary, through the kernel of ``decode.py``."""
    given, exact = both(inputs(family, 130, H=1))
    expected = parallel(**exact, scale=SCALE)
    with torch.no_grad():
        outputs, _ = play(
            family, [(part(given, a, b), None) for a, b in itertools.pairwise([0, 126, 127, 128, 129, 130])], "triton"
        )
    assert_close(torch.cat(outputs, 1), expected, 1e-5, "output")
