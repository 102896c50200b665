"""The language model around the mixers."""

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from src.errors import UserError
from src.layers import initialise
from src.mixers import Mixer
from src.model import LanguageModel, ModelConfig
from src.registry import MIXERS

pytestmark = pytest.mark.usefixtures("seed")


def build(name: str = "loglinear_gdn", vocab_size: int = 50, max_seq_len: int = 64, **config) -> LanguageModel:
    sizes = ModelConfig(**({"d_model": 32, "n_layers": 2} | config))
    return LanguageModel(sizes, MIXERS.get(name).Config(name=name), vocab_size, max_seq_len)


@pytest.mark.parametrize("name", MIXERS.names())
def test_meta_device_equals_plain(name: str) -> None:
    """Built empty and filled afterwards: the same numbers, by our function and by Lightning's loop."""
    torch.manual_seed(5)
    plain = build(name)
    flags = {key for key, p in plain.named_parameters() if getattr(p, "no_weight_decay", False)}
    for fill in (initialise, lightning_materialise):
        with torch.device("meta"):
            model = build(name)
        assert all(p.is_meta for p in model.parameters())
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.constant_(parameter, math.nan)
        torch.manual_seed(5)
        fill(model)
        for (key, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b), key
        assert {key for key, p in model.named_parameters() if getattr(p, "no_weight_decay", False)} == flags


def lightning_materialise(model: nn.Module) -> None:
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.reset_parameters()


def test_initialise_refuses_modules_without_reset() -> None:
    class Forgetful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

    with pytest.raises(TypeError, match=r"inner.*Forgetful.*reset_parameters"):
        initialise(nn.ModuleDict({"inner": Forgetful()}))


def test_initial_values() -> None:
    model = build("softmax", d_model=256, n_layers=8, init_std=0.03)
    assert model.embedding.weight.std().item() == pytest.approx(0.03, rel=0.05)
    for block in model.blocks:
        assert block.mixer.in_proj.weight.std().item() == pytest.approx(0.03, rel=0.05)
        assert block.mlp.up_proj.weight.std().item() == pytest.approx(0.03, rel=0.05)
        for residual in (block.mixer.out_proj, block.mlp.down_proj):
            assert residual.weight.std().item() == pytest.approx(0.03 / 4, rel=0.05)
    logits = model(torch.randint(50, (2, 30)))
    loss = F.cross_entropy(logits.flatten(0, 1), torch.randint(50, (60,)))
    assert loss.item() == pytest.approx(math.log(50), abs=0.3)


def test_tied_and_untied_heads() -> None:
    tied, untied = build(), build(tie_embeddings=False)
    assert untied.num_parameters() - tied.num_parameters() == 50 * 32
    assert tied.num_parameters(embedding=False) == untied.num_parameters(embedding=False)
    assert tied.num_parameters() == sum(p.numel() for p in tied.parameters())
    assert tied.num_parameters() - tied.num_parameters(embedding=False) == 50 * 32
    assert "lm_head.weight" in untied.state_dict()
    assert "lm_head.weight" not in tied.state_dict()
    assert tied.flops_per_token(64) == untied.flops_per_token(64)


def test_hidden_and_head_are_forward() -> None:
    model = build()
    ids = torch.randint(50, (2, 20))
    h = model.hidden(ids)
    assert h.shape == (2, 20, 32)
    assert torch.equal(model.head(h), model(ids))
    some = torch.tensor([3, 7])
    assert torch.allclose(model.head(h[:, some]), model(ids)[:, some], atol=1e-6)


def test_last_only() -> None:
    model = build()
    ids = torch.randint(50, (2, 20))
    full, _ = model.step(ids)
    last, _ = model.step(ids, last_only=True)
    assert last.shape == (2, 1, 50)
    assert torch.allclose(last, full[:, -1:], atol=1e-6)
    cu_seqlens = torch.tensor([0, 7, 20])
    full, _ = model.step(ids[:1], None, cu_seqlens)
    last, state = model.step(ids[:1], None, cu_seqlens, last_only=True)
    assert torch.allclose(last, full[:, [6, 19]], atol=1e-6)
    assert state.positions.tolist() == [7, 13]


def test_mlp_width_and_absence() -> None:
    assert build(d_model=1536 // 16).blocks[0].mlp.down_proj.in_features == 256
    assert build(mlp_ratio=0.01).blocks[0].mlp.down_proj.in_features == 16
    without = build(mlp_ratio=0.0)
    assert without.blocks[0].mlp is None
    assert without(torch.randint(50, (1, 5))).shape == (1, 5, 50)


@pytest.mark.parametrize("name", MIXERS.names())
def test_peak_state_is_the_largest_on_the_way(name: str) -> None:
    model, largest, sizes = build(name), 0, []
    for n in range(1, 1500):
        largest = max(largest, model.state_bytes(n))
        sizes.append((n, largest))
    for n, expected in [*random.sample(sizes, 40), *sizes[:3], *((2**i, sizes[2**i - 1][1]) for i in range(6, 11))]:
        assert model.peak_state_bytes(n) == expected, n


def test_model_sums_over_layers() -> None:
    model = build("hybrid")
    mixers = [block.mixer for block in model.blocks]
    assert all(isinstance(mixer, Mixer) for mixer in mixers)
    assert model.state_bytes(70) == sum(mixer.state_bytes(70) for mixer in mixers)
    parts = [block.mixer.flops_per_token(70) + 6 * 32 * 80 for block in model.blocks]
    assert model.flops_per_token(70) == pytest.approx(sum(parts) + 2 * 32 * 50)
    assert model.flops(9, 70, 4) == pytest.approx(9 * sum(parts) + 4 * 2 * 32 * 50)


@pytest.mark.parametrize(
    "options", [{"d_model": 24}, {"d_model": 0}, {"n_layers": 0}, {"mlp_ratio": -1.0}, {"max_seq_len": 0}]
)
def test_impossible_sizes(options: dict) -> None:
    (key,) = options
    with pytest.raises(UserError, match=rf"model\.{key}="):
        ModelConfig(**options)


def test_unknown_mixer() -> None:
    with pytest.raises(UserError, match="did you mean 'mamba2'"):
        LanguageModel(ModelConfig(), Mixer.Config(name="mamba3"), 50, 64)


@pytest.mark.parametrize("name", ["loglinear_gdn", "loglinear_mamba2"])
def test_far_longer_than_trained(name: str) -> None:
    """Four times the training length: the same as a model made for it whose further scales are the last one.

    Decay is slow and scales differ, so that what the far levels hold shows in the output.
    """
    short, long = build(name, max_seq_len=32), build(name, max_seq_len=128)
    with torch.no_grad():
        for block in short.blocks:
            torch.nn.init.constant_(block.mixer.A_log, -5)
            torch.nn.init.normal_(block.mixer.level_scales.proj.weight)
        weights = short.state_dict()
        H, L = short.blocks[0].mixer.level_scales.L.shape
        for key, x in weights.items():
            if "level_scales" in key:
                rows = x.unflatten(0, (H, L)) if key.endswith("weight") else x
                rows = torch.cat([rows, rows[:, -1:], rows[:, -1:]], 1)
                weights[key] = rows.flatten(0, 1) if key.endswith("weight") else rows
        long.load_state_dict(weights)
        ids = torch.randint(50, (8, 128))
        logits = short(ids)
        assert logits.isfinite().all()
        assert torch.allclose(logits, long(ids), atol=1e-5)
        for block in long.blocks:
            block.mixer.level_scales.L[:, L:] = -20  # other scales there: other outputs, but only where they are used
        changed = long(ids)
        assert torch.allclose(logits[:, :32], changed[:, :32], atol=1e-5)
        assert not torch.allclose(logits[:, 64:], changed[:, 64:], atol=1e-3)
