"""States: moved, saved, copied, and put together."""

import io

import pytest
import torch

from src import ops
from tests.ops.helpers import inputs, operator


def state_of(kind: str) -> ops.State:
    if kind == "attention":
        x = torch.randn(1, 90, 2, 16)
        return ops.softmax_attention(x, x, x, cu_seqlens=torch.tensor([0, 20, 90]), return_state=True)[1]
    if kind == "convolution":
        return ops.short_convolution(torch.randn(2, 9, 4), torch.randn(4, 4), return_state=True)[1]
    if kind == "mixer":
        return ops.MixerState({"conv": state_of("convolution"), "memory": state_of("gated_delta_rule")})
    if kind == "model":
        return ops.ModelState.of_layers([state_of("mixer"), state_of("ssd")])
    arguments = inputs(kind, 90, dtype=torch.float32)
    return operator(kind)(**arguments, cu_seqlens=torch.tensor([0, 20, 90]), return_state=True)[1]


KINDS = [
    "ssd",
    "gated_delta_rule",
    "loglinear_ssd",
    "loglinear_gated_delta_rule",
    "attention",
    "convolution",
    "mixer",
    "model",
]


def tensors(state: ops.State) -> list[torch.Tensor]:
    if isinstance(state, ops.MixerState):
        return [x for part in state.parts.values() for x in tensors(part)]
    return [x for x in vars(state).values() if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_without_pickled_code(kind: str, seed: int) -> None:
    state = state_of(kind)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded) is type(state)
    assert all(torch.equal(a, b) for a, b in zip(tensors(state), tensors(loaded), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_methods_of_every_state(kind: str, seed: int) -> None:
    state = state_of(kind)
    assert state.num_bytes <= state.capacity_bytes
    double = state.to(torch.float64)
    assert double.positions.dtype == torch.int64
    assert all(x.dtype in (torch.float64, torch.int64) for x in tensors(double))
    copy = state.clone()
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(tensors(state), tensors(copy), strict=True) if a.numel())
    assert state.select([1, 0, 1]).positions.tolist() == state.positions[[1, 0, 1]].tolist()
    assert state.select(slice(1, None)).positions.tolist() == state.positions[1:].tolist()
    for rows in (torch.tensor([1]), [False, True], torch.tensor([False, True]), 1):
        assert state.select(rows).positions.tolist() == state.positions[1:].tolist()
        assert state.reset(rows).positions.tolist() == [state.positions[0].item(), 0]
    cleared = state.reset([0])
    assert cleared.positions.tolist() == [0, state.positions[1].item()]
    assert state.positions[0] != 0
    assert all(not x.requires_grad for x in tensors(state.detach()))
    assert all(x.device.type == "meta" for x in tensors(state.to("meta")))


def test_positions_survive_a_copy(seed: int) -> None:
    """Counts travel with the state: continue from a loaded, moved copy as from the original."""
    arguments = inputs("loglinear_gated_delta_rule", 90)
    call = operator("loglinear_gated_delta_rule")
    _, state = call(**arguments, return_state=True)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    again = torch.load(file).to("cpu").clone()
    assert torch.equal(call(**arguments, initial_state=again)[0], call(**arguments, initial_state=state)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_for_decoding(kind: str, seed: int) -> None:
    """A copy that says the same, to everyone who reads states, and shares no memory that a call may overwrite."""
    state = state_of(kind)
    decoding = state.for_decoding(1000)
    assert type(decoding) is type(state)
    assert torch.equal(decoding.positions, state.positions)
    assert decoding.num_bytes == state.num_bytes <= decoding.capacity_bytes
    for name, (old, new) in memories(state, decoding).items():
        assert not old.in_place
        assert new.in_place
        file = io.BytesIO()
        torch.save(new, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        for copy in (old, new.to("cpu"), new.detach(), new.clone(), new.select([0, 1]), new.reset(slice(0, 0)), loaded):
            assert copy is old or copy.in_place
            for field, x in vars(new).items():
                if isinstance(x, torch.Tensor) and (y := getattr(copy, field)) is not None:
                    assert x.data_ptr() != y.data_ptr(), (name, field)
                    assert torch.equal(x[: len(y)], y), (name, field)
        if isinstance(new, ops.LogLinearState):
            assert new.max_position == old.max_position + 1000
            assert len(new.levels) == (new.max_position // 64).bit_length() > len(old.levels)
            assert not new.levels[len(old.levels) :].any()
            assert new.reset([1]).clocks[:, 0, 0].tolist() == [20, 0]
    for old, new in memories(state, decoding.reset([0])).values():
        assert new.positions.tolist() == [0, old.positions[1].item()]


def memories(old: ops.State, new: ops.State) -> dict[str, tuple[ops.State, ops.State]]:
    """By name, the states inside that calls may overwrite."""
    if isinstance(old, ops.MixerState):
        return {f"{key}.{name}": x for key in old.parts for name, x in memories(old[key], new[key]).items()}
    return {"": (old, new)} if isinstance(old, ops.LinearState | ops.LogLinearState) else {}


@pytest.mark.parametrize("family", ["ssd", "gated_delta_rule", "loglinear_ssd", "loglinear_gated_delta_rule"])
def test_pytorch_continues_a_state_for_decoding(family: str, seed: int) -> None:
    """With the same results, and without overwriting it: one call's gradients do not reach behind it."""
    arguments = {name: x if x is None else x.requires_grad_() for name, x in inputs(family, 90).items()}
    more = inputs(family, 3)
    _, state = operator(family)(**arguments, return_state=True)
    decoding = state.for_decoding(500)
    for _ in range(2):
        o, after = operator(family)(**more, initial_state=decoding, return_state=True, backend="torch")
        expected, _ = operator(family)(**more, initial_state=state)
        assert torch.equal(o, expected)
        assert not after.in_place
        assert not o.requires_grad
