"""Short convolution against ``torch.nn.functional.conv1d``, document by document."""

import pytest
import torch
import torch.nn.functional as F

from src.ops import short_convolution
from tests.ops.helpers import assert_close, assert_same_with_gradients


def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    D, W = weight.shape
    y = F.conv1d(F.pad(x.mT, (W - 1, 0)), weight[:, None], bias, groups=D)
    return y.mT


def arguments(T: int, B: int = 2, W: int = 4, bias: bool = True) -> dict[str, torch.Tensor]:
    tensors = {"x": torch.randn(B, T, 6), "weight": torch.randn(6, W)} | ({"bias": torch.randn(6)} if bias else {})
    return {name: x.double().requires_grad_() for name, x in tensors.items()}


@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("T", [1, 2, 3, 4, 65])
def test_is_a_causal_depthwise_convolution(T: int, W: int, seed: int) -> None:
    given = arguments(T, W=W, bias=W > 1)
    y, _ = short_convolution(**given)
    assert_same_with_gradients(y, plain(given["x"], given["weight"], given.get("bias")), given, 1e-12)


def test_packed_documents_and_states(seed: int) -> None:
    given = arguments(40, B=1)
    x, rest = given["x"], {name: t for name, t in given.items() if name != "x"}
    first, second = torch.tensor([0, 0, 2, 3, 20]), torch.tensor([0, 7, 8, 8, 20])
    y1, state = short_convolution(x[:, :20], **rest, cu_seqlens=first, return_state=True)
    y2, state = short_convolution(x[:, 20:], **rest, cu_seqlens=second, initial_state=state, return_state=True)
    expected = [[], []]
    for n in range(4):
        a, b = x[:, first[n] : first[n + 1]], x[:, 20 + second[n] : 20 + second[n + 1]]
        y = plain(torch.cat([a, b], 1), given["weight"], given["bias"])
        expected[0].append(y[:, : a.shape[1]])
        expected[1].append(y[:, a.shape[1] :])
    expected = torch.cat([torch.cat(half, 1) for half in expected], 1)
    assert_same_with_gradients(torch.cat([y1, y2], 1), expected, given, 1e-12)
    assert state.positions.tolist() == [7, 3, 1, 29]


def test_continues_token_by_token(seed: int) -> None:
    given = arguments(9)
    whole, _ = short_convolution(**given)
    state, pieces = None, []
    for t in range(9):
        y, state = short_convolution(
            given["x"][:, t : t + 1], given["weight"], given["bias"], initial_state=state, return_state=True
        )
        pieces.append(y)
    assert_same_with_gradients(torch.cat(pieces, 1), whole, given, 1e-12)
    assert state.num_bytes == state.capacity_bytes == 2 * 3 * 6 * 8


def test_sums_in_fp32(seed: int) -> None:
    exact = arguments(50)
    rounded = {name: x.detach().bfloat16() for name, x in exact.items()}
    y, _ = short_convolution(rounded["x"], exact["weight"].float(), exact["bias"].float())
    expected = plain(rounded["x"].double(), exact["weight"], exact["bias"])
    assert y.dtype == torch.bfloat16
    assert_close(y, expected, 2**-8, "output")


def test_a_document_cannot_reach_another(seed: int) -> None:
    given = arguments(30, B=1)
    x = given["x"].detach().clone()
    x[:, 10:20] = torch.nan
    y, _ = short_convolution(x, given["weight"], cu_seqlens=torch.tensor([0, 10, 20, 30]))
    assert y[:, :10].isfinite().all()
    assert y[:, 20:].isfinite().all()


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"weight must have shape \[D=6, W\], got \[5, 4\]"):
        short_convolution(torch.zeros(1, 3, 6), torch.zeros(5, 4))
