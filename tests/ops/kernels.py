"""What tests of the kernels share.

Without a GPU the kernels run in Triton's interpreter, at some milliseconds a program and right in fp32 only: few
heads, few tokens.
"""

import pkgutil
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import pytest
import torch
import triton
from torch import Tensor

from src.ops import LinearState, State
from src.ops.kernels import adjoints, between, delta, forward, passes, sizes, ssd, states, within
from src.ops.kernels.delta import ops as delta_ops
from src.ops.kernels.delta import passes as delta_passes
from src.ops.kernels.delta import sizes as delta_sizes
from src.ops.kernels.plan import Plan, Work
from src.ops.reference import parallel
from tests.ops.helpers import assert_same_with_gradients, leaves, operator

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAMILIES = ["ssd", "loglinear_ssd", "gated_delta_rule", "loglinear_gated_delta_rule"]
LOGLINEAR = [family for family in FAMILIES if family.startswith("loglinear")]
DELTA = [family for family in FAMILIES if family.endswith("delta_rule")]
SCALE = 0.7
ONE_KIND = pytest.mark.parametrize("pair", [1], indirect=True)
"""Where tiles of one chunk take the same code: tiles of two take all of it."""
MODULES = (sizes, passes, ssd, delta_sizes, delta_passes, delta_ops)
OF_DECAY = (adjoints, between, forward, states, within)
OF_DELTA = tuple(import_module(f"{delta.__name__}.{x.name}") for x in pkgutil.iter_modules(delta.__path__))
"""Where kernels are."""
LINEAR_ONCE = pytest.mark.parametrize(
    ("family", "pair"),
    [(family, pair) for family in FAMILIES for pair in (0, 1) if pair or family in LOGLINEAR],
    indirect=["pair"],
)


def change(monkeypatch: pytest.MonkeyPatch, **values: object) -> None:
    """Other values for names of the kernels' modules; nothing that follows from the old ones is taken from a cache."""
    for module in (sizes, delta_sizes):
        monkeypatch.setattr(module, "_sizes", module.Sizes)
    for name, value in values.items():
        modules = [module for module in MODULES if hasattr(module, name)]
        assert modules, name
        for module in modules:
            monkeypatch.setattr(module, name, value)


def plan_of(monkeypatch: pytest.MonkeyPatch, pair: int, value_block: int) -> None:
    """fp32 products by tiles of one chunk or two, so many values at a time. The delta rule's tiles are chunks where
    states come in or go out."""

    def plan_for(dtype: torch.dtype, K: int, V: int, stateful: bool = False) -> Plan:
        return Plan(0 if stateful else pair, triton.next_power_of_2(K), value_block, "tf32x3")

    change(monkeypatch, plan_for=plan_for)


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


def matrices(state: State) -> Tensor:
    """Of a linear operator's state or a log-linear one's."""
    return state.memory if isinstance(state, LinearState) else state.levels


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


def unspecialised(kernel) -> list[str]:
    """Arguments that a kernel says it must not be compiled for; a function that kernels call says nothing."""
    return getattr(kernel, "do_not_specialize", None) or getattr(kernel, "kwargs", {}).get("do_not_specialize", [])


def full_name(kernel) -> str:
    """As ``delta.chain.follow``."""
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}".removeprefix("src.ops.kernels.")


def kernel_names(*modules: ModuleType) -> set[str]:
    """Of all kernels in them, but not the functions that those call."""
    return {full_name(x) for module in modules for x in vars(module).values() if unspecialised(x)}


# Keys and write strengths of the delta rule.


def few_keys(x: dict[str, Tensor]) -> None:
    """At full strength: what was written at a key is taken away again and again."""
    x["k"] = x["k"][:, torch.randint(0, 3, x["k"].shape[1:2])]
    x["beta"] = torch.ones_like(x["beta"])


def one_key_for_a_chunk(x: dict[str, Tensor]) -> None:
    """The inverse of a triangle that is all ones."""
    x["k"][:, 60:130] = x["k"][:, 60:61]
    x["beta"][:, 60:130] = 1


def some_write(x: dict[str, Tensor]) -> None:
    """A whole chunk and, of the others, one token in two write nothing."""
    x["beta"] = torch.where(torch.rand_like(x["beta"]) < 0.5, 0.0, x["beta"])
    x["beta"][:, 64:128] = 0


def long_keys(x: dict[str, Tensor]) -> None:
    """Of norm up to 2, along which a write may turn the memory round and triple it."""
    x["k"] = x["k"] * 2 * torch.rand_like(x["k"][..., :1])


KEYS = [few_keys, one_key_for_a_chunk, some_write, long_keys]
