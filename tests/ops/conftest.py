"""Fixtures for tests of kernels."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

ZONE = 1024
"""Elements before and behind each allocation that must stay as they are."""


@pytest.fixture(params=[0, 1], ids=["tiles_of_one_chunk", "tiles_of_two"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Both kinds of tile in fp32, where a plan takes one a dtype; 16 values at a time, so that V is several blocks."""
    from src.ops.kernels import plan, ssd  # here, because they import Triton

    monkeypatch.setattr(
        ssd, "plan_for", lambda dtype, K, V: plan.Plan(request.param, 1 << (K - 1).bit_length(), min(V, 16), "ieee")
    )
    return request.param


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything that the operators allocate is NaN at first, and lies between zones of NaN that must stay so.

    What is read without ever having been written shows in the result, and what is written beside a tensor at the end.
    """
    from src.ops.kernels import ssd

    fields: list[Tensor] = []

    def new(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        size = torch.Size(shape).numel()
        field = torch.full((size + 2 * ZONE,), torch.nan, dtype=dtype, device=device)
        fields.append(field)
        return field[ZONE : ZONE + size].view(shape)

    class Torch:
        """``torch`` as ``ssd.py`` sees it."""

        def __getattr__(self, name: str) -> object:
            return getattr(torch, name)

        def empty_like(self, x: Tensor, **options) -> Tensor:
            if type(x) is not Tensor:  # a compiler's stand-in
                return torch.empty_like(x, **options)
            return new(x.shape, x.dtype, x.device)

    monkeypatch.setattr(ssd, "torch", Torch())
    monkeypatch.setattr(ssd.Call, "new", lambda call, *shape, dtype=torch.float32: new(shape, dtype, call.device))
    yield
    for field in fields:
        assert torch.cat([field[:ZONE], field[-ZONE:]]).isnan().all(), f"written beside {len(field) - 2 * ZONE} places"
