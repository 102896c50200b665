"""The cost formulas against a FLOP counter: projections exactly, operators within a factor that is stated.

The counter sees products only, and what a program does rather than what it needs: whole squares where the
formula counts half of them, the padding of the last chunk, and products that are there for simplicity.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from src import ops
from src.layers import Linear
from src.mixers.gated_deltanet import GatedDeltaNet
from src.mixers.loglinear_gdn import LogLinearGatedDeltaNet
from src.mixers.loglinear_mamba2 import LogLinearMamba2
from src.mixers.mamba2 import Mamba2
from src.mixers.softmax import SoftmaxAttention
from src.ops import costs

G, H, K, V, L = 2, 4, 32, 64, 12


def count(call, *tensors: Tensor) -> float:
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        call(*tensors)
    return counter.get_total_flops() / tensors[0].shape[1]


def inputs(seq_len: int) -> dict[str, Tensor]:
    shapes = {"q": (G, K), "k": (G, K), "v": (H, V), "g": (H,), "beta": (H,), "level_scales": (H, L)}
    tensors = {name: torch.rand(1, seq_len, *shape) for name, shape in shapes.items()}
    return tensors | {"g": -tensors["g"], "k": torch.nn.functional.normalize(tensors["k"], dim=-1)}


def test_softmax_is_half_of_the_counted_square() -> None:
    q, k, v = torch.randn(1, 96, H, K), torch.randn(1, 96, H, K), torch.randn(1, 96, H, V)
    assert count(ops.softmax_attention, q, k, v) == 2 * costs.softmax_attention(96, H, K, V)


def test_short_convolution_is_that_of_a_convolution() -> None:
    """Ours adds shifted inputs, element by element, which no counter sees; `conv1d` is the same arithmetic."""
    x, weight = torch.randn(1, 96 + 3, 48), torch.randn(48, 1, 4)
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.conv1d(x.mT, weight, groups=48)
    assert counter.get_total_flops() == 96 * costs.short_convolution(48, 4)


@pytest.mark.parametrize(
    ("operator", "names", "formula", "low", "high"),
    [
        (ops.ssd, "q k v g", costs.ssd, 1.0, 2.0),
        (ops.loglinear_ssd, "q k v g level_scales", costs.loglinear_ssd, 1.0, 2.0),
        (ops.gated_delta_rule, "q k v g beta", costs.gated_delta_rule, 1.0, 2.0),
        (
            ops.loglinear_gated_delta_rule,
            "q k v g beta level_scales",
            costs.loglinear_gated_delta_rule,
            1.0,
            2.0,
        ),
    ],
)
@pytest.mark.parametrize("seq_len", [64, 512, 2048])
def test_recurrences_within_a_factor(operator, names, formula, low, high, seq_len: int) -> None:
    tensors = inputs(seq_len)
    ratio = count(operator, *(tensors[name] for name in names.split())) / formula(seq_len, G, H, K, V)
    print(f"{operator.__name__} at {seq_len}: {ratio:.2f}")
    assert low <= ratio <= high


@pytest.mark.parametrize(
    "mixer_class", [SoftmaxAttention, Mamba2, GatedDeltaNet, LogLinearMamba2, LogLinearGatedDeltaNet]
)
def test_projections_are_exact(mixer_class) -> None:
    """Every linear layer of the mixer, counted alone, is what the mixer adds to its operator's cost."""
    mixer = mixer_class(mixer_class.Config(), d_model=64, layer_idx=0, n_layers=1, max_seq_len=128)
    linears = {name: module for name, module in mixer.named_modules() if isinstance(module, Linear)}
    with FlopCounterMode(display=False, depth=4) as counter, torch.no_grad():
        mixer(torch.randn(1, 128, 64))
    counts = counter.get_flop_counts()
    counted = sum(
        sum(counts[key].values())
        for name in linears
        for key in counts
        if key.endswith(f"{mixer_class.__name__}.{name}")
    )
    expected = sum(linear.flops_per_token() for linear in linears.values())
    assert counted == 128 * expected
    convolution = mixer.conv.flops_per_token() if hasattr(mixer, "conv") else 0
    if mixer_class is SoftmaxAttention:
        operator = costs.softmax_attention(128, mixer.n_heads, mixer.head_dim, mixer.head_dim)
    else:
        loglinear = "loglinear_" if hasattr(mixer, "level_scales") else ""
        base = "ssd" if isinstance(mixer, Mamba2) else "gated_delta_rule"
        operator = getattr(costs, loglinear + base)(128, *mixer._sizes())
    assert math.isclose(mixer.flops_per_token(128), expected + convolution + operator)


def test_growth_with_length() -> None:
    """Softmax grows linearly, log-linear by a level at every doubling, linear not at all."""
    sizes = (1, 1, 32, 32)
    for T in (1024, 16384):
        assert costs.softmax_attention(2 * T, 1, 32, 32) == 2 * costs.softmax_attention(T, 1, 32, 32)
        assert costs.ssd(2 * T, *sizes) == costs.ssd(T, *sizes)
        # Half a level more is live on average: half a product for reading (and two for the transition).
        grown = costs.loglinear_ssd(2 * T, *sizes) - costs.loglinear_ssd(T, *sizes)
        assert math.isclose(grown, 0.5 * 2 * 32 * 32)
        grown = costs.loglinear_gated_delta_rule(2 * T, *sizes) - costs.loglinear_gated_delta_rule(T, *sizes)
        assert math.isclose(grown, 0.5 * 6 * 32 * 32)


def test_packed_attention_is_counted_as_one_document() -> None:
    costs.register_counter_formulas()
    q, k, v = (torch.randn(1, 40, 4, 16) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        ops.softmax_attention(q, k, v, cu_seqlens=torch.tensor([0, 10, 40]))
    assert counter.get_total_flops() == 2 * 40 * costs.softmax_attention(40, 4, 16, 16)
