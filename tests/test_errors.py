"""`tools.errors`: what it draws and compares, and what it refuses."""

import csv
from pathlib import Path

import pytest
import torch

from src import ops
from tools import errors, errors_cases
from tools.errors_cases import BOUNDS, COLUMNS, KINDS, OPERATORS, Case, cases


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--processes", "0"], "from 1 up"),
        (["--operator", "delta_rule"], "loglinear_gated_delta_rule"),
        (["--kind", "long"], "long_keys"),
        (["--dtype", "float64"], "float32"),
        (["--csv", "/no/such/folder/x.csv"], "no folder"),
        (["--csv", "/"], "is a folder"),
        (["--sed", "1"], "--sed"),
        (["--seed", "one"], "one"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], expected: str, capsys: pytest.CaptureFixture) -> None:
    assert errors.main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert expected in said.err
    assert not said.out


def names(operator: str) -> set[str]:
    left_out = set() if "delta" in operator else {"beta"}
    return set(COLUMNS) - left_out - (set() if operator.startswith("loglinear") else {"level_scales"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets the kernels")
@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("ssd", "rows"),
        ("ssd", "continued"),
        ("loglinear_ssd", "packed"),
        ("gated_delta_rule", "repeated_keys"),
        ("gated_delta_rule", "long_keys"),
        ("loglinear_gated_delta_rule", "packed"),
        ("loglinear_gated_delta_rule", "continued"),
    ],
)
def test_a_case_in_the_interpreter(operator: str, kind: str) -> None:
    pytest.importorskip("triton")
    found = errors_cases.errors(Case(operator, "float32", 16, 16, kind, T=300), seed=1, device="cpu")
    assert set(found) == names(operator)
    assert max(found.values()) < 2e-6


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_bounds_are_fair(operator: str, kind: str, dtype: str) -> None:
    """The PyTorch form, which rounds in fp32 alone, stays well below them on every kind of input."""
    case = Case(operator, dtype, 64, 32, kind, T=200)
    if not errors_cases.takes(case):
        assert case not in cases()
        return
    found = errors_cases.errors(case, seed=2, device="cpu", backend="torch")
    assert set(found) == names(operator)
    assert max(found.values()) < BOUNDS[dtype] / 4


def test_draws_are_taken_together(monkeypatch) -> None:
    """What is wrong in the second of two draws alone counts against both."""
    drawn: list[dict] = []
    monkeypatch.setattr(errors_cases, "one_draw", lambda *_: drawn.pop(0))
    drawn += [{"q": (0.0, 3.0), "v": (2.0, 1.0)}, {"q": (1.0, 4.0), "v": (2.0, 1.0)}]
    case = Case("ssd", "bfloat16", 64, 32, T=200)
    assert errors_cases.errors(case, seed=2, device="cpu", draws=2) == {"q": 1 / 5, "v": 2.0}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_wrong_in_one_head_is_above_the_bounds(kind: str, monkeypatch) -> None:
    """Of four heads, one forgets too fast: every kind of input shows it."""
    case = Case("gated_delta_rule", "bfloat16", 64, 32, kind, T=200)
    right = ops.gated_delta_rule

    def wrong(q, k, v, g, beta, **options):
        g = torch.where(torch.arange(4) == 3, g - 0.5, g)
        return right(q, k, v, g, beta, **options)

    monkeypatch.setattr(ops, "gated_delta_rule", wrong)
    assert max(errors_cases.errors(case, seed=2, device="cpu", backend="torch").values()) > BOUNDS["bfloat16"]


def test_a_state_that_is_lost_is_seen(monkeypatch) -> None:
    right = ops.loglinear_ssd
    monkeypatch.setattr(ops, "loglinear_ssd", lambda *a, initial_state=None, **options: right(*a, **options))
    case = Case("loglinear_ssd", "bfloat16", 64, 32, "continued", T=200)
    found = errors_cases.errors(case, seed=2, device="cpu", backend="torch")
    assert min(found.values()) > BOUNDS["bfloat16"]


def test_kinds_are_what_they_are_called() -> None:
    torch.manual_seed(0)
    drawn = {kind: errors_cases.draw(Case("gated_delta_rule", "float32", 64, 32, kind, T=200)) for kind in KINDS}
    assert (drawn["repeated_keys"]["k"] == drawn["repeated_keys"]["k"][:, :1]).all()
    assert (drawn["repeated_keys"]["beta"][..., ::2] == 1).all()
    assert (drawn["beta_zero"]["beta"][..., ::2] == 0).all()
    assert (drawn["beta_zero"]["beta"][..., 1::2] > 0).any()
    assert (drawn["strong_decay"]["g"][..., ::2] == -20).all()
    assert not drawn["no_decay"]["g"].any()
    assert 1.8 < drawn["long_keys"]["k"].norm(dim=-1).max() <= 2
    for kind in set(KINDS) - {"long_keys"}:
        norms = drawn[kind]["k"].norm(dim=-1)
        torch.testing.assert_close(norms, torch.ones_like(norms))


def test_every_operator_has_its_cases() -> None:
    assert len(set(cases())) == len(cases())
    for operator in OPERATORS:
        mine = [case for case in cases() if case.operator == operator]
        assert {case.kind for case in mine} == {
            kind for kind in KINDS if errors_cases.takes(Case(operator, "", 64, 64, kind))
        }
        assert {(case.K, case.V) for case in mine if case.kind == "rows"} >= {(16, 16), (192, 384), (256, 512)}
        assert {case.K for case in mine if case.kind == "continued"} == {64, 128, 192}


class Pool:
    """A pool of processes that is this one."""

    def __init__(self, processes: int, maxtasksperchild: int) -> None:
        assert processes >= 1

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def imap_unordered(self, function, work):
        return map(function, work)


@pytest.fixture
def pretended(monkeypatch) -> None:
    """A CUDA device, and cases whose errors are 1e-7."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(
        "multiprocessing.context.BaseContext.Pool", lambda self, *args, **options: Pool(*args, **options)
    )
    monkeypatch.setattr(errors, "errors", lambda case, seed, draws: dict.fromkeys(names(case.operator), 1e-7))


@pytest.mark.usefixtures("pretended")
def test_a_part_can_be_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "errors.csv"
    assert errors.main(["--operator", "ssd", "--dtype", "float32", "--csv", str(file)]) == 0
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    wanted = [case for case in cases() if (case.operator, case.dtype) == ("ssd", "float32")]
    assert [row["kind"] for row in rows if row["K"] == row["V"] == "128"] == [
        case.kind for case in sorted(wanted, key=lambda case: KINDS.index(case.kind)) if case.K == case.V == 128
    ]
    assert len(rows) == len(wanted)
    assert {(row["operator"], row["dtype"], row["beta"]) for row in rows} == {("ssd", "float32", "")}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["operator", "dtype", "kind", "cases", "output", "q", "k", "v", "g"]
    assert [line.split()[2] for line in lines[1:-1]] == ["rows", "packed", "continued", "strong_decay", "no_decay"]
    assert sum(int(line.split()[3]) for line in lines[1:-1]) == len(wanted)


@pytest.mark.usefixtures("pretended")
def test_the_whole_table(capsys: pytest.CaptureFixture) -> None:
    assert errors.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[4:] == list(COLUMNS)
    assert max(map(len, lines)) < 130
    last = [line for line in lines if line.startswith("loglinear_gated_delta_rule")][-1]
    assert last.split() == ["loglinear_gated_delta_rule", "float32", "no_decay", "2", *["1.0e-07"] * 7]
    beta = lines[0].index("beta")
    assert all(not line[beta : beta + 7].strip() for line in lines[1:-1] if "ssd" in line)


@pytest.mark.usefixtures("pretended")
def test_kinds_can_be_run_alone(capsys: pytest.CaptureFixture) -> None:
    assert errors.main(["--kind", "long_keys"]) == 0
    assert [line.split()[:4] for line in capsys.readouterr().out.splitlines()[1:-1]] == [
        ["gated_delta_rule", dtype, "long_keys", "2"] for dtype in BOUNDS
    ]
    assert errors.main(["--kind", "long_keys", "--operator", "ssd"]) == 2
    assert capsys.readouterr().err == "error: --kind long_keys: is no case of --operator ssd\n"


@pytest.mark.usefixtures("pretended")
def test_what_is_wrong_is_said(monkeypatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(
        errors, "errors", lambda case, seed, draws: dict.fromkeys(names(case.operator), 1e-3 if case.K == 112 else 0)
    )
    assert errors.main(["--operator", "ssd", "--dtype", "float32"]) == 1
    assert capsys.readouterr().err.count("wrong: ") == 1
