"""The tools, as a user calls them."""

import subprocess
import sys
from pathlib import Path

from tests.training import run

ROOT = Path(__file__).parents[1]


def tool(name: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", f"tools.{name}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_compare_lists_what_differs(tmp_path: Path) -> None:
    runs = [run(tmp_path, f"run.name={mixer}", f"mixer={mixer}") for mixer in ("mamba2", "softmax")]
    done = tool("compare", *map(str, runs), "--figure", str(tmp_path / "curves.png"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["mamba2", "softmax"]
    differing = lines[lines.index("options that differ:") + 1 : -1]
    assert differing[0].split() == ["mixer.name:", "mamba2,", "softmax"]
    assert not any("data." in line or "optim." in line for line in differing)
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_compare_refuses_what_is_no_run(tmp_path: Path) -> None:
    done = tool("compare", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "not a run folder" in done.stderr
