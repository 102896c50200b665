"""Fixtures for tests of kernels."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(params=[0, 1], ids=["tiles_of_one_chunk", "tiles_of_two"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Both kinds of tile in fp32, where a plan takes one a dtype; 16 values at a time, so that V is several blocks."""
    from tests.ops.kernels import plan_of  # here, because it imports Triton

    plan_of(monkeypatch, request.param, 16)
    return request.param


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fresh memory is full of NaN: what is read without ever having been written shows in the result."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def distrust(monkeypatch: pytest.MonkeyPatch) -> set[tuple]:
    """As in a new process with a GPU: nothing has been checked. Kinds of call that have, as they come."""
    from src.ops.kernels import check  # here, because it imports Triton

    checked: set[tuple] = set()
    monkeypatch.setattr(check, "INTERPRETED", False)
    monkeypatch.setattr(check, "_checked", checked)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return checked
