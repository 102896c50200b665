"""What the delta rule adds to one-token kernels: keys that meet again, write strengths; see ``test_decode.py``."""

import pytest
import torch

from src import ops
from src.ops.reference import parallel, recurrent
from tests.ops.helpers import assert_close, inputs, part
from tests.ops.test_decode import DEVICE, SCALE, assert_same_state, prefilled, step, to, torch_step

FAMILIES = ["gated_delta_rule", "loglinear_gated_delta_rule"]


def decoded(family: str, arguments: dict, start: int) -> tuple[torch.Tensor, ops.State]:
    """Outputs from token ``start`` on, one by one in place, and the state; the PyTorch operator takes those before."""
    given = to(arguments, DEVICE, torch.float32)
    _, state = torch_step(family, part(given, 0, start), None)
    T = arguments["v"].shape[1]
    state = state.for_decoding(T - start)
    outputs = []
    for t in range(start, T):
        o, state = step(part(given, t, t + 1), state)
        outputs.append(o.cpu())
    return torch.cat(outputs, 1), state


def test_over_several_boundaries(seed: int) -> None:
    """Every place of a chunk, every pair of keys cut in two; levels that are carried, kept and read."""
    family, start = "loglinear_gated_delta_rule", 61
    arguments = inputs(family, 194, H=1, decay=0.01, L=9)
    o, state = decoded(family, arguments, start)
    expected, exact = recurrent(**arguments, scale=SCALE, return_state=True)
    assert_close(o, expected[:, start:], 1e-5, "output")
    assert_same_state(state.to("cpu"), exact)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_key_again_and_again(family: str, decay: float, seed: int) -> None:
    """At full write strength each token erases what the one before it wrote. Powers of such a chunk's N reach 1e18."""
    arguments = inputs(family, 130, H=1, K=32, L=9, decay=decay)
    arguments["k"] = arguments["k"][:, :1].expand_as(arguments["k"]).contiguous()
    arguments["beta"] = torch.ones_like(arguments["beta"])
    o, state = decoded(family, arguments, 125)
    assert_close(o, parallel(**arguments, scale=SCALE)[:, 125:], 1e-5, "output")
    # What is left is what the last token wrote; the others leave their rounding errors.
    _, exact = recurrent(**arguments, scale=SCALE, return_state=True)
    have, want = (state.memory, exact.memory) if family == FAMILIES[0] else (state.levels, exact.levels)
    assert (have.cpu() - want).abs().max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_written_at_strength_0(family: str, seed: int) -> None:
    arguments, state = prefilled(family, [62], H=1, L=9)
    more = inputs(family, 4, H=1, L=9)
    more["beta"] = torch.zeros_like(more["beta"])
    joined = {name: None if x is None else torch.cat([x, more[name]], 1) for name, x in arguments.items()}
    expected, exact = recurrent(**joined, scale=SCALE, return_state=True)
    for t in range(4):
        x = to(part(more, t, t + 1), DEVICE, torch.float32)
        o, state = step(x, state)
        loud, _ = step({**x, "v": 1e3 * x["v"], "k": -x["k"]}, state)
        assert torch.equal(loud, step(x, state)[0])
        assert_close(o.cpu(), expected[:, 62 + t : 63 + t], 1e-5, f"token {t}")
    assert_same_state(state.to("cpu"), exact)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_every_number_of_parts_of_a_key(parts: int, seed: int) -> None:
    """The fold takes 64 features at a time, the last part may be short; and values of other columns stay apart."""
    family = FAMILIES[1]
    sizes = {"G": 1, "H": 2, "K": 64 * parts - 16, "V": 32, "L": 9}
    arguments = inputs(family, 129, **sizes)
    o, state = decoded(family, arguments, 126)
    expected, exact = recurrent(**arguments, scale=SCALE, return_state=True)
    assert_close(o, expected[:, 126:], 1e-5, "output")
    assert_same_state(state.to("cpu"), exact)


def test_strengths_of_a_wider_dtype_are_refused(seed: int) -> None:
    _, state = prefilled(FAMILIES[1], [3], H=1)
    state.beta = state.beta.bfloat16()
    x = to(inputs(FAMILIES[1], 1, H=1), DEVICE, torch.float32)
    with pytest.raises(ValueError, match="beta must be bfloat16 as in the initial_state, got float32"):
        step(x, state.for_decoding(1))
    _, new = step(x, state)
    assert new.beta.dtype == torch.float32
    narrow = {**x, "beta": x["beta"].bfloat16()}
    kept = new.for_decoding(1)
    o, kept = step(narrow, kept)
    assert kept.beta.dtype == torch.float32
    expected, _ = torch_step(FAMILIES[1], {**narrow, "beta": narrow["beta"].float()}, new)
    assert_close(o, expected, 1e-5, "output")
