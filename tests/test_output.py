"""Standard output that cannot be written: `| head` has ended, or a disk is full."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_training_goes_on_without_its_reader(tmp_path):
    """Read until the first step, as `| head` does, and go: no step is lost."""
    more = options(tmp_path, "run.name=a", "trainer.max_steps=30", "trainer.checkpoint_every=1000")
    process = begin("src.train", more, subprocess.PIPE)
    for line in process.stdout:
        if line.startswith("step"):
            break
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait(timeout=120) == 0, error
    assert "Traceback" not in error
    assert "the output cannot be written (Broken pipe): training goes on without it" in error
    assert (tmp_path / "runs" / "a" / "checkpoints" / "last.ckpt").is_file()
