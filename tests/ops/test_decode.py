"""One-token kernels against the PyTorch operators and the definition in fp64.

Without a GPU they run in Triton's interpreter, at some milliseconds a program: few heads, few tokens.
"""

import pytest
import torch
from torch import Tensor, library

from src import ops
from src.ops.kernels import decode, decode_delta
from src.ops.reference import parallel, recurrent
from tests.ops.helpers import FAMILIES, LOGLINEAR, assert_close, inputs, operator, part

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STARTS = [0, 1, 62, 63, 64, 127, 128, 130, 255]
SCALE = 0.7


def to(arguments: dict, *target) -> dict:
    return {name: None if x is None else x.to(*target) for name, x in arguments.items()}


def step(x: dict, state: ops.State) -> tuple[Tensor, ops.State]:
    if x["beta"] is None:
        return decode.step(x["q"], x["k"], x["v"], x["g"], x["level_scales"], state, SCALE)
    return decode_delta.step_delta(x["q"], x["k"], x["v"], x["g"], x["beta"], x["level_scales"], state, SCALE)


def torch_step(family: str, x: dict, state: ops.State) -> tuple[Tensor, ops.State]:
    return operator(family)(**x, scale=SCALE, initial_state=state, return_state=True, backend="torch")


def prefilled(family: str, starts: list[int], **sizes) -> tuple[dict, ops.State]:
    """A state whose rows stand at ``starts``, by the PyTorch operator, and the arguments (fp64) that gave it."""
    arguments = inputs(family, sum(starts), **sizes)
    cu = torch.tensor([0, *torch.tensor(starts).cumsum(0).tolist()], device=DEVICE)
    given = to(arguments, DEVICE, torch.float32)
    return arguments, operator(family)(**given, cu_seqlens=cu, return_state=True, backend="torch")[1]


def buffers(state: ops.LogLinearState) -> list[str]:
    return [name for name in ("k", "v", "g", "beta") if getattr(state, name) is not None]


def assert_same_state(state: ops.State, expected: ops.State) -> None:
    """All that means something: levels, and the buffer's places up to each row's position."""
    assert torch.equal(state.positions, expected.positions)
    if isinstance(state, ops.LinearState):
        return assert_close(state.memory, expected.memory, 1e-5, "memory")
    have, want = state.levels, expected.levels
    assert_close(have[: len(want)], want[: len(have)], 1e-5, "levels")
    for n, position in enumerate(state.positions.tolist()):
        dead = [j for j in range(len(have)) if not position // 64 >> j & 1]
        assert position // 64 < 1 << len(have)
        assert not have[dead, n].any()
        assert (state.beta is None) == (expected.beta is None)
        for name in buffers(state):
            a, b = (getattr(s, name)[n, : position % 64] for s in (state, expected))
            assert torch.equal(a, b.to(a.dtype)), name
    assert state.max_position >= int(state.positions.max())
    if state.in_place:
        assert torch.equal(state.clocks, state.positions[:, None, None].expand_as(state.clocks))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_at_any_positions(family: str, in_place: bool, seed: int) -> None:
    arguments, state = prefilled(family, STARTS, L=10)
    more = inputs(family, 3, B=len(STARTS), L=10)
    cu = torch.tensor([0, *torch.tensor(STARTS).cumsum(0).tolist()])
    _, exact = recurrent(**arguments, scale=SCALE, cu_seqlens=cu, return_state=True)
    expected_state = state
    state = state.for_decoding(3) if in_place else state
    for t in range(3):
        x = to(part(more, t, t + 1), DEVICE, torch.float32)
        o, state = step(x, state)
        expected, expected_state = torch_step(family, x, expected_state)
        assert_close(o, expected, 1e-5, f"token {t}")
        reference, exact = recurrent(**part(more, t, t + 1), scale=SCALE, initial_state=exact, return_state=True)
        assert_close(o.cpu(), reference, 1e-5, f"token {t}, fp64")
        assert_same_state(state, expected_state)
        assert state.in_place == in_place


@pytest.mark.parametrize("family", FAMILIES)
def test_from_an_empty_state_over_a_boundary(family: str, seed: int) -> None:
    arguments = inputs(family, 67, H=1, L=8)
    _, state = prefilled(family, [1], H=1, L=8)
    state = state.reset([0]).for_decoding(67)
    whole = parallel(**arguments, scale=SCALE)
    size = whole.norm() / 67**0.5  # of an ordinary token: in one of many draws the first one's q . k is nearly 0
    for t in range(67):
        o, state = step(to(part(arguments, t, t + 1), DEVICE, torch.float32), state)
        error = float((o.cpu() - whole[:, t : t + 1]).norm() / size)
        assert error <= 1e-5, f"token {t}: error {error:.2e}"
    given = to(arguments, DEVICE, torch.float32)
    assert_same_state(state, operator(family)(**given, return_state=True, backend="torch")[1])


SIZES = [
    {"G": 2, "H": 4, "K": 16, "V": 16},
    {"G": 1, "H": 3, "K": 48, "V": 16},
    {"G": 1, "H": 1, "K": 32, "V": 48},
    {"G": 1, "H": 1, "K": 192, "V": 16},
    {"G": 1, "H": 1, "K": 256, "V": 16},
    {"decay": 10.0},
    {"decay": 0.0},
]


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        *[(family, sizes) for family in FAMILIES for sizes in SIZES],
        *[(family, sizes) for family in LOGLINEAR for sizes in ({"L": 1}, {"L": 3}, {"L": 8})],
    ],
    ids=str,
)
def test_sizes_and_gates(family: str, sizes: dict, seed: int) -> None:
    """The last token of a chunk, which folds it, and one more; rows far enough to read clamped scales."""
    sizes = {"H": 1, "L": 10, **sizes}
    starts = [63, 255, 319]
    arguments, state = prefilled(family, starts, **sizes)
    more = inputs(family, 2, B=3, **sizes)
    state = state.for_decoding(2)
    outputs = []
    expected_state = state.to(torch.float64)
    for t in range(2):
        x = to(part(more, t, t + 1), DEVICE, torch.float32)
        o, state = step(x, state)
        _, expected_state = torch_step(family, to(x, torch.float64), expected_state)
        outputs.append(o.cpu())
        assert_same_state(state, expected_state)
    a = 0
    for n, length in enumerate(starts):
        row = {
            name: None if x is None else torch.cat([x[:, a : a + length], more[name][n : n + 1]], 1)
            for name, x in arguments.items()
        }
        whole = parallel(**row, scale=SCALE)
        assert_close(torch.cat(outputs, 1)[n : n + 1], whole[:, -2:], 1e-5, f"row at {length}")
        a += length


@pytest.mark.parametrize("family", FAMILIES)
def test_functional_calls_change_nothing(family: str, seed: int) -> None:
    _, state = prefilled(family, [63, 130], H=1, L=9)
    copy = state.clone()
    x = to(inputs(family, 1, B=2, H=1, L=9), DEVICE, torch.float32)
    first, after = step(x, state)
    second, again = step(x, state)
    assert torch.equal(first, second)
    assert not after.in_place
    assert_same_state(state, copy)
    assert_same_state(after, again)
    third, _ = torch_step(family, x, after)  # the PyTorch operator continues it, and the other way round
    fourth, _ = step(x, torch_step(family, x, state)[1])
    assert_close(third, fourth, 1e-5, "handed over")


@pytest.mark.parametrize("family", FAMILIES)
def test_in_place_calls_keep_object_and_memory(family: str, seed: int) -> None:
    _, original = prefilled(family, [62, 130], H=1, L=9)
    copy = original.clone()
    state = original.for_decoding(3)
    before = {name: x.data_ptr() for name, x in vars(state).items() if isinstance(x, Tensor)}
    host = {name: x for name, x in vars(state).items() if not isinstance(x, Tensor)}
    snapshot = None
    for t in range(3):
        x = to(inputs(family, 1, B=2, H=1, L=9), DEVICE, torch.float32)
        if t == 2:
            snapshot = state.clone()
        o, after = step(x, state)
        assert after is state
    assert before == {name: x.data_ptr() for name, x in vars(state).items() if isinstance(x, Tensor)}
    assert host == {name: x for name, x in vars(state).items() if not isinstance(x, Tensor)}
    assert state.positions.tolist() == [65, 133]
    assert_same_state(original, copy)
    again, _ = step(x, snapshot.select([1, 0]).select([1, 0]))
    assert torch.equal(again, o)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16(family: str, seed: int) -> None:
    starts = [63, 130]
    arguments = to(inputs(family, sum(starts), L=9, H=1), torch.bfloat16)
    more = to(inputs(family, 2, B=2, L=9, H=1), torch.bfloat16)
    for x in (arguments, more):
        x["g"] = x["g"].float()  # as the mixers pass it
    cu = torch.tensor([0, 63, 193])
    _, state = operator(family)(**to(arguments, DEVICE), cu_seqlens=cu.to(DEVICE), return_state=True, backend="torch")
    _, exact = operator(family)(**to(arguments, torch.float64), cu_seqlens=cu, return_state=True)
    expected_state, state = state, state.for_decoding(2)
    for t in range(2):
        x = to(part(more, t, t + 1), DEVICE)
        o, state = step(x, state)
        assert o.dtype == torch.bfloat16
        expected, exact = torch_step(family, to(part(more, t, t + 1), torch.float64), exact)
        assert_close(o.cpu(), expected, 1e-2, f"token {t}")
        _, expected_state = torch_step(family, x, expected_state)
        assert_same_state(state, expected_state)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_token_after_an_fp32_prefill(family: str, seed: int) -> None:
    _, state = prefilled(family, [70], H=1, L=9)
    x = to(inputs(family, 1, H=1, L=9), DEVICE, torch.bfloat16)
    expected, after = torch_step(family, x, state)
    o, functional = step(x, state)
    assert_close(o, expected, 1e-2, "output")
    if family in LOGLINEAR:
        assert functional.k.dtype == after.k.dtype == torch.bfloat16
        _, kept = step(x, state.for_decoding(1))
        assert kept.k.dtype == torch.float32
        with pytest.raises(ValueError, match="k must be bfloat16 as in the initial_state, got float32"):
            step(to(x, torch.float32), functional.for_decoding(1))


@pytest.mark.parametrize("family", LOGLINEAR)
def test_what_is_dead_is_not_read(family: str, seed: int) -> None:
    starts = [0, 5, 63, 64, 127, 255]
    _, state = prefilled(family, starts, L=11, H=1)
    clean = state.for_decoding(200)
    dirty = clean.clone()
    for n, position in enumerate(starts):
        for name in buffers(dirty):
            getattr(dirty, name)[n, position % 64 :] = torch.nan
        for j in range(len(dirty.levels)):
            if not position // 64 >> j & 1:
                dirty.levels[j, n] = torch.nan
    for _ in range(2):
        x = to(inputs(family, 1, B=len(starts), L=11, H=1), DEVICE, torch.float32)
        expected, clean = step(x, clean)
        o, dirty = step(x, dirty)
        assert torch.equal(o, expected)
    for n, position in enumerate(clean.positions.tolist()):
        live = [j for j in range(len(clean.levels)) if position // 64 >> j & 1]
        assert torch.equal(dirty.levels[live, n], clean.levels[live, n])
    assert not dirty.levels[:2, starts.index(255)].any()  # levels that were merged are 0 again


@pytest.mark.parametrize("family", LOGLINEAR)
def test_no_room_is_not_silent(family: str, seed: int) -> None:
    _, state = prefilled(family, [127], L=4, H=1)
    state.levels = state.levels[:1]
    x = to(inputs(family, 1, L=4, H=1), DEVICE, torch.float32)
    state = state.for_decoding(0)
    o, state = step(x, state)  # position 127 has one level; the chunk that it ends would need another
    assert o.isfinite().all()
    assert step(x, state)[0].isnan().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_wider_tensors(family: str, seed: int) -> None:
    _, state = prefilled(family, [70, 66], G=2, H=2, L=9)
    x = to(inputs(family, 1, B=2, G=2, H=2, L=9), DEVICE, torch.float32)
    wide = {name: None if y is None else torch.cat([y, y], 1)[:, 1:] for name, y in x.items()}  # rows apart
    odd = {name: None if y is None else torch.stack([y, y], -1)[..., 0] for name, y in x.items()}  # elements apart
    expected, _ = step(x, state)
    assert torch.equal(step(wide, state)[0], expected)
    assert torch.equal(step(odd, state)[0], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_fp64_is_refused(family: str, seed: int) -> None:
    _, state = prefilled(family, [3], H=1)
    with pytest.raises(ValueError, match="v must be float32 or bfloat16 for the Triton backend, got float64"):
        step(to(inputs(family, 1, H=1), DEVICE), state)


@pytest.mark.parametrize("family", FAMILIES)
def test_registered_operators(family: str, seed: int) -> None:
    _, state = prefilled(family, [63, 64], H=1, L=9)
    state = state.for_decoding(1)
    x = to(inputs(family, 1, B=2, H=1, L=9), DEVICE, torch.float32)
    module = decode if x["beta"] is None else decode_delta
    if isinstance(state, ops.LinearState):
        held = [state.memory, state.positions]
    else:
        held = [state.levels, *(getattr(state, name) for name in buffers(state)), state.positions, state.clocks]
    given = [y for y in x.values() if y is not None]
    library.opcheck(getattr(module, f"{family}_step_"), (*given, *held, SCALE))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_without_a_break(family: str, in_place: bool, seed: int) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    _, state = prefilled(family, [63, 64], H=1, L=9)
    state = state.for_decoding(3) if in_place else state
    other = state.clone()
    with torch.inference_mode():
        for _ in range(2):
            x = to(inputs(family, 1, B=2, H=1, L=9), DEVICE, torch.float32)
            o, after = compiled(x, state)
            expected, other = step(x, other)
            assert_close(o, expected, 1e-6, "output")
            assert_same_state(after, other)
            assert (after is state) == in_place
            state = after


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_by_a_cuda_graph(family: str, dtype: torch.dtype, seed: int) -> None:
    """70 tokens from one captured call, rows at different positions, over chunk boundaries."""
    starts = [0, 60, 500, 1023]
    sizes = {"H": 8, "G": 2, "K": 128, "V": 64, "L": 12}
    _, start = prefilled(family, starts, **sizes)
    for name in ("k", "v", "beta"):  # as what follows them: the PyTorch form takes both in one dtype
        if getattr(start, name, None) is not None:
            setattr(start, name, getattr(start, name).to(dtype))
    more = inputs(family, 70, B=len(starts), **sizes)
    given = {
        name: None if x is None else x.cuda().to(torch.float32 if name == "g" else dtype) for name, x in more.items()
    }
    state = start.for_decoding(70)
    static = {name: None if x is None else x.clone() for name, x in part(given, 0, 1).items()}
    step(static, state.clone())  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = step(static, state)
    outputs = []
    for t in range(70):
        for name, x in part(given, t, t + 1).items():
            if x is not None:
                static[name].copy_(x)
        graph.replay()
        outputs.append(o.clone())
    expected, expected_state = torch_step(family, given, start)
    assert_close(torch.cat(outputs, 1), expected, 1e-5 if dtype == torch.float32 else 1e-2, "output")
    assert_same_state(state, expected_state)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("K", [16, 64, 128, 192, 256])
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_for_every_width(family: str, K: int, dtype: torch.dtype, seed: int) -> None:
    """What the interpreter cannot show: the compiler's layouts, and threads that share values."""
    sizes = {"G": 3, "H": 6, "K": K, "V": 48 if K < 256 else 512, "L": 12}
    starts = [0, 1, 63, 64, 127, 500, 1023]
    _, state = prefilled(family, starts, **sizes)
    expected_state, state = state, state.for_decoding(66)
    for t in range(66):
        x = to(inputs(family, 1, B=len(starts), **sizes), DEVICE, dtype)
        x["g"] = x["g"].float()
        o, state = step(x, state)
        expected, expected_state = torch_step(family, x, expected_state)
        assert_close(o, expected, 1e-5 if dtype == torch.float32 else 1e-2, f"token {t}")
    if dtype == torch.float32:
        assert_same_state(state, expected_state)
