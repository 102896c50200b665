"""Every kernel through the whole compiler, on any machine: the interpreter accepts what the compiler does not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = 227 << 10
"""Bytes of shared memory that a program may ask for on an H100 or H200."""

SLOW = pytest.mark.slow
CASES = [
    ("bfloat16", 128, 64),
    pytest.param("bfloat16", 256, 512, marks=SLOW),
    pytest.param("float32", 64, 64, marks=SLOW),
    pytest.param("float32", 256, 32, marks=SLOW),
]


@pytest.mark.parametrize(("dtype", "K", "V"), CASES)
def test_compiles_for_hopper(dtype: str, K: int, V: int, tmp_path: Path) -> None:
    """Both operators, forward and backward; rows, packed documents, documents that continue."""
    command = [sys.executable, "-m", "tests.ops.compile_all", dtype, str(K), str(V)]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    folder = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    sizes = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = {"prepare", "sweep", "scan", "keep_roots", "output", "adjoint", "descend", "root_adjoint", "rows"}
    kernels |= {"columns_back", "carry", "inside", "finish"}
    assert kernels <= {name for name, _ in sizes}
    assert [one for one in sizes if one[1] > SHARED] == []
