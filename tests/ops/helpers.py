"""Random inputs and comparisons for operator tests."""

from collections.abc import Callable

import torch
from torch import Tensor

from src import ops

FAMILIES = ["ssd", "gated_delta_rule", "loglinear_ssd", "loglinear_gated_delta_rule"]
LOGLINEAR = [name for name in FAMILIES if name.startswith("loglinear")]


def inputs(
    family: str,
    T: int,
    *,
    B: int = 1,
    G: int = 1,
    H: int = 2,
    K: int = 16,
    V: int = 16,
    L: int | None = None,
    decay: float = 0.1,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor | None]:
    """Arguments by name, absent ones None: what ``reference`` takes. ``decay``: mean of ``-g``."""
    q = torch.randn(B, T, G, K, dtype=dtype)
    k = torch.nn.functional.normalize(torch.randn(B, T, G, K, dtype=dtype), dim=-1)
    v = torch.randn(B, T, H, V, dtype=dtype)
    g = -2 * decay * torch.rand(B, T, H, dtype=dtype)
    beta = torch.rand(B, T, H, dtype=dtype) if "delta" in family else None
    L = ops.num_levels(max(1, T)) if L is None else L
    scales = torch.rand(B, T, H, L, dtype=dtype) if family.startswith("loglinear") else None
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "level_scales": scales}


def operator(family: str) -> Callable:
    """The public function, callable with the same dict of arguments as the reference forms."""
    function = getattr(ops, family)

    def call(*, beta: Tensor | None = None, level_scales: Tensor | None = None, **arguments):
        given = {"beta": beta, "level_scales": level_scales}
        return function(**arguments, **{name: x for name, x in given.items() if x is not None})

    return call


def leaves(arguments: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Turn gradients on; the tensors that are there, by name."""
    return {name: x.requires_grad_() for name, x in arguments.items() if x is not None}


def part(arguments: dict[str, Tensor | None], start: int, stop: int) -> dict[str, Tensor | None]:
    return {name: None if x is None else x[:, start:stop] for name, x in arguments.items()}


def relative_error(x: Tensor, reference: Tensor) -> float:
    """``rms(x - ref) / rms(ref)``; the plain rms of ``x`` where the reference is 0. NaN stays NaN."""
    x, reference = x.detach().double(), reference.detach().double()
    size = reference.norm()
    return float((x - reference).norm() / (size if size > 0 else 1.0))


def assert_close(x: Tensor, reference: Tensor, bound: float, what: str) -> None:
    assert x.shape == reference.shape, f"{what}: shape {list(x.shape)}, expected {list(reference.shape)}"
    error = relative_error(x, reference)
    assert error <= bound, f"{what}: relative error {error:.2e} > {bound:.0e}"


def assert_same_with_gradients(
    o: Tensor, reference: Tensor, tensors: dict[str, Tensor], bound: float, reference_tensors=None
) -> None:
    """Outputs and the gradients of a random projection with respect to every tensor."""
    assert_close(o, reference, bound, "output")
    weight = torch.randn_like(reference)
    expected = torch.autograd.grad(
        reference, list((reference_tensors or tensors).values()), weight, materialize_grads=True
    )
    got = torch.autograd.grad(o, list(tensors.values()), weight.to(o.dtype), materialize_grads=True)
    for name, a, b in zip(tensors, got, expected, strict=True):
        assert_close(a, b, bound, f"gradient of {name}")
