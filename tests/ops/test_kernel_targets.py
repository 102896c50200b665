"""Every kernel through the whole compiler, on any machine: the interpreter accepts what the compiler does not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.kernels import OF_DECAY, OF_DELTA, kernel_names

SHARED = 227 << 10
"""Bytes of shared memory that a program may ask for on an H100 or H200."""

SLOW = pytest.mark.slow
CASES = [
    ("bfloat16", 128, 64, "decay step"),
    ("bfloat16", 128, 64, "delta"),
    pytest.param("bfloat16", 128, 64, "all_delta", marks=SLOW),
    pytest.param("bfloat16", 256, 512, "decay step delta", marks=SLOW),
    pytest.param("float32", 64, 64, "decay step delta", marks=SLOW),
    pytest.param("float32", 256, 32, "decay step delta", marks=SLOW),
]
KERNELS = {
    "decay": kernel_names(*OF_DECAY),
    "delta": kernel_names(*OF_DELTA) | {"states.prepare", "within.finish"},
    "step": {f"{module}.{name}" for module in ("decode", "decode_delta") for name in ("_linear", "_loglinear")},
}
OF_PAIRS = {"within.pairs", "delta.solve.join", "delta.inside.squares_back", "delta.inside.across"}


@pytest.mark.parametrize(("dtype", "K", "V", "kinds"), CASES)
def test_compiles_for_hopper(dtype: str, K: int, V: int, kinds: str, tmp_path: Path) -> None:
    """Forward and backward; rows, packed documents, documents that continue, and one token."""
    command = [sys.executable, "-m", "tests.ops.compile_all", dtype, str(K), str(V), *kinds.split()]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    folder = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    sizes = [json.loads(line) for line in done.stdout.splitlines()]
    compiled = {name for name, _ in sizes}
    expected = set().union(*(KERNELS[kind.removeprefix("all_")] for kind in kinds.split()))
    assert (compiled ^ expected) <= OF_PAIRS, "tiles of two chunks are for some plans only"
    assert [one for one in sizes if one[1] > SHARED] == []


def test_compiled_ahead_by_triton(tmp_path: Path) -> None:
    """All kernels of a step, loaded one by one, and none runs; then all run, and none is compiled."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.ops.compile_ahead"]
    folder = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ahead, then = map(json.loads, done.stdout.splitlines())
    kernels = ahead["compiled"]
    assert kernels > 8
    assert ahead == {"compiled": kernels, "loaded": kernels, "ran": 0, "threads": 1}
    assert then == {"compiled": 0, "loaded": 0, "ran": then["ran"], "threads": 0}
    assert then["ran"] >= kernels
