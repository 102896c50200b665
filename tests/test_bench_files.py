"""`tools.bench`: the files that it writes and reads again, and the figure."""

import json
from pathlib import Path

import pytest

from src.errors import UserError
from tests.test_bench import SAVED, TINY
from tools import bench, bench_figure, bench_files


def test_saved_runs_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    files = [tmp_path / "short.json", tmp_path / "long.json"]
    for T, name, file in zip(("64", "128"), ("loglinear", "linear"), files, strict=True):
        assert bench.main(["ssd", *TINY, "--lengths", T, "--only", "loglinear", name, "--json", str(file)]) == 0
    capsys.readouterr()
    picture = tmp_path / "both.png"
    assert bench.main(["--from-json", *map(str, files), "--figure", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[2:4]] == ["64", "128"]
    assert lines[2].split()[3] == "-"
    assert picture.exists()


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda report: [report], "the file must be named values"),
        (lambda report: report | {"rows": {"a": 1}}, "rows must be a list"),
        (lambda report: report | {"rows": [3]}, "rows[0] must be named values"),
        (lambda report: {k: v for k, v in report.items() if k != "left_out"}, "'left_out'"),
        (
            lambda report: report | {"rows": [{"what": "forward", "T": 64, "candidate": "linear"}]},
            "rows[0] has no 'value'",
        ),
        (
            lambda report: report | {"rows": [report["rows"][0] | {"value": 0}]},
            "rows[0].value must be a number above 0",
        ),
        (lambda report: report | {"rows": [report["rows"][0] | {"T": "64"}]}, "rows[0].T must be a whole number"),
        (lambda report: report | {"machine": {}}, "machine has no 'card'"),
        (lambda report: report | {"left_out": {"flash2": None}}, "left_out.flash2 must be a text"),
        (lambda report: report | {"decode": [{"candidate": "linear"}]}, "decode[0] has no 'position'"),
        (lambda report: report | {"setup": report["setup"] | {"attention": "16"}}, "setup.attention must be a list"),
        (lambda report: report | {"lengths": [None]}, "lengths[0] must be a whole number"),
    ],
)
def test_malformed_files_are_one_line(spoil, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(spoil(json.loads(SAVED.read_text()))))
    assert bench.main(["--from-json", str(file)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"error: --from-json {file}: is not what --json of this command writes: ")
    assert said.err.count("\n") == 1
    assert expected in said.err
    assert not said.out


def test_old_files_are_read_with_their_family(capsys: pytest.CaptureFixture) -> None:
    """They hold neither the lengths that were asked for nor the backend."""
    files = sorted(SAVED.parent.glob("ssd_h200*.json"))
    assert len(files) >= 4
    assert bench.main(["ssd", "--from-json", *map(str, files)]) == 0
    said = capsys.readouterr().out
    assert "incomplete" not in said
    assert "backend" not in said


def test_a_run_cut_short_says_so(monkeypatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """An interrupted run leaves one line and what it had measured; the rest of it can be added later."""
    right = bench.Measurement

    def cut(chosen, setup, T, rounds):
        if T == 128:
            raise KeyboardInterrupt
        return right(chosen, setup, T, rounds)

    monkeypatch.setattr(bench, "Measurement", cut)
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    asked = ["ssd", *TINY, "--only", "loglinear", "--json"]
    assert bench.main([*asked, str(first), "--decode", "63"]) == 130
    said = capsys.readouterr()
    assert said.err.endswith("\ninterrupted\n")
    assert "Traceback" not in said.err
    assert json.loads(first.read_text())["lengths"] == [64, 128]
    assert [path.name for path in tmp_path.iterdir()] == ["first.json"]  # nothing temporary
    assert bench.main(["--from-json", str(first)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "incomplete: forward at 128; one token" in lines
    assert lines[-1].count("backend='auto' took torch") == 1

    monkeypatch.undo()
    assert bench.main([*asked, str(second), "--lengths", "128", "--decode", "63"]) == 0
    assert bench.main(["--from-json", str(first), str(second)]) == 0
    assert "incomplete" not in capsys.readouterr().out


def test_a_write_that_fails_leaves_the_old_file(monkeypatch, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    bench_files.write({"rows": 1}, file)

    def full(*places):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(UserError, match="No space left"):
        bench_files.write({"rows": 2}, file)
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]
    assert json.loads(file.read_text()) == {"rows": 1}


def test_figure_has_a_row_for_each_report(monkeypatch, tmp_path: Path) -> None:
    from matplotlib.figure import Figure, SubFigure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **options: drawn.append(self))
    reports = bench_files.read([SAVED, SAVED.with_name("ssd_h200_heads16.json")])
    bench_figure.figure(reports, tmp_path / "two.png")
    rows = drawn[0].subfigs
    assert [row.get_suptitle().splitlines() for row in rows] == [
        ["Mamba-2's operators (scalar decay)", "batch 2, 48 heads, 1 q/k group, K = 128, V = 64, bfloat16"],
        ["Mamba-2's operators (scalar decay)", "batch 1, 16 heads, 16 q/k groups, K = 128, V = 128, bfloat16"],
    ]
    for row in rows:
        inner: SubFigure = row.subfigs[0]
        assert inner.get_suptitle() == "NVIDIA H200, torch 2.11.0+cu130, Triton 3.6.0, commit fd90348"
        left, right = inner.axes
        assert [left.get_title(), right.get_title()] == ["forward + backward", "forward"]
        assert left.get_ylim() == right.get_ylim()
        assert left.get_legend() is None
        names = [text.get_text() for text in inner.legends[0].get_texts()]
        assert sorted(names) == sorted(["FlashAttention-2", "cuDNN attention", "log-linear (ours)", "linear (ours)"])
    markers = [style[2] for style in bench_figure.STYLES.values()]
    assert len(set(markers)) == len(markers)
