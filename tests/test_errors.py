"""`tools.errors`: what it draws and compares, and what it refuses."""

import csv
from pathlib import Path

import pytest
import torch

from tools import errors


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--processes", "0"], "from 1 up"),
        (["--operator", "gated_delta_rule"], "loglinear_ssd"),
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets the kernels")
@pytest.mark.parametrize(("operator", "packed"), [("ssd", False), ("loglinear_ssd", True)])
def test_a_case_in_the_interpreter(operator: str, packed: bool) -> None:
    pytest.importorskip("triton")
    found = errors.errors(errors.Case(operator, "float32", 16, 16, packed, T=400), seed=1, device="cpu")
    assert set(found) == set(errors.COLUMNS) - (set() if operator == "loglinear_ssd" else {"level_scales"})
    assert max(found.values()) < 2e-6


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
    monkeypatch.setattr(errors, "errors", lambda case, seed: dict.fromkeys(errors.COLUMNS, 1e-7))


@pytest.mark.usefixtures("pretended")
def test_a_part_can_be_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "errors.csv"
    assert errors.main(["--operator", "ssd", "--dtype", "float32", "--csv", str(file)]) == 0
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    wanted = [case for case in errors.cases() if (case.operator, case.dtype) == ("ssd", "float32")]
    assert len(rows) == len(wanted) == len(errors.cases()) / 4
    assert {(row["operator"], row["dtype"], row["T"]) for row in rows} == {("ssd", "float32", "1400")}
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].split()[:3] == ["ssd", "float32", str(len(wanted))]


@pytest.mark.usefixtures("pretended")
def test_what_is_wrong_is_said(monkeypatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(
        errors, "errors", lambda case, seed: dict.fromkeys(errors.COLUMNS, 1e-3 if case.K == 112 else 0)
    )
    assert errors.main(["--operator", "ssd", "--dtype", "float32"]) == 1
    assert capsys.readouterr().err.count("wrong: ") == 1
