"""What tests of the scalar-decay kernels share.

Without a GPU the kernels run in Triton's interpreter, at some milliseconds a program and right in fp32 only: few
heads, few tokens.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from src.ops.kernels import ssd
from src.ops.kernels.plan import Work
from src.ops.reference import parallel
from tests.ops.helpers import assert_same_with_gradients, leaves, operator

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAMILIES = ["ssd", "loglinear_ssd"]
SCALE = 0.7


def deal(monkeypatch: pytest.MonkeyPatch, heads_a_block: int, blocks_a_pass: int | None = None) -> None:
    """Programs of so many heads, and passes of so many programs (None: one pass), whatever the sizes ask for."""

    def work_for(heads: int, groups: int, units: int, passes: int) -> Work:
        return Work(heads_a_block, blocks_a_pass if blocks_a_pass and passes > 1 else heads // heads_a_block)

    monkeypatch.setattr(ssd, "work_for", work_for)


def both(
    arguments: dict[str, Tensor | None], dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """The arguments rounded, on the device, and what they are then in fp64. Gates and scales stay fp32."""
    given, exact = {}, {}
    for name, x in arguments.items():
        kind = dtype if name in ("q", "k", "v") else torch.float32
        given[name] = None if x is None else x.detach().to(DEVICE, kind)
        exact[name] = None if x is None else given[name].double()
    return given, exact


def run(family: str, arguments: dict[str, Tensor | None], **options) -> Tensor:
    """Outputs of the kernels."""
    return operator(family)(**arguments, scale=SCALE, backend="triton", **options)[0]


def assert_exact(
    family: str,
    arguments: dict[str, Tensor | None],
    cuts: list[int] | None = None,
    *,
    bound: float = 1e-5,
    dtype: torch.dtype = torch.float32,
    reference: Callable[..., Tensor] = parallel,
) -> None:
    """Outputs and every gradient against the whole T x T matrix in fp64."""
    given, exact = both(arguments, dtype)
    tensors, exact_tensors = leaves(given), leaves(exact)
    cu = None if cuts is None else torch.tensor(cuts, device=DEVICE)
    expected = reference(**exact, scale=SCALE, cu_seqlens=cu)
    assert_same_with_gradients(run(family, given, cu_seqlens=cu), expected, tensors, bound, exact_tensors)
