"""What tests of the scalar-decay kernels share.

Without a GPU the kernels run in Triton's interpreter, at some milliseconds a program and right in fp32 only: few
heads, few tokens.
"""

from collections.abc import Callable

import pytest
import torch
import triton
from torch import Tensor

from src.ops.kernels import passes, sizes, ssd
from src.ops.kernels.plan import Plan, Work
from src.ops.reference import parallel
from tests.ops.helpers import assert_same_with_gradients, leaves, operator

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAMILIES = ["ssd", "loglinear_ssd"]
SCALE = 0.7
ONE_KIND = pytest.mark.parametrize("pair", [1], indirect=True)
"""Where tiles of one chunk take the same code: tiles of two take all of it."""
LINEAR_ONCE = pytest.mark.parametrize(
    ("family", "pair"), [("ssd", 1), ("loglinear_ssd", 0), ("loglinear_ssd", 1)], indirect=["pair"]
)


def change(monkeypatch: pytest.MonkeyPatch, **values: object) -> None:
    """Other values for names of the kernels' modules; nothing that follows from the old ones is taken from a cache."""
    monkeypatch.setattr(sizes, "_sizes", sizes.Sizes)
    for name, value in values.items():
        modules = [module for module in (sizes, passes, ssd) if hasattr(module, name)]
        assert modules, name
        for module in modules:
            monkeypatch.setattr(module, name, value)


def plan_of(monkeypatch: pytest.MonkeyPatch, pair: int, value_block: int) -> None:
    """fp32 products by tiles of one chunk or two, so many values at a time."""
    change(
        monkeypatch,
        plan_for=lambda dtype, K, V: Plan(pair, triton.next_power_of_2(K), value_block, "tf32x3"),
    )


def deal(monkeypatch: pytest.MonkeyPatch, heads_a_block: int, blocks_a_pass: int | None = None) -> None:
    """Programs of so many heads, and backward passes of so many programs (None: all), whatever the sizes ask for."""
    if blocks_a_pass:
        little_scratch(monkeypatch)

    def work_for(heads: int, groups: int, units: int, passes: int, programs: int) -> Work:
        return Work(heads_a_block, blocks_a_pass if blocks_a_pass and passes > 1 else heads // heads_a_block)

    change(monkeypatch, work_for=work_for)


def little_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass takes as few heads at a time as it can."""
    change(monkeypatch, SCRATCH=1e-9, SCRATCH_BYTES=1)


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


def in_nan(x: Tensor) -> Tensor:
    """The same tensor as a view into memory that is NaN before and behind it."""
    field = torch.full((x.shape[0], x.shape[1] + 200, *x.shape[2:]), torch.nan, dtype=x.dtype, device=x.device)
    field[:, 100:-100] = x
    return field[:, 100:-100]


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
    place: Callable[[Tensor], Tensor] = lambda x: x,
) -> None:
    """Outputs and every gradient against the whole T x T matrix in fp64; ``place`` lays out what the kernels get."""
    given, exact = both(arguments, dtype)
    given = {name: None if x is None else place(x) for name, x in given.items()}
    tensors, exact_tensors = leaves(given), leaves(exact)
    cu = None if cuts is None else torch.tensor(cuts, device=DEVICE)
    expected = reference(**exact, scale=SCALE, cu_seqlens=cu)
    assert_same_with_gradients(run(family, given, cu_seqlens=cu), expected, tensors, bound, exact_tensors)
