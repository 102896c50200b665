"""Fixtures that the whole suite shares."""

import os
import random
import zlib

import numpy as np
import pytest
import torch

from tests.config_folder import folder  # noqa: F401  a fixture of tests/test_config*.py

if not torch.cuda.is_available():
    # Before Triton is imported: its kernels then run in an interpreter, on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Two workers share two cores: more threads than one each only fight each other.
torch.set_num_threads(1)
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A fresh seed for each run, printed on failure; TEST_SEED=n repeats one."""
    given = os.environ.get("TEST_SEED")
    value = int(given) if given else int.from_bytes(os.urandom(3), "little")
    print(f"TEST_SEED={value}")
    mixed = zlib.crc32(f"{value}".encode())
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)
    return value


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
