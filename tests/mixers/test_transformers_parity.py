"""Our Mamba-2 and Gated DeltaNet against `transformers`' pure-PyTorch modules: the same weights, fp32.

`transformers` is in the `dev` extra; without it these tests fail rather than skip.
"""

import pytest
import torch
from torch import Tensor, nn
from transformers import Mamba2Config, Qwen3NextConfig
from transformers.cache_utils import DynamicCache
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from src.layers import init_decay
from src.mixers import Mixer
from src.mixers.gated_deltanet import GatedDeltaNet
from src.mixers.mamba2 import Mamba2

D_MODEL = 64
TOLERANCE = 2e-5
"""Largest difference over the largest value. Worst of 40 seeds, each side against fp64: Mamba-2 2e-6, Gated
DeltaNet 4e-6."""
DECAY_TOLERANCE = 2e-4
"""For the gradients of A_log and dt_bias: the norm after the recurrence hides most of what a decay does, so
they are small differences of large sums. Against fp64, ours and theirs: 2e-5."""

pytestmark = pytest.mark.usefixtures("seed")


def randomise(module: nn.Module) -> None:
    """Away from initial values that hide mistakes, such as D = 1 and norm weights of 1.

    Decays are slow, as trained ones are: Qwen3-Next's initial ones (exp(-10) a token) would leave nothing of
    the memory to compare, and of its gradients only rounding.
    """
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    init_decay(module.A_log, module.dt_bias, 1e-3, 0.1, 1e-4)


def mamba2_pair(n_groups: int) -> tuple[nn.Module, Mixer, object]:
    config = Mamba2Config(
        hidden_size=D_MODEL,
        num_heads=8,
        head_dim=16,
        state_size=32,
        n_groups=n_groups,
        expand=2,
        conv_kernel=4,
        chunk_size=64,
        num_hidden_layers=1,
        vocab_size=16,
    )
    theirs = Mamba2Mixer(config, layer_idx=0)
    options = Mamba2.Config(name="mamba2", head_dim=16, d_state=32, n_groups=n_groups)
    ours = Mamba2(options, d_model=D_MODEL, layer_idx=0, n_layers=1, max_seq_len=256)
    randomise(theirs)
    ours.load_state_dict(mamba2_weights(theirs.state_dict()))
    return theirs, ours, config


def mamba2_weights(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {name.replace("conv1d.", "conv."): value for name, value in theirs.items()}
    return renamed | {"conv.weight": renamed["conv.weight"].squeeze(1)}


def gated_deltanet_pair(n_v_heads: int) -> tuple[nn.Module, Mixer, object]:
    config = Qwen3NextConfig(
        hidden_size=D_MODEL,
        linear_num_key_heads=2,
        linear_num_value_heads=n_v_heads,
        linear_key_head_dim=32,
        linear_value_head_dim=48,
        linear_conv_kernel_dim=4,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        vocab_size=16,
        rms_norm_eps=1e-6,
    )
    theirs = Qwen3NextGatedDeltaNet(config, layer_idx=0)
    options = GatedDeltaNet.Config(
        name="gated_deltanet", n_heads=2, head_dim=32, n_v_heads=n_v_heads, expand_v=1.5, norm_eps=1e-6
    )
    ours = GatedDeltaNet(options, d_model=D_MODEL, layer_idx=0, n_layers=1, max_seq_len=256)
    randomise(theirs)
    ours.load_state_dict(gated_deltanet_weights(theirs.state_dict(), 2, 32, n_v_heads, 48))
    return theirs, ours, config


def gated_deltanet_weights(
    theirs: dict[str, Tensor], n_heads: int, K: int, n_v_heads: int, V: int
) -> dict[str, Tensor]:
    """Theirs has, for each key head, its q, k and then the v and z (b and a) of the value heads it serves."""
    served = n_v_heads // n_heads
    qkvz = theirs["in_proj_qkvz.weight"].unflatten(0, (n_heads, -1))
    parts = [*qkvz.split([K, K, served * V, served * V], dim=1)]
    parts += theirs["in_proj_ba.weight"].unflatten(0, (n_heads, -1)).split([served, served], dim=1)
    return {
        "in_proj.weight": torch.cat([part.flatten(0, 1) for part in parts]),
        "conv.weight": theirs["conv1d.weight"].squeeze(1),
        "dt_bias": theirs["dt_bias"],
        "A_log": theirs["A_log"],
        "norm.weight": theirs["norm.weight"],
        "out_proj.weight": theirs["out_proj.weight"],
    }


PAIRS = {
    "mamba2": lambda: mamba2_pair(n_groups=1),
    "mamba2-grouped": lambda: mamba2_pair(n_groups=2),
    "gated_deltanet": lambda: gated_deltanet_pair(n_v_heads=2),
    "gated_deltanet-grouped": lambda: gated_deltanet_pair(n_v_heads=4),
}


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """By our names: a gradient maps as the weights do, since the map is a permutation of rows."""
    theirs = {name: parameter.grad for name, parameter in module.named_parameters()}
    if isinstance(module, Mamba2Mixer):
        return mamba2_weights(theirs)
    if isinstance(module, Qwen3NextGatedDeltaNet):
        sizes = (module.num_k_heads, module.head_k_dim, module.num_v_heads, module.head_v_dim)
        return gated_deltanet_weights(theirs, *sizes)
    return theirs


def assert_near(name: str, ours: Tensor, theirs: Tensor) -> None:
    # A gradient may be zero in both: the decay's, of a single token.
    error = ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12)).item()
    print(f"{name}: {error:.1e}")
    assert error < (DECAY_TOLERANCE if name in ("A_log", "dt_bias") else TOLERANCE), name


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("seq_len", [1, 64, 150])
def test_outputs_and_gradients(pair: str, seq_len: int) -> None:
    theirs, ours, _ = PAIRS[pair]()
    x = torch.randn(2, seq_len, D_MODEL, requires_grad=True)
    weight = torch.randn(2, seq_len, D_MODEL)
    results = []
    for module in (ours, theirs):
        x.grad = None
        y = module(x)
        (y * weight).sum().backward()
        results.append({"output": y.detach(), "x": x.grad} | gradients(module))
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        assert_near(name, value, results[1][name])


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("prompt", [1, 3, 70])
def test_prefill_and_decode(pair: str, prompt: int) -> None:
    theirs, ours, config = PAIRS[pair]()
    x = torch.randn(2, prompt + 10, D_MODEL)
    cache = DynamicCache(config=config)
    with torch.no_grad():
        y, state = ours.step(x[:, :prompt])
        mine, other = [y], [theirs(x[:, :prompt], cache=cache)]
        for token in x[:, prompt:].split(1, dim=1):
            y, state = ours.step(token, state)
            mine.append(y)
            other.append(theirs(token, cache=cache))
    assert_near("decode", torch.cat(mine, dim=1), torch.cat(other, dim=1))
    memory = cache.layers[0].recurrent_states[0]
    if isinstance(ours, Mamba2):
        memory = memory.mT  # theirs is [head_dim, d_state]
    assert_near("memory", state["memory"].memory, memory)
