"""What rounding to bf16 does to the kernels, without a GPU: the interpreter, with its bf16 arithmetic put right.

Triton's interpreter multiplies the bits of bf16 numbers as if they were integers, and cuts instead of rounding. Here
products take the values, and fp32 operands lose what tf32 loses. What a compiler makes of the kernels is for
``tools.errors`` on a GPU, whose cases these are; where both were run, they agreed within a fifth.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

from src.ops import linear
from tools.errors_cases import BOUNDS, Case, errors

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="interpreted kernels; a GPU has its own (tools.errors)"
)

BUILDER = interpreter.InterpreterBuilder


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)


def values(operand: interpreter.TensorHandle, precision: object) -> np.ndarray:
    """Of a product's operand."""
    if operand.dtype.scalar == tl.bfloat16:
        return (operand.data.astype(np.uint32) << 16).view(np.float32)
    if "TF32x3" in str(precision):
        return operand.data
    return ((bits(operand.data) + 0x1000) & np.uint32(0xFFFFE000)).view(np.float32)


def product(self, a, b, d, precision, *_) -> interpreter.TensorHandle:
    made = np.matmul(values(a, precision), values(b, precision), dtype=np.float32)
    return interpreter.TensorHandle(made + d.data, d.dtype.scalar)


def rounding(convert: Callable) -> Callable:
    """To the nearest, ties to even."""

    def changed(x, source, target, mode):
        if source == tl.float32 and target == tl.bfloat16:
            number = bits(x)
            return ((number + 0x7FFF + ((number >> 16) & 1)) >> 16).astype(np.uint16)
        return convert(x, source, target, mode)

    return changed


@pytest.fixture
def bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BUILDER, "create_dot", product)
    monkeypatch.setattr(interpreter, "_convert_float", rounding(interpreter._convert_float))
    monkeypatch.setattr(linear, "_without_kernels", lambda v: "")


@pytest.mark.parametrize(
    ("operator", "kind", "K", "T"),
    [
        ("ssd", "packed", 16, 333),
        ("loglinear_ssd", "rows", 32, 333),
        ("gated_delta_rule", "rows", 64, 333),
        ("gated_delta_rule", "repeated_keys", 64, 200),
        ("gated_delta_rule", "long_keys", 16, 150),
        ("loglinear_gated_delta_rule", "repeated_keys", 64, 260),
        ("loglinear_gated_delta_rule", "strong_decay", 16, 200),
        pytest.param("loglinear_gated_delta_rule", "packed", 16, 230, marks=pytest.mark.slow),
        pytest.param("loglinear_gated_delta_rule", "continued", 16, 200, marks=pytest.mark.slow),
        pytest.param("loglinear_gated_delta_rule", "repeated_keys", 128, 400, marks=pytest.mark.slow),
        pytest.param("loglinear_gated_delta_rule", "rows", 128, 700, marks=pytest.mark.slow),
    ],
)
def test_rounding_stays_in_bounds(operator: str, kind: str, K: int, T: int, seed: int, bf16: None) -> None:
    """Two draws together: of some dozens, one has a dg of so few large terms that it alone comes near the bound."""
    found = errors(Case(operator, "bfloat16", K, K, kind, T), seed, device="cpu", draws=2)
    assert max(found.values()) < BOUNDS["bfloat16"], found


def test_numbers_are_rounded_as_on_a_gpu(bf16: None, seed: int) -> None:
    """The patch itself, on conversions both ways and ties."""
    x = torch.randn(1000)
    x[:3] = torch.tensor([1 + 2**-9 + 2**-8, 1 + 2**-9, -(1 + 2**-9)])
    there = interpreter._convert_float(x.numpy(), tl.float32, tl.bfloat16, None)
    assert np.array_equal((there.astype(np.uint32) << 16).view(np.float32), x.bfloat16().float().numpy())
