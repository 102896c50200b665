"""The kernels against fp64, on outputs and on every gradient."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from src.ops.reference import parallel
from tests.ops.helpers import assert_close, assert_same_with_gradients, inputs, leaves
from tests.ops.kernels import (
    DELTA,
    DEVICE,
    FAMILIES,
    KEYS,
    LINEAR_ONCE,
    LOGLINEAR,
    ONE_KIND,
    SCALE,
    assert_exact,
    both,
    deal,
    plan_of,
    run,
)

pytestmark = pytest.mark.usefixtures("pair", "poisoned")

LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 333]
LONG = [
    *(pytest.param(T, marks=pytest.mark.slow) for T in (500, 1000, 1024)),
    pytest.param(4097, marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("T", LENGTHS + LONG)
@LINEAR_ONCE
def test_lengths(family: str, T: int, seed: int) -> None:
    # With several rows and heads, not every sum can happen to cancel, of the few that a short sequence has.
    sizes = {"B": 2, "G": 2, "H": 2} if T < 3 else {"H": 1}
    assert_exact(family, inputs(family, T, V=32 if T < 200 else 16, **sizes))


@pytest.mark.parametrize("cuts", [[0, 0, 1, 16, 81, 81, 210], [0, 64, 128, 256, 256]])
@LINEAR_ONCE
def test_packed_documents(family: str, cuts: list[int], seed: int) -> None:
    assert_exact(family, inputs(family, cuts[-1], H=1, V=32 if cuts[1] == 0 else 16, L=9), cuts)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_batch(family: str, pair: int, seed: int) -> None:
    assert_exact(family, inputs(family, 70 << pair, B=2, H=1))


@ONE_KIND
@pytest.mark.parametrize(
    ("family", "G", "H", "heads_a_block"),
    [
        ("loglinear_ssd", 1, 4, 1),
        ("loglinear_ssd", 1, 4, 4),
        ("loglinear_ssd", 2, 4, 2),
        ("loglinear_ssd", 3, 3, 1),
        ("ssd", 1, 4, 2),
        ("ssd", 2, 4, 1),
        ("gated_delta_rule", 2, 4, 1),
        ("loglinear_gated_delta_rule", 1, 3, 1),
    ],
)
def test_groups(family: str, G: int, H: int, heads_a_block: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of a group in one program, in two, in one each, as always of the delta rule."""
    deal(monkeypatch, heads_a_block)
    assert_exact(family, inputs(family, 140, G=G, H=H))


@ONE_KIND
@pytest.mark.parametrize(("K", "V"), [(48, 80), (80, 16), pytest.param(256, 64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_head_dims(family: str, K: int, V: int, seed: int) -> None:
    """Padded to powers of two inside; more than 64 columns of q and k take several products."""
    assert_exact(family, inputs(family, 140, K=K, V=V, H=1))


@ONE_KIND
@pytest.mark.parametrize(
    ("family", "V", "block"),
    [("ssd", 80, 128), ("gated_delta_rule", 80, 128), *((family, 48, 32) for family in FAMILIES)],
)
def test_values_that_do_not_fill_a_block(
    family: str, V: int, block: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_of(monkeypatch, 1, block)
    assert_exact(family, inputs(family, 140, V=V, H=1))


@pytest.mark.parametrize(("L", "T"), [(1, 140), (3, 70), (7, 140), (8, 140), (9, 260), (12, 70)])
@pytest.mark.parametrize("family", LOGLINEAR)
def test_last_scale_serves_all_higher_levels(family: str, L: int, T: int, seed: int) -> None:
    """One scale for all levels, fewer than a chunk needs, than a tile, than the sequence, and more than enough."""

    def enough(level_scales: Tensor, **rest) -> Tensor:
        last = level_scales[..., -1:].expand(-1, -1, -1, 12)
        return parallel(level_scales=torch.cat([level_scales, last], -1), **rest)

    assert_exact(family, inputs(family, T, L=L, H=1), reference=enough)


@ONE_KIND
@pytest.mark.parametrize("family", LOGLINEAR)
def test_scales_of_one_give_the_linear_model(family: str, seed: int) -> None:
    given, _ = both(inputs(family, 200, H=1))
    given["level_scales"] = torch.ones_like(given["level_scales"])
    base = {**given, "level_scales": None}
    tensors = leaves(base)
    linear = family.removeprefix("loglinear_")
    assert_same_with_gradients(run(family, given), run(linear, base), tensors, 1e-5)


@pytest.mark.parametrize("decay", [0.0, 10.0, 400.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_decay_and_strong_decay(family: str, decay: float, pair: int, seed: int) -> None:
    """Mean log decay per step 0, -10 and -400, up to twice that, with some steps of 0 mixed in."""
    arguments = inputs(family, 140, H=1, decay=decay)
    arguments["g"] = torch.where(torch.rand_like(arguments["g"]) < 0.2, 0.0, arguments["g"])
    # Sums of g over a tile are fp32, so an exponent is wrong by up to an ulp of the largest sum.
    assert_exact(family, arguments, bound=1e-5 + (64 << pair) * 2 * decay * 2**-24)


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_that_erase_everything(family: str, pair: int, seed: int) -> None:
    """-20 a step: each token sees itself and e^-20 of the others; nothing overflows, here or in the gradients."""
    given, exact = both(inputs(family, 70 << pair, H=1))
    given["g"], exact["g"] = torch.full_like(given["g"], -20.0), torch.full_like(exact["g"], -20.0)
    tensors, exact_tensors = leaves(given), leaves(exact)
    assert_same_with_gradients(
        run(family, given), parallel(**exact, scale=SCALE), tensors, 1e-5 + (64 << pair) * 20 * 2**-24, exact_tensors
    )


@ONE_KIND
@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_cannot_reach_another(family: str, seed: int) -> None:
    """The one in the middle is NaN, also in its tiles' gradients."""
    arguments = inputs(family, 150, H=1, L=8)
    for x in arguments.values():
        if x is not None:
            x[:, 5:75] = torch.nan
    given, exact = both(arguments)
    tensors, keep = leaves(given), [*range(5), *range(75, 150)]
    o = run(family, given, cu_seqlens=torch.tensor([0, 5, 75, 75, 150], device=DEVICE))
    rest = {name: None if x is None else x[:, keep].detach().requires_grad_() for name, x in exact.items()}
    expected = parallel(**rest, scale=SCALE, cu_seqlens=torch.tensor([0, 5, 80], device=DEVICE))
    assert_close(o[:, keep], expected, 1e-5, "output")
    weight = torch.randn_like(expected)
    grads = torch.autograd.grad(o[:, keep], list(tensors.values()), weight.float())
    wanted = torch.autograd.grad(expected, [x for x in rest.values() if x is not None], weight)
    for name, a, b in zip(tensors, grads, wanted, strict=True):
        assert_close(a[:, keep], b, 1e-5, f"gradient of {name}")


@ONE_KIND
@pytest.mark.parametrize("family", FAMILIES)
def test_two_runs_are_bit_equal(family: str, seed: int) -> None:
    given, _ = both(inputs(family, 140, H=1))
    tensors = leaves(given)
    weight = torch.randn_like(given["v"])
    runs = []
    for _ in range(2):
        o = run(family, given)
        runs.append([o, *torch.autograd.grad(o, list(tensors.values()), weight)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@ONE_KIND
@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_does_not_reach_inside(family: str, seed: int) -> None:
    given, _ = both(inputs(family, 70, H=1))
    plain = run(family, given)
    with torch.autocast(DEVICE, torch.bfloat16):
        under = run(family, given)
    assert torch.equal(plain, under)


@LINEAR_ONCE
@pytest.mark.parametrize("packed", [False, True])
def test_trees_of_several_levels(family: str, pair: int, packed: bool, seed: int) -> None:
    """More tiles than passes over them take at a time, and a decay that lets the first token reach the last."""
    T = (64 << pair) * (9 if family in DELTA else 17) + 20
    assert_exact(family, inputs(family, T, H=1, decay=1e-4), [0, 70, T - 90, T] if packed else None)


# The delta rule only.


@ONE_KIND
@pytest.mark.parametrize("decay", [1e-3, 0.5])
@pytest.mark.parametrize("adapt", KEYS)
@pytest.mark.parametrize("family", DELTA)
def test_keys_and_write_strengths(family: str, adapt: Callable, decay: float, seed: int) -> None:
    arguments = inputs(family, 200, H=1, decay=decay)
    adapt(arguments)
    assert_exact(family, arguments)


@pytest.mark.parametrize("family", DELTA)
def test_one_key_at_full_strength(family: str, seed: int) -> None:
    """Each write takes away all there is: only the own token's value is read, and neither gates nor scales of higher
    levels matter. Their gradients are zero but for rounding, so that errors count by the size of another's."""
    arguments = inputs(family, 200, H=1, decay=1e-3)
    arguments["k"] = arguments["k"][:, :1].expand_as(arguments["k"]).contiguous()
    arguments["beta"] = torch.ones_like(arguments["beta"])
    given, exact = both(arguments)
    tensors, exact_tensors = leaves(given), leaves(exact)
    o, expected = run(family, given), parallel(**exact, scale=SCALE)
    assert_close(o, expected, 1e-5, "output")
    own = exact["v"] if family not in LOGLINEAR else exact["v"] * exact["level_scales"][..., :1]
    assert_close(o, SCALE * (exact["q"] * exact["k"]).sum(-1, keepdim=True) * own, 1e-5, "output")
    weight = torch.randn_like(expected)
    wanted = dict(zip(tensors, torch.autograd.grad(expected, list(exact_tensors.values()), weight), strict=True))
    grads = dict(zip(tensors, torch.autograd.grad(o, list(tensors.values()), weight.float()), strict=True))
    for name, x in grads.items():
        size = wanted["v" if name == "g" else name].norm()
        assert (x - wanted[name]).norm() <= 1e-5 * size, f"gradient of {name}"


@ONE_KIND
@pytest.mark.parametrize("family", DELTA)
def test_nothing_written(family: str, seed: int) -> None:
    """Exactly 0 is read; what could have been is in the gradient of ``beta``."""
    arguments = inputs(family, 140, H=1)
    arguments["beta"] = torch.zeros_like(arguments["beta"])
    assert not run(family, both(arguments)[0]).any()
    assert_exact(family, arguments)


@pytest.mark.parametrize("decay", [10.0, 50.0, 1000.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_follows_strong_decay_is_exact(family: str, decay: float, pair: int, seed: int) -> None:
    """States carry no more error than their last tokens have: sums that forget all before end in the same bits."""
    T = (64 << pair) + 5
    arguments = inputs(family, T, H=1, L=9)
    arguments["g"] = -decay * (0.5 + 0.5 * torch.rand_like(arguments["g"]))
    arguments["g"][:, -5:] = 0
    given, exact = both(arguments)
    assert_close(run(family, given)[:, -5:], parallel(**exact, scale=SCALE)[:, -5:], 1e-6, "output")
