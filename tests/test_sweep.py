"""tools.sweep: the commands of a file, several at a time, and how it ends them."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from src.config import run_cli
from src.errors import UserError
from tools import sweep
from tools.sweep import SweepConfig

ROOT = Path(__file__).parents[1]


@pytest.fixture
def write(tmp_path):
    """Writes the lines to a file; the options of a sweep over it, without the devices."""

    def made(*lines: str, **more) -> SweepConfig:
        file = tmp_path / "commands.txt"
        file.write_text("\n".join(lines))
        return SweepConfig(file=str(file), logs=str(tmp_path / "logs"), **more)

    return made


def log(tmp_path: Path, number: int) -> str:
    return (tmp_path / "logs" / f"{number}.log").read_text()


def test_every_line_has_its_device_and_its_log(write, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-ab")
    lines = ["# sizes", "", *(f'echo "line {n}: <$CUDA_VISIBLE_DEVICES>"' for n in range(3, 8))]
    options = write(*lines, devices=["5", "GPU-ab", "cpu"], per_device=2)
    assert sweep.sweep(options) == []
    seen = {n: log(tmp_path, n).strip() for n in range(3, 8)}
    assert all(text.startswith(f"line {n}: <") for n, text in seen.items())
    assert {text.partition(": ")[2] for text in seen.values()} == {"<5>", "<GPU-ab>", "<>"}
    assert {path.name for path in (tmp_path / "logs").glob("*.log")} == {f"{n}.log" for n in range(3, 8)}


def test_not_more_than_per_device_at_a_time(write, tmp_path, seed):
    """Each command counts those that run, itself included; a place that is free again is used."""
    at_once, running = random.choice([1, 2]), tmp_path / "running"
    running.mkdir()
    command = f"touch {running}/$$; sleep 0.3; ls {running} | wc -l; sleep 0.1; rm {running}/$$"
    assert sweep.sweep(write(*[command] * 4, devices=["cpu"], per_device=at_once)) == []
    counts = [int(log(tmp_path, n)) for n in range(1, 5)]
    assert max(counts) == at_once


def test_failing_lines_are_named_and_the_others_run(write, tmp_path, capsys):
    options = write("echo good", "echo bad >&2; exit 3", "# no", "false && echo never", "echo last", devices=["cpu"])
    with pytest.raises(SystemExit) as end:
        sweep.main(options)
    assert end.value.code == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "2 failed: lines 2, 4"
    assert f"line 2 FAILED with status 3, see {tmp_path / 'logs' / '2.log'}" in out
    assert [log(tmp_path, n) for n in (1, 2, 4, 5)] == ["good\n", "bad\n", "", "last\n"]


def counting(tmp_path: Path, name: str, then: str = "true") -> str:
    """A command that notes each of its runs, see `runs_of`."""
    return f"echo >> {tmp_path}/{name}; {then}"


def runs_of(tmp_path: Path, *names: str) -> list[int]:
    return [len((tmp_path / name).read_text().splitlines()) for name in names]


def test_lines_that_are_done_are_skipped_and_failed_ones_are_not(write, tmp_path, capsys):
    done, flaky = counting(tmp_path, "done"), counting(tmp_path, "flaky", f"test -e {tmp_path}/mended")
    lines = ["# sizes", done, flaky]
    assert sweep.sweep(write(*lines, devices=["cpu"])) == [3]
    capsys.readouterr()
    assert sweep.sweep(write(*lines, devices=["cpu"])) == [3]
    assert runs_of(tmp_path, "done", "flaky") == [1, 2]
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"line 2 done before: {done[:90]}; again=true runs it once more"
    assert not any(line.startswith("line 2") for line in out[1:])
    (tmp_path / "mended").touch()
    for _ in range(2):
        assert sweep.sweep(write(*lines, devices=["cpu"])) == []
    assert runs_of(tmp_path, "done", "flaky") == [1, 3]


def test_a_changed_or_moved_line_runs(write, tmp_path):
    a, b = counting(tmp_path, "a"), counting(tmp_path, "b")
    sweep.sweep(write(a, b, devices=["cpu"]))
    sweep.sweep(write(a, f"{b} ", "# the blank behind it is no change", devices=["cpu"]))
    assert runs_of(tmp_path, "a", "b") == [1, 1]
    sweep.sweep(write(a, f"{b} && true", devices=["cpu"]))
    assert runs_of(tmp_path, "a", "b") == [1, 2]
    sweep.sweep(write(b, a, devices=["cpu"]))  # the logs of its number are another command's
    assert runs_of(tmp_path, "a", "b") == [2, 3]


def test_again_runs_what_is_done_and_what_then_fails_is_not_done(write, tmp_path):
    line = counting(tmp_path, "a", f"! test -e {tmp_path}/broken")
    options = write(line, devices=["cpu"])
    again = write(line, devices=["cpu"], again=True)
    assert [sweep.sweep(options), sweep.sweep(again)] == [[], []]
    assert runs_of(tmp_path, "a") == [2]
    (tmp_path / "broken").touch()
    assert sweep.sweep(again) == [1]
    assert sweep.sweep(options) == [1]
    assert runs_of(tmp_path, "a") == [4]


def test_half_a_record_is_none(write, tmp_path):
    options = write(counting(tmp_path, "a"), devices=["cpu"])
    sweep.sweep(options)
    [record] = (tmp_path / "logs").glob("*.done")
    record.write_text(record.read_text()[:-1])
    sweep.sweep(options)
    assert runs_of(tmp_path, "a") == [2]


def test_without_devices_it_takes_the_visible_gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert sweep.all_devices() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert sweep.all_devices() == ["4", "6"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(UserError, match=r"devices=\[cpu\] runs without"):
        sweep.all_devices()


@pytest.mark.parametrize(
    ("lines", "more", "message"),
    [
        (None, [], "cannot be read (No such file"),
        (["", "  # only a comment"], [], "holds no command"),
        (["true"], ["per_device=0"], "per_device=0: must be at least 1"),
        (["true"], ["logs=commands.txt"], "logs=commands.txt: cannot be made"),
        (["true"], ["logs=commands.txt/a"], "logs=commands.txt/a: cannot be made"),
        (b"echo caf\xe9", [], "file=commands.txt: is not UTF-8 (byte 8)"),
        (["true"], ["devices=[cpu,foo]"], "devices=[cpu,foo]: foo must be cpu or a GPU's number or UUID: there is no"),
        (["true"], ["devices=[0]"], "devices=[0]: 0 must be cpu or a GPU's number or UUID: there is no CUDA device"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, lines, more, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    if lines is not None:
        Path("commands.txt").write_bytes(lines if isinstance(lines, bytes) else "\n".join(lines).encode())
    devices = [] if any(option.startswith("devices=") for option in more) else ["devices=[cpu]"]
    with pytest.raises(SystemExit) as end:
        run_cli(sweep.main, SweepConfig, ["file=commands.txt", *devices, *more])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


def test_devices_are_those_that_are_visible(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda i: SimpleNamespace(uuid=f"uuid-{i}"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    sweep.check_devices(["cpu", "4", "6", "GPU-uuid-1"])
    for name in ("0", "foo", "GPU-uuid-2"):
        with pytest.raises(UserError, match=f"{name} must be cpu .* one of the GPUs 4, 6"):
            sweep.check_devices(["4", name])


def test_a_line_of_output_is_one_write(write, monkeypatch):
    """So that what another process writes to the same terminal or file stands before it or behind it."""
    writes = []
    out = SimpleNamespace(write=writes.append, flush=lambda: None)
    options = write("true", "false", "true", devices=["cpu"], per_device=3)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        with pytest.raises(SystemExit):
            sweep.main(options)
    assert len(writes) == 3 + 3 + 1
    assert all(text.endswith("\n") and text.count("\n") == 1 for text in writes)


# ---- signals


def begin(options: SweepConfig, ready: Path, n: int) -> subprocess.Popen:
    """A sweep in a process of its own, once its commands have written `n` files to `ready`."""
    more = [f"file={options.file}", f"logs={options.logs}", "devices=[cpu]", f"per_device={options.per_device}"]
    more += ["again=true"] * options.again
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.sweep", *more],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while len(pids(ready)) < n:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def pids(ready: Path) -> list[int]:
    return [int(text) for path in ready.iterdir() if (text := path.read_text()).endswith("\n")]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_commands_and_begins_no_other(write, tmp_path, number, status):
    ready = tmp_path / "ready"
    ready.mkdir()
    # The step inside is a process of its own that deals with the signal, as a training does, and a step stands behind.
    code = f"import os, signal, sys, time; signal.signal({int(number)}, lambda *_: (print('saved'), sys.exit(0)))"
    code += f"; open('{ready}/' + str(os.getpid()), 'w').write(str(os.getpid()) + chr(10)); time.sleep(60)"
    line = f'{sys.executable} -c "{code}"; echo "another step"'
    process = begin(write(line, line, "echo third", per_device=2), ready, 2)
    children = pids(ready)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == status, (out, err)
    assert err == ""
    assert "stopped: ending 2 commands, 1 have not begun" in out
    assert not any(alive(pid) for pid in children)
    assert [log(tmp_path, n) for n in (1, 2)] == ["saved\n"] * 2
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"1.log", "2.log"}  # nothing is done


def test_a_line_is_not_done_while_it_runs_again(write, tmp_path):
    """Though it was before, and though the sweep is killed and can write nothing any more."""
    ready = tmp_path / "ready"
    ready.mkdir()
    slow = tmp_path / "slow"
    options = write(f"test ! -e {slow} || {{ echo $$ > {ready}/a; exec sleep 60; }}", devices=["cpu"], again=True)
    assert sweep.sweep(options) == []
    slow.touch()
    process = begin(options, ready, 1)
    process.kill()
    process.communicate(timeout=20)
    os.kill(pids(ready)[0], signal.SIGKILL)
    slow.unlink()
    assert sweep.done_before(1, sweep.commands(Path(options.file))[0][1], tmp_path / "logs") is False


def test_a_second_ctrl_c_kills(write, tmp_path):
    ready = tmp_path / "ready"
    ready.mkdir()
    line = f"trap '' INT; echo $$ > {ready}/a; while true; do sleep 0.1; done"
    process = begin(write(line, per_device=1), ready, 1)
    [child] = pids(ready)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline().startswith("line 1 on cpu")
    assert process.stdout.readline().startswith("stopped: ")
    time.sleep(0.3)
    assert process.poll() is None
    assert alive(child)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert not alive(child)
