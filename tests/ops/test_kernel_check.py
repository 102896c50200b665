"""Kernels are refused where a compiler has made them wrong."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from src.ops import KernelError
from src.ops.kernels import check, launch, passes
from src.ops.kernels.delta import passes as delta_passes
from src.ops.kernels.delta.ops import delta_backward, delta_forward
from src.ops.reference import parallel
from tests.ops.helpers import assert_close, inputs, leaves, operator
from tests.ops.kernels import (
    DELTA,
    DEVICE,
    FAMILIES,
    LOGLINEAR,
    ONE_KIND,
    SCALE,
    both,
    change,
    matrices,
    plan_of,
    run,
)

PTXAS = "Cuda compilation tools, release 13.0, V13.0.88\nBuild cuda_13.0.r13.0/compiler.36424714_0\n"


@pytest.mark.parametrize("wrong", ["output", "gradient of k", "gradient of level_scales"])
@pytest.mark.parametrize("error", [2e-3, 0.9, float("inf"), float("nan")])
def test_wrong_values_are_refused(wrong: str, error: float, distrust: set[tuple]) -> None:
    """In one line: which, how wrong, which compiler, what to do."""
    errors = {"output": 1e-7, "gradient of q": 3e-7, "gradient of k": 1e-7, "gradient of level_scales": 2e-7}
    message = (
        rf"wrong {wrong} \(relative error .*Triton {re.escape(launch.triton.__version__)} with ptxas .*some GPU"
        ".*backend='torch'.*TRITON_PTXAS_PATH"
    )
    with pytest.raises(KernelError, match=message) as raised:
        check.ensure(("kind",), lambda: {**errors, wrong: error}, torch.float32)
    assert "\n" not in str(raised.value)


def test_rounding_is_not_refused(distrust: set[tuple]) -> None:
    check.ensure(("kind",), lambda: {"output": 1e-6, "gradient of q": 1e-5}, torch.float32)
    check.ensure(("other",), lambda: {"output": 3e-3, "gradient of q": 9e-3}, torch.bfloat16)


def test_each_kind_of_call_is_checked_once(distrust: set[tuple]) -> None:
    ran = []
    for kind in ("a", "b", "a", "b", "a"):
        check.ensure((kind,), lambda kind=kind: ran.append(kind) or {"output": 0.0}, torch.float32)
    assert ran == ["a", "b"]


def test_what_was_refused_is_refused_again(distrust: set[tuple]) -> None:
    def broken() -> dict[str, float]:
        raise torch.OutOfMemoryError("not now")

    for _ in range(2):
        with pytest.raises(KernelError):
            check.ensure(("wrong",), lambda: {"output": 1.0}, torch.float32)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            check.ensure(("unfinished",), broken, torch.float32)
    assert not distrust


@pytest.mark.parametrize("given", [None, "ptxas", "missing"])
def test_the_message_names_the_compiler(given: str | None, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ptxas").write_text(f"#!/bin/sh\ncat <<'END'\nptxas: NVIDIA (R) Ptx optimizing assembler\n{PTXAS}END\n")
    (tmp_path / "ptxas").chmod(0o755)
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    if given:
        monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / given))
    version = {"ptxas": "13.0.88", "missing": "of unknown version", None: r"(\d+\.\d+\.\d+|of unknown version)"}[given]
    origin = r" \(TRITON_PTXAS_PATH\)" if given else ""
    assert re.fullmatch(rf"Triton \S+ with ptxas {version}{origin}", check.compiler())


def asked_checks(monkeypatch: pytest.MonkeyPatch) -> dict[tuple, Callable]:
    """The checks that calls from now on ask for, by kind, none of them made."""
    asked: dict[tuple, Callable] = {}
    monkeypatch.setattr(check, "ensure", lambda kind, run, dtype: asked.setdefault(kind, run))
    return asked


@pytest.mark.parametrize("cuts", [None, [0, 30, 30, 100]])
@pytest.mark.parametrize("L", [None, 3, 9])
@pytest.mark.parametrize(("delta", "groups"), [(False, 1), (True, 1), (True, 2)])
def test_the_standard_is_exact(delta: bool, groups: int, L: int | None, cuts: list[int] | None) -> None:
    """Its gradients are written by hand; here autograd makes them."""
    problem = check.problem(100, 16, 32, L, torch.float32, torch.device(DEVICE), delta=delta, groups=groups)
    given = {name: x.double() for name, x in problem.items()}
    assert set(given) == {"q", "k", "v", "g"} | ({"beta"} if delta else set()) | ({"scales"} if L else set())
    tensors = {name: x.requires_grad_() for name, x in given.items()}
    named = {"level_scales" if name == "scales" else name: x for name, x in tensors.items()}
    cu = None if cuts is None else torch.tensor(cuts, device=DEVICE)
    expected = parallel(**named, cu_seqlens=cu)
    do = torch.randn_like(expected)
    made = check.exact({name: x.detach() for name, x in given.items()}, do, cu)
    assert_close(made.pop("output"), expected, 1e-12, "output")
    grads = dict(zip(tensors, torch.autograd.grad(expected, list(tensors.values()), do), strict=True))
    assert made.keys() == grads.keys()
    for name, x in made.items():
        assert_close(x, grads[name], 1e-12, f"gradient of {name}")


@pytest.mark.usefixtures("pair", "poisoned")
@pytest.mark.parametrize(
    ("family", "packed", "pair", "state"),
    [
        ("ssd", True, 0, False),
        ("loglinear_ssd", False, 1, False),
        ("gated_delta_rule", True, 0, True),
        pytest.param("gated_delta_rule", False, 1, False, marks=pytest.mark.slow),
        ("loglinear_gated_delta_rule", False, 0, True),
        pytest.param("loglinear_gated_delta_rule", True, 1, False, marks=pytest.mark.slow),
    ],
    indirect=["pair"],
)
def test_sound_kernels_are_far_within_bounds(
    family: str, packed: bool, pair: int, state: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks that calls of these kinds ask for, forward and backward."""
    asked = asked_checks(monkeypatch)
    T = (64 << pair) + 1
    given, _ = both(inputs(family, T, H=1))
    leaves(given)
    cu = torch.tensor([0, 40, T], device=DEVICE) if packed else None
    o, end = operator(family)(**given, cu_seqlens=cu, return_state=state, backend="triton")
    (o.sum() + (matrices(end).sum() if state else 0)).backward()
    assert len(asked) == 2
    found = list(asked.values())[1]()
    names = {"output", *(f"gradient of {name}" for name in leaves(given))}
    assert found.keys() == names
    assert max(found.values()) < 0.1 * check.BOUNDS[torch.float32]


@ONE_KIND
@pytest.mark.usefixtures("pair", "poisoned")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_checks_its_kernels_first(family: str, distrust: set[tuple], seed: int) -> None:
    """Forward, then backward from inside autograd; nothing of it shows in random numbers or in gradients."""
    given, exact = both(inputs(family, 20, H=1))
    tensors, exact_tensors = leaves(given), leaves(exact)
    before = torch.get_rng_state()
    o = run(family, given)
    assert len(distrust) == 1
    grads = torch.autograd.grad(o.sum(), list(tensors.values()))
    assert len(distrust) == 2
    assert torch.equal(torch.get_rng_state(), before)
    wanted = torch.autograd.grad(parallel(**exact, scale=SCALE).sum(), list(exact_tensors.values()))
    for name, a, b in zip(tensors, grads, wanted, strict=True):
        assert_close(a, b, 1e-5, f"gradient of {name}")
    for packed in (torch.tensor([0, 20], device=DEVICE), None):  # another kind, and one that is known
        with torch.no_grad():
            run(family, given, cu_seqlens=packed)
        assert len(distrust) == 3


@pytest.mark.usefixtures("pair", "poisoned")
@pytest.mark.parametrize("pair", [0], indirect=True)
@pytest.mark.parametrize("family", DELTA)
def test_calls_with_states_are_checked_for_themselves(family: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the delta rule, whose tiles are others then: states that come in, that go out, and none."""
    asked = asked_checks(monkeypatch)
    given, _ = both(inputs(family, 20, H=1))
    with torch.no_grad():
        run(family, given)
        assert len(asked) == 1
        _, state = operator(family)(**given, return_state=True, backend="triton")
        assert len(asked) == 2
        operator(family)(**given, initial_state=state, return_state=True, backend="triton")
        # Continued log-linear calls are packed.
        assert len(asked) == (3 if family in LOGLINEAR else 2)


@ONE_KIND
@pytest.mark.usefixtures("pair")
@pytest.mark.parametrize("family", ["ssd", "gated_delta_rule"])
def test_wrong_kernels_raise_where_they_are_called(
    family: str, distrust: set[tuple], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = (delta_passes if family in DELTA else passes).Pass
    given, _ = both(inputs(family, 20, H=1))
    leaves(given)
    output, backward = made.output, made.backward

    def wrong_output(self, o: Tensor) -> None:
        output(self, o)
        o.mul_(1.001)

    def wrong_gradient(self, do: Tensor, dlevels: Tensor | None, out: dict) -> None:
        backward(self, do, dlevels, out)
        out["dk"].mul_(torch.nan)

    monkeypatch.setattr(made, "backward", wrong_gradient)
    o = run(family, given)
    with pytest.raises(KernelError, match="wrong gradient of k"):
        o.sum().backward()
    distrust.clear()
    monkeypatch.setattr(made, "output", wrong_output)
    with pytest.raises(KernelError, match="wrong output"):
        run(family, given)
    o, _ = operator(family)(**given, backend="torch")
    assert o.isfinite().all()


def transposed(x: Tensor, a: dict) -> Tensor:
    """Of a square matrix a tile."""
    return x.unflatten(-1, (a["K"], a["K"])).mT.flatten(-2).contiguous()


MISTAKES: dict[str, tuple[str, str, Callable[[Tensor, dict], Tensor], str]] = {
    # Of the delta rule: a kernel, the argument that it gets wrong, how, and the first thing that then is.
    "other write strengths": ("solve", "beta", lambda x, a: x.square(), "output"),
    "M transposed": ("follow", "changes", transposed, "output"),
    "no M": ("follow", "changes", lambda x, a: 0 * x, "output"),
    "no decay over tiles": ("follow", "totals", lambda x, a: 0 * x, "output"),
    "scales of the next level": ("output", "columns", lambda x, a: x.roll(1, 1), "output"),
    "nothing through the first chunk": ("join", "k", lambda x, a: 0 * x, "output"),
    "M instead of its transpose": ("ebb", "changes", transposed, "k"),
    "scales of another level": ("rows", "columns", lambda x, a: x.roll(1, 1), "q"),
    "keys of a tile's second chunk": ("across", "k", lambda x, a: 0 * x, "beta"),
    "nothing from the second chunk to the first": ("squares_back", "crossing", lambda x, a: 0 * x, "v"),
    "dM transposed": ("columns_back", "changes", transposed, "k"),
    "an inverse that is none": ("solve_back", "inverse", lambda x, a: torch.ones_like(x).tril(), "beta"),
    "no gates over tiles": ("finish", "passing", lambda x, a: 0 * x, "g"),
}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_show(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one kernel, against fp64: far out of bounds, and in what it must show."""
    kernel, name, wrong, shown = MISTAKES[mistake]
    plan_of(monkeypatch, int(kernel in ("join", "squares_back", "across")), 16)
    made: set[str] = set()

    def launched(one, programs: int, arguments: dict, **options) -> None:
        made.add(one.fn.__name__)
        if one.fn.__name__ == kernel:
            arguments = {**arguments, name: wrong(arguments[name], arguments)}
        launch.launch(one, programs, arguments, **options)

    change(monkeypatch, launch=launched)
    problem = check.problem(210, 16, 16, 9, torch.float32, torch.device(DEVICE), delta=True)

    def rest(x: dict[str, Tensor]) -> tuple:
        return *x.values(), None, None, 1.0, 0

    def backward(do: Tensor, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(zip(x, delta_backward(do, None, *rest(x)), strict=False))

    gradients = backward if shown != "output" else None
    found = check.errors(problem, None, lambda x: delta_forward(*rest(x), -1)[0], gradients)
    assert kernel in made
    assert found[shown if shown == "output" else f"gradient of {shown}"] > 10 * check.BOUNDS[torch.float32]
