"""What holds for particular mixers: their relations, initial values, precision, sizes and refusals."""

import pytest
import torch
import torch.nn.functional as F

from src import ops
from src.errors import UserError
from src.layers import GatedRMSNorm, RMSNorm, apply_rope, l2_normalise, token_positions
from src.mixers import Mixer
from src.mixers.gated_deltanet import GatedDeltaNet
from src.mixers.hybrid import Hybrid
from src.mixers.loglinear_gdn import LogLinearGatedDeltaNet
from src.mixers.loglinear_mamba2 import LogLinearMamba2
from src.mixers.mamba2 import Mamba2
from src.mixers.softmax import SoftmaxAttention
from src.model import LanguageModel, ModelConfig
from src.registry import MIXERS

pytestmark = pytest.mark.usefixtures("seed")

LINEAR = [Mamba2, GatedDeltaNet]
RECURRENT = [Mamba2, GatedDeltaNet, LogLinearMamba2, LogLinearGatedDeltaNet]


def make(cls: type[Mixer], d_model: int = 64, max_seq_len: int = 256, n_layers: int = 2, **options) -> Mixer:
    return cls(cls.Config(**options), d_model=d_model, layer_idx=0, n_layers=n_layers, max_seq_len=max_seq_len)


@pytest.mark.parametrize(("linear", "loglinear"), [(Mamba2, LogLinearMamba2), (GatedDeltaNet, LogLinearGatedDeltaNet)])
def test_loglinear_with_equal_scales_is_linear(linear, loglinear) -> None:
    """The same weights, and all scales 1."""
    base, ours = make(linear).double(), make(loglinear).double()
    missing, unexpected = ours.load_state_dict(base.state_dict(), strict=False)
    assert all(name.startswith("level_scales.") for name in missing)
    assert not unexpected
    ours.level_scales.forward = lambda x: x.new_ones(*x.shape[:2], *ours.level_scales.L.shape)
    x = torch.randn(2, 200, 64, dtype=torch.float64)
    assert (ours(x) - base(x)).abs().max() < 1e-10 * base(x).abs().max()


def test_published_models_leave_the_query_undivided() -> None:
    """Scales of 1 / sqrt(K) are then Gated DeltaNet."""
    base, ours = make(GatedDeltaNet).double(), make(LogLinearGatedDeltaNet, query_scale=1.0).double()
    ours.load_state_dict(base.state_dict(), strict=False)
    ours.level_scales.forward = lambda x: x.new_full((*x.shape[:2], *ours.level_scales.L.shape), base.head_dim**-0.5)
    x = torch.randn(2, 200, 64, dtype=torch.float64)
    assert (ours(x) - base(x)).abs().max() < 1e-10 * base(x).abs().max()


@pytest.mark.parametrize("loglinear", [LogLinearMamba2, LogLinearGatedDeltaNet])
def test_scales_beyond_the_trained_levels(loglinear) -> None:
    """By policy; the trained levels have the same scales with each."""
    x = torch.randn(2, 5, 64)
    mixers = {beyond: make(loglinear, max_seq_len=32, beyond=beyond) for beyond in ("last", "mean", "decay")}
    for mixer in mixers.values():
        mixer.load_state_dict(mixers["last"].state_dict())
    scales = {beyond: mixer.level_scales(x) for beyond, mixer in mixers.items()}
    trained = scales["last"]
    assert trained.shape[-1] == 6
    for found in scales.values():
        assert torch.equal(found[..., :6], trained)
    torch.testing.assert_close(scales["mean"][..., 6:], trained.mean(-1, keepdim=True))
    halves = torch.stack([trained[..., 5] / 2**j for j in range(1, 9)], -1)
    torch.testing.assert_close(scales["decay"][..., 6:], halves)


@pytest.mark.parametrize("loglinear", [LogLinearMamba2, LogLinearGatedDeltaNet])
def test_levels_beyond_the_scales_are_read(loglinear) -> None:
    """At four times the trained length, far tokens still matter: the last scale serves them."""
    mixer = make(loglinear, max_seq_len=32)
    assert mixer.level_scales.L.shape[1] == ops.num_levels(32) == 6
    torch.nn.init.constant_(mixer.A_log, -5)  # heads that draw a fast decay have forgotten them by then
    x = torch.randn(1, 128, 64, requires_grad=True)
    mixer(x)[:, -1].square().sum().backward()
    assert (x.grad[0, :8].abs().amax(-1) > 0).all()


@pytest.mark.parametrize("cls", RECURRENT)
def test_initial_decay(cls) -> None:
    mixer = make(cls, d_model=512, dt_min=0.002, dt_max=0.05)
    A, dt = mixer.A_log.exp(), F.softplus(mixer.dt_bias)
    assert A.min() >= 1
    assert A.max() <= 16
    assert dt.min() >= 0.002 * (1 - 1e-4)
    assert dt.max() <= 0.05 * (1 + 1e-4)
    assert make(cls, dt_min=1e-6, dt_max=1e-5).dt_bias.exp().allclose(torch.tensor(1e-4), rtol=1e-3)
    for parameter in (mixer.A_log, mixer.dt_bias):
        assert parameter.no_weight_decay
    if hasattr(mixer, "level_scales"):
        assert mixer.level_scales.L.no_weight_decay
        assert (mixer.level_scales.L == 1).all()
        assert mixer.level_scales.proj.bias is None


@pytest.mark.parametrize(
    ("cls", "operator"),
    [
        (Mamba2, "ssd"),
        (GatedDeltaNet, "gated_delta_rule"),
        (LogLinearMamba2, "loglinear_ssd"),
        (LogLinearGatedDeltaNet, "loglinear_gated_delta_rule"),
    ],
)
def test_decay_is_fp32_under_bf16_autocast(cls, operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = getattr(ops, operator)

    def spy(q, k, v, *rest, **options):
        seen.append((q.dtype, k.dtype, v.dtype, [x.dtype for x in rest]))
        return original(q, k, v, *rest, **options)

    monkeypatch.setattr(ops, operator, spy)
    mixer = make(cls)
    with torch.autocast("cpu", torch.bfloat16):
        y = mixer(torch.randn(1, 70, 64))
    (q, k, v, rest) = seen[0]
    assert q == k == v == torch.bfloat16
    assert all(dtype == torch.float32 for dtype in rest)  # g, and beta and the level scales where there are any
    assert y.dtype == torch.bfloat16
    assert mixer.A_log.dtype == mixer.dt_bias.dtype == torch.float32


def test_norms_are_fp32_inside() -> None:
    x = torch.randn(4, 64).bfloat16() * 100
    z = torch.randn(4, 64).bfloat16()
    for norm, args in [
        (RMSNorm(64), ()),
        (GatedRMSNorm(64, gate_first=True, group_size=32), (z,)),
        (GatedRMSNorm(64, gate_first=False), (z,)),
    ]:
        exact = norm(x.float(), *(a.float() for a in args))
        y = norm(x, *args)
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, exact.bfloat16())


def test_l2_normalise_at_zero() -> None:
    x = torch.zeros(3, 16, requires_grad=True)
    l2_normalise(x).sum().backward()
    assert x.grad.isfinite().all()
    unit = l2_normalise(torch.randn(5, 16, dtype=torch.float64))
    assert torch.allclose(unit.norm(dim=-1), torch.ones(5, dtype=torch.float64), atol=1e-5)


def test_gated_deltanet_survives_zero_inputs() -> None:
    mixer = make(LogLinearGatedDeltaNet)
    x = torch.zeros(1, 70, 64, requires_grad=True)
    mixer(x).sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in mixer.parameters())


def test_rope_sees_distances_only() -> None:
    q, k = torch.randn(1, 1, 2, 32, dtype=torch.float64), torch.randn(1, 1, 2, 32, dtype=torch.float64)

    def score(t: int, s: int) -> torch.Tensor:
        return (apply_rope(q, torch.tensor([[t]]), 1e4) * apply_rope(k, torch.tensor([[s]]), 1e4)).sum(-1)

    assert torch.allclose(score(7, 3), score(1007, 1003))
    assert not torch.allclose(score(7, 3), score(8, 3))
    assert torch.equal(apply_rope(q, torch.tensor([[0]]), 1e4), q)


def test_token_positions() -> None:
    cu_seqlens = torch.tensor([0, 0, 2, 2, 5], dtype=torch.int32)
    device = torch.device("cpu")
    assert token_positions(1, 5, device, cu_seqlens).tolist() == [[0, 1, 0, 1, 2]]
    start = torch.tensor([9, 3, 9, 7])
    assert token_positions(1, 5, device, cu_seqlens, start).tolist() == [[3, 4, 7, 8, 9]]
    assert token_positions(2, 3, device, None, torch.tensor([0, 5])).tolist() == [[0, 1, 2], [5, 6, 7]]


def test_grouped_query_attention_is_attention_with_repeated_heads() -> None:
    grouped = make(SoftmaxAttention, head_dim=16, n_kv_heads=2)
    full = make(SoftmaxAttention, head_dim=16)
    heads = grouped.in_proj.weight.unflatten(0, (-1, 16))  # 4 of q, 2 of k, 2 of v
    q, k, v = heads.split([4, 2, 2])
    full.in_proj.weight.data = torch.cat([q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)]).flatten(0, 1)
    full.out_proj.weight.data = grouped.out_proj.weight.data
    x = torch.randn(2, 20, 64)
    assert torch.allclose(grouped(x), full(x), atol=1e-6)
    assert grouped.state_bytes(10) == full.state_bytes(10) // 2


def test_options_reach_the_sizes() -> None:
    mamba = make(Mamba2, head_dim=32, d_state=16, n_groups=2, expand=3, conv_width=3, conv_bias=False)
    assert (mamba.n_heads, mamba.d_inner) == (6, 192)
    assert mamba.conv.weight.shape == (192 + 2 * 2 * 16, 3)
    assert mamba.conv.bias is None
    delta = make(GatedDeltaNet, n_heads=2, head_dim=16, n_v_heads=4, expand_v=3)
    assert (delta.key_dim, delta.value_dim) == (32, 4 * 48)
    for mixer in (mamba, delta, make(SoftmaxAttention, n_heads=2, head_dim=48)):
        assert mixer(torch.randn(1, 9, 64)).shape == (1, 9, 64)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (SoftmaxAttention, {"n_heads": 3}, r"mixer.n_heads=3: .* allowed: 1, 2, 4"),
        (SoftmaxAttention, {"head_dim": 24}, "mixer.head_dim=24: must be a multiple of 16"),
        (SoftmaxAttention, {"head_dim": 48}, "mixer.head_dim=48: does not divide a width of 64"),
        (SoftmaxAttention, {"head_dim": 16, "n_kv_heads": 3}, "mixer.n_kv_heads=3: must divide n_heads"),
        (Mamba2, {"d_state": 20}, "mixer.d_state=20: must be a multiple of 16"),
        (Mamba2, {"n_heads": 2, "head_dim": 16}, "must be expand · d_model = 128"),
        (Mamba2, {"dt_min": 1.0}, "mixer.dt_min=1.0"),
        (Mamba2, {"conv_width": 1}, "mixer.conv_width=1"),
        (GatedDeltaNet, {"head_dim": 16, "expand_v": 1.3}, "expand_v=1.3"),
        (GatedDeltaNet, {"n_heads": 1, "head_dim": 272}, "mixer.head_dim=272"),
        (GatedDeltaNet, {"n_heads": 3, "head_dim": 16, "n_v_heads": 4}, "mixer.n_heads=3: must divide n_v_heads"),
        (Mamba2, {"d_state": 0}, "mixer.d_state=0"),
        (GatedDeltaNet, {"n_v_heads": 0}, "mixer.n_v_heads=0"),
        (SoftmaxAttention, {"n_kv_heads": 0}, "mixer.n_kv_heads=0"),
        (Hybrid, {"pattern": []}, "at least one"),
        (Hybrid, {"pattern": ["hybrid"]}, "cannot contain a hybrid"),
        (Hybrid, {"pattern": ["mamba2"] * 3}, "never be used"),
        (Hybrid, {"pattern": ["softmx"]}, "did you mean 'softmax'"),
        (Hybrid, {"pattern": ["softmax"], "options": {"mamba2": {}}}, "mixer.options.mamba2"),
        (Hybrid, {"pattern": ["softmax"], "options": {"softmax": {"n_head": 2}}}, "did you mean"),
        (Hybrid, {"pattern": ["softmax"], "options": {"softmax": {"n_heads": 3}}}, "mixer.options.softmax"),
    ],
)
def test_impossible_options_are_one_line(cls, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make(cls, **options)
    assert "\n" not in str(caught.value)


def test_hybrid_builds_its_pattern() -> None:
    options = Hybrid.Config(name="hybrid", pattern=["mamba2", "mamba2", "softmax"], options={"mamba2": {"d_state": 16}})
    model = LanguageModel(ModelConfig(d_model=64, n_layers=5), options, 32, 64)
    layers = [block.mixer.layer for block in model.blocks]
    names = [MIXERS.name_of(type(layer)) for layer in layers]
    assert names == ["mamba2", "mamba2", "softmax", "mamba2", "mamba2"]
    assert [layer.layer_idx for layer in layers] == [0, 1, 2, 3, 4]
    assert layers[0].d_state == 16
    assert layers[0].config.name == "mamba2"


@pytest.mark.parametrize(
    ("cls", "options", "n_layers", "millions"),
    [
        (SoftmaxAttention, {"n_heads": 16, "rope_theta": 500_000.0}, 21, 693),
        (SoftmaxAttention, {"n_heads": 16, "rope_theta": 500_000.0}, 24, 778),
        (Mamba2, {"head_dim": 64, "d_state": 128}, 21, 802),
        (LogLinearMamba2, {"head_dim": 64, "d_state": 128}, 21, 825),
        (GatedDeltaNet, {}, 21, 793),
        (LogLinearGatedDeltaNet, {}, 21, 796),
    ],
)
def test_parameters_of_the_paper_models(cls, options: dict, n_layers: int, millions: int) -> None:
    """Width 1536, vocabulary 32,000, SwiGLU of width 4096, context 16,384, untied embeddings."""
    name = cls.__module__.rpartition(".")[2]
    config = ModelConfig(d_model=1536, n_layers=n_layers, tie_embeddings=False)
    with torch.device("meta"):
        model = LanguageModel(config, cls.Config(name=name, **options), 32_000, 16_384)
    assert round(model.num_parameters() / 1e6) == millions
    if cls in (GatedDeltaNet, LogLinearGatedDeltaNet):
        mixer = model.blocks[0].mixer
        assert (mixer.n_heads, mixer.head_dim, mixer.v_head_dim) == (6, 192, 384)
