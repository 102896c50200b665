"""`tools.bench`: what it times, what it refuses to time, and what it says."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from src import ops
from tools import bench, bench_latency, bench_measure
from tools.bench_peers import candidates, choose
from tools.bench_shapes import Setup, draw

ROOT = Path(__file__).parents[1]
SAVED = ROOT / "docs" / "results" / "ssd_h200.json"
TINY = ["--lengths", "64", "128", "--rounds", "1", "--heads", "1", "--key-dim", "16", "--value-dim", "16"]
TINY += ["--device", "cpu"]
SETUP = Setup("ssd", "own sizes", 1, 2, 1, 16, 16, "float32", "cpu")


@pytest.mark.parametrize("family", bench.FAMILIES)
def test_times_and_writes(family: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    assert bench.main([family, *TINY, "--backward", "--json", str(file), "--figure", str(picture)]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[1].split()[:4] == ["T", "loglinear", "linear", "softmax"]
    assert [line.split()[0] for line in lines[2:6]] == ["forward"] * 4
    assert "left out: flash2, cudnn: needs a CUDA device and bfloat16" in lines
    assert "forward + backward at 128: loglinear" in said.err
    assert picture.stat().st_size > 10_000
    report = json.loads(file.read_text())
    assert len(report["rows"]) == 2 * 2 * 3
    assert all(row["min"] <= row["value"] <= row["max"] for row in report["rows"])
    assert set(report["errors"]["loglinear"]) >= {"o", "dq", "dk", "dv", "dg", "dlevel_scales"}
    assert report["machine"]["torch"] == torch.__version__


def test_command_of_the_readme() -> None:
    command = [sys.executable, "-m", "tools.bench", "ssd", *TINY, "--only", "loglinear"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "own sizes: batch 1, heads 1, groups 1, K 16, V 16, float32" in done.stdout
    assert "linear" not in done.stdout.replace("loglinear", "")


@pytest.mark.parametrize(
    ("operator", "spoil"),
    [
        ("loglinear_ssd", lambda o: 1.01 * o),
        ("ssd", lambda o: o * float("nan")),
        ("loglinear_ssd", lambda o: 1.01 * o - 0.01 * o.detach()),  # right outputs, wrong gradients
    ],
)
def test_nothing_wrong_is_timed(operator: str, spoil, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    right = getattr(ops, operator)

    def wrong(*args, **options):
        o, state = right(*args, **options)
        return spoil(o), state

    monkeypatch.setattr(ops, operator, wrong)
    assert bench.main(["ssd", *TINY]) == 1
    said = capsys.readouterr()
    assert not said.out
    last = said.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert last.endswith("nothing was timed")


def test_wrong_only_at_a_long_length_is_found(monkeypatch, capsys: pytest.CaptureFixture) -> None:
    right = ops.loglinear_ssd

    def wrong(q, *args, **options):
        o, state = right(q, *args, **options)
        return (1.1 * o if q.shape[1] == 1000 else o), state

    monkeypatch.setattr(ops, "loglinear_ssd", wrong)
    assert bench.main(["ssd", *TINY, "--lengths", "64", "1000"]) == 1
    said = capsys.readouterr()
    assert "loglinear with scales of 1 at T=1000 is wrong" in said.err
    assert not said.out


def test_a_peer_that_fails_is_left_out(monkeypatch, capsys: pytest.CaptureFixture) -> None:
    def broken(*args, **options):
        raise RuntimeError("no kernel\nand more")

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", broken)
    assert bench.main(["ssd", *TINY]) == 0
    assert "left out: softmax: RuntimeError: no kernel" in capsys.readouterr().out.splitlines()


def test_a_peer_without_a_backward_pass_is_timed_forward(monkeypatch, capsys: pytest.CaptureFixture) -> None:
    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, *_):
            raise RuntimeError("not on this card\nand more")

    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        "torch.nn.functional.scaled_dot_product_attention", lambda *a, **o: Refuses.apply(real(*a, **o))
    )
    assert bench.main(["ssd", *TINY, "--backward"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "left out: softmax backward: RuntimeError: not on this card" in said
    at = said[1].index("softmax") + len("softmax") - 1
    forward, both = said[2], said[4]
    assert forward.startswith("forward ")
    assert forward[at].isdigit()
    assert both.startswith("forward + backward ")
    assert both[at] == "-"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "allowed: ssd, delta_rule"),
        (["ssd", "--shape", "huge"], "mqar"),
        (["ssd", "--only", "linaer"], "allowed: loglinear, linear"),
        (["ssd", "--only", "cudnn", "--device", "cpu"], "needs a CUDA device"),
        (["ssd", "--memory", "--device", "cpu"], "--memory needs a CUDA device"),
        (["ssd", "--first-step", "--device", "cpu"], "--first-step needs a CUDA device"),
        (["ssd", "--device", "tpu"], "allowed: cpu"),
        (["ssd", "--key-dim", "20"], "multiple of 16"),
        (["ssd", "--lengths", "0"], "from 1 up"),
        (["ssd", "--heads", "6", "--groups", "4"], "must divide"),
        (["delta_rule", "--attention", "4"], "expected 2"),
        (["delta_rule", "--attention", "4", "0"], "from 1 up"),
        (["ssd", "--json", "/no/such/folder/x.json"], "no folder"),
        (["ssd", "--json", str(ROOT)], "is a folder"),
        (["ssd", "--json", "/dev/null"], "not a regular file"),
        (["ssd", "--json", "/proc/x.json"], "cannot write in /proc"),
        (["ssd", "--figure", "x.foo"], "allowed endings: .png"),
        (["ssd", "--figure", "noext"], "allowed endings: .png"),
        (["ssd", "--figure", str(ROOT / "x" / "x.png")], "no folder"),
        (["ssd", "--no-time", "--figure", "x.png"], "--no-time takes none"),
        (["ssd", "--lengths", "64", str(10**12), "--device", "cpu"], f"--lengths {10**12}: out of memory"),
        (["ssd", "--lengths", str(10**30), "--device", "cpu"], "out of memory"),
        (["ssd", "--decode", str(10**12), "--device", "cpu"], f"--decode {10**12}: out of memory"),
        (["--from-json", str(ROOT / "README.md")], "not what --json of this command writes"),
        (["--from-json", str(SAVED), "--json", "x.json"], "--json would be ignored"),
        (
            ["--from-json", str(SAVED), "--lengths", "64", "--decode", "--no-backward"],
            "--lengths, --backward, --decode",
        ),
        (
            ["--from-json", str(SAVED), "--shape", "cpu", "--batch", "2", "--device", "cpu"],
            "--shape, --batch, --device",
        ),
        (["delta_rule", "--from-json", str(SAVED)], "allowed: ssd"),
        (["--from-json", str(SAVED.with_name("ssd_h200_first_step.json")), "--figure", "x.png"], "nothing was timed"),
        (["ssd", "--roudns", "3"], "--roudns"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], expected: str, capsys: pytest.CaptureFixture) -> None:
    assert bench.main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert expected in said.err
    assert not said.out


def test_what_is_refused_is_refused_before_anything_is_measured(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "run", None)
    for option, name in (("--json", "."), ("--figure", "x.foo"), ("--figure", "noext")):
        assert bench.main(["ssd", *TINY, option, str(tmp_path / name)]) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["DefaultCPUAllocator: can't allocate memory", "Storage size calculation overflowed"])
def test_memory_that_runs_out_at_a_length(text: str, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    right = draw

    def full(setup, T, levels=None):
        if T == 128 and setup.device == "cpu":
            raise RuntimeError(f"{text}\nException raised from …")
        return right(setup, T, levels)

    monkeypatch.setattr(bench_measure, "draw", full)
    assert bench.main(["ssd", *TINY, "--only", "loglinear"]) == 1
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert "all candidates at 128: left out: out of memory" in said.err
    assert "left out: all candidates at 128: out of memory" in said.out.splitlines()
    assert "incomplete: forward at 128" in said.out.splitlines()


def test_who_was_asked_for_and_did_not_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert bench.main(["ssd", *TINY, "--only", "loglinear", "flash2"]) == 1
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == "error: --only flash2: did not run: needs a CUDA device and bfloat16"
    assert said.out.splitlines()[1].split()[1] == "loglinear"


@pytest.mark.parametrize("family", bench.FAMILIES)
@pytest.mark.parametrize("name", ["fla_linear", "fla_loglinear", "mamba_ssm"])
def test_packages_that_are_not_there_are_said(name: str, family: str, monkeypatch) -> None:
    if name not in candidates(family):
        return
    monkeypatch.setattr(Setup, "cuda", True)
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)
    chosen, left_out = choose(SETUP, [name])
    assert not chosen
    assert left_out[name].startswith("cannot import")


@pytest.mark.parametrize("family", bench.FAMILIES)
def test_decoding(family: str, capsys: pytest.CaptureFixture) -> None:
    assert bench.main([family, *TINY, "--no-time", "--only", "loglinear", "linear", "--decode", "63", "128"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines[2:6]] == [[n, p] for n in ("loglinear", "linear") for p in ("63", "128")]


def test_wrong_decoding_is_not_timed(monkeypatch, capsys: pytest.CaptureFixture) -> None:
    right = ops.loglinear_ssd

    def wrong(*args, initial_state=None, **options):
        return right(*args, initial_state=None, **options)

    monkeypatch.setattr(ops, "loglinear_ssd", wrong)
    assert bench.main(["ssd", *TINY, "--only", "loglinear", "--decode", "63"]) == 1
    assert "token by token" in capsys.readouterr().err


def test_first_step_runs_in_a_fresh_process() -> None:
    row = bench_latency.fresh(
        ["-m", "tools.bench", "ssd", *TINY, "--lengths", "64", "--once", "loglinear"], printed=True
    )
    assert 0.1 < row["seconds"] < 100
    assert "failed" in bench_latency.fresh(["-c", "raise ValueError('no')"], printed=True)


class Event:
    """A CUDA event where there is no CUDA: the host's clock."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end.at - self.at)


def test_timing_on_a_pretended_cuda_device(monkeypatch) -> None:
    monkeypatch.setattr(Setup, "cuda", True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**20)
    monkeypatch.setattr(bench_measure, "TARGET_MS", 5)
    here = candidates("ssd")
    full = here["linear_torch"]
    monkeypatch.setattr(full, "run", lambda inputs: (_ for _ in ()).throw(torch.OutOfMemoryError("too large")))
    taken = bench_measure.Measurement([here["loglinear"], here["softmax"], full], SETUP, 70, rounds=3)
    rows = taken.times(bench_measure.FORWARD) + taken.times(bench_measure.BOTH)
    assert [row["candidate"] for row in rows] == ["loglinear", "softmax"] * 2
    assert all(bench_measure.LEAST <= row["samples"] <= bench_measure.MOST for row in rows)
    assert [row["value"] for row in taken.memory()] == [2.0, 2.0]
    assert taken.failed == {"linear_torch": "out of memory"}
    assert not taken.broken


@pytest.mark.parametrize("name", ["fla_linear", "fla_loglinear", "mamba_ssm"])
@pytest.mark.parametrize("family", bench.FAMILIES)
def test_packages_are_called_with_our_tokens(family: str, name: str, monkeypatch) -> None:
    """Each is compared with its own reference by functions that take the arguments it is given, as theirs do."""
    peer = candidates(family).get(name)
    if peer is None:
        return

    def simple_gla(q, k, v, g, scale):
        assert q.shape[2] == v.shape[2]
        return ops.ssd(q, k, v, g, scale=scale)

    def scan(x, dt, A, B, C, chunk_size):
        return ops.ssd(C, B, x * dt[..., None], A * dt)[0]

    theirs = {"fla_linear": simple_gla if family == "ssd" else ops.gated_delta_rule, "mamba_ssm": scan}
    monkeypatch.setattr(peer, "load", lambda: theirs.get(name, ops.loglinear_ssd))
    setup = Setup(family, "own sizes", 2, 4, 2, 16, 32, "float32", "cpu")
    errors = bench_measure.check(peer, setup, 70, [64])
    assert max(errors.values()) < 1e-5
