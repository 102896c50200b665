"""Standard output that cannot be written: `| head` has ended, or a disk is full."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from src.output import checked
from tests.training import options, run

ROOT = Path(__file__).parents[1]


def begin(module: str, arguments: list[str], stdout: int) -> subprocess.Popen:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True)


def broken_pipe() -> int:
    """The writing end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.fixture(scope="module")
def text_run(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("output"), "run.name=text")


@pytest.mark.parametrize("module", ["src.evaluate", "src.generate"])
def test_a_reader_that_has_seen_enough_ends_it_quietly(module, text_run):
    stdout = broken_pipe()
    process = begin(module, [f"run={text_run}", "device=cpu"], stdout)
    os.close(stdout)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 141, error
    assert "Traceback" not in error
    assert "BrokenPipe" not in error


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("module", ["src.evaluate", "src.generate"])
def test_a_full_disk_is_one_line(module, text_run):
    with open("/dev/full", "w") as full:
        process = begin(module, [f"run={text_run}", "device=cpu"], full.fileno())
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Traceback" not in error
    assert error.splitlines()[-1] == "error: the output cannot be written: No space left on device"


@pytest.mark.parametrize("progress", ["true", "false"])
def test_training_goes_on_without_its_reader(progress, tmp_path):
    more = options(tmp_path, "run.name=a", f"trainer.progress={progress}", "trainer.sample_tokens=4")
    stdout = broken_pipe()
    process = begin("src.train", more, stdout)
    os.close(stdout)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert "Traceback" not in error
    assert error.count("the output cannot be written (Broken pipe): going on without it\n") == 1
    assert (tmp_path / "runs" / "a" / "checkpoints" / "last.ckpt").is_file()


def test_a_mistake_keeps_its_status(text_run):
    stdout = broken_pipe()
    process = begin("src.evaluate", [f"run={text_run}", "task=mqar"], stdout)
    os.close(stdout)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("module", ["src.evaluate", "src.generate"])
def test_without_an_output(module, text_run):
    """As after `>&-`, and in some daemons."""
    command = f"{sys.executable} -m {module} run={text_run} device=cpu >&-"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_printed_before_a_mistake_changes_nothing(monkeypatch):
    """Buffered output fails only when it is flushed: the status is then that of what ended the process."""
    writer = os.fdopen(broken_pipe(), "w")
    monkeypatch.setattr(sys, "stdout", writer)

    @checked()
    def work() -> None:
        print("kept in the buffer")
        raise SystemExit(143)

    with pytest.raises(SystemExit) as end:
        work()
    assert end.value.code == 143
    assert sys.stdout is writer
    writer.close()  # discarded: no error
