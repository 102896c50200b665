"""What every mixer must hold: runs over the registry and the example plugin, so a new mixer gets it for free.

For a plugin of your own outside the repository: `TEST_PLUGINS=path/to/file.py pytest tests/mixers`.
"""

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from src.mixers import Mixer
from src.model import LanguageModel, ModelConfig
from src.optim import parameter_groups
from src.registry import MIXERS, load_file

EXAMPLE = Path(__file__).parents[1] / "plugins" / "ema.py"
GIVEN = [Path(path) for path in os.environ.get("TEST_PLUGINS", "").split(",") if path]
PLUGINS = [*GIVEN, *([] if EXAMPLE.stem in {path.stem for path in GIVEN} else [EXAMPLE])]  # a copy of it takes its name
BUILT_IN = MIXERS.names()
NAMES = sorted({*BUILT_IN, *(path.stem for path in PLUGINS)})
LENGTHS = [0, 5, 0, 65, 1, 64]
"""Documents of the packed tests: empty ones first and inside, and both sides of a chunk's end."""
VOCABULARY = 40

pytestmark = pytest.mark.usefixtures("seed")
over_mixers = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module", autouse=True)
def plugin_files() -> Iterator[None]:
    for path in PLUGINS:
        load_file(path)
    yield
    for path in PLUGINS:  # other tests look at the registry as it is without them
        MIXERS._files.pop(path.stem)


def build(name: str, *, d_model: int = 32, n_layers: int = 2, max_seq_len: int = 256) -> LanguageModel:
    """A model in fp64 whose gates, scales and weights are far from their regular initial values."""
    options = MIXERS.get(name).Config(name=name)
    config = ModelConfig(d_model=d_model, n_layers=n_layers, mlp_ratio=1)
    model = LanguageModel(config, options, VOCABULARY, max_seq_len).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.1))
    return model


def mixer_of(name: str, layer: int = 0, **sizes: int) -> Mixer:
    return build(name, **sizes).blocks[layer].mixer


def packed() -> tuple[Tensor, list[slice]]:
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    return ends.int(), [slice(a, b) for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]


def ids(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape)


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1e-3)


@over_mixers
def test_causal(name: str) -> None:
    mixer, cut = mixer_of(name), 70
    x = torch.randn(2, 150, 32, dtype=torch.float64, requires_grad=True)
    y = mixer(x)
    later = torch.cat([x[:, :cut], torch.randn_like(x[:, cut:])], dim=1)
    assert_near(mixer(later)[:, :cut], y[:, :cut], 1e-12)
    y[:, :cut].square().sum().backward()
    assert (x.grad[:, cut:] == 0).all()
    assert (x.grad[:, :cut] != 0).any(-1).all()


@over_mixers
@pytest.mark.parametrize("layer", [0, 1])
def test_prefill_and_steps_equal_whole(name: str, layer: int) -> None:
    mixer = mixer_of(name, layer)
    x = torch.randn(2, 200, 32, dtype=torch.float64)
    whole = mixer(x)
    for n in (1, 63, 64, 65, 70, 127, 128, 129):
        y, state = mixer.step(x[:, :n])
        parts = [y]
        for piece in x[:, n:].split([1, 1, 9, 189 - n], dim=1):
            y, state = mixer.step(piece, state)
            parts.append(y)
        assert_near(torch.cat(parts, dim=1), whole)
        assert state.positions.tolist() == [200, 200]


@over_mixers
def test_single_steps_equal_whole(name: str) -> None:
    mixer = mixer_of(name)
    x = torch.randn(1, 132, 32, dtype=torch.float64)
    state, parts = None, []
    with torch.no_grad():
        for token in x.split(1, dim=1):
            y, state = mixer.step(token, state)
            parts.append(y)
        assert_near(torch.cat(parts, dim=1), mixer(x))


@over_mixers
def test_packed_equals_separate(name: str) -> None:
    model, (cu_seqlens, documents) = build(name), packed()
    tokens = ids(1, sum(LENGTHS))
    logits = model(tokens, cu_seqlens)
    for document in documents:
        if document.start < document.stop:
            assert_near(logits[:, document], model(tokens[:, document]))


@over_mixers
def test_packed_documents_do_not_touch(name: str) -> None:
    """Another document's tokens change neither outputs nor gradients, through the whole model."""
    model, (cu_seqlens, documents) = build(name), packed()
    tokens, weight = ids(1, sum(LENGTHS)), torch.randn(VOCABULARY, dtype=torch.float64)
    full = [d for d in documents if d.start < d.stop]
    for kept, changed in [(full[1], full[0]), (full[1], full[-1]), (full[2], full[1])]:
        outcomes = []
        for _ in range(2):
            model.zero_grad()
            x = model.embedding(tokens).detach().requires_grad_()
            h = x
            for block in model.blocks:
                h = block(h, cu_seqlens)
            out = model.head(model.norm(h))[:, kept]
            (out * weight).sum().backward()
            outside = torch.ones(tokens.shape[1], dtype=torch.bool)
            outside[kept] = False
            assert (x.grad[:, outside] == 0).all()
            gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            outcomes.append((out.detach(), torch.cat(gradients)))
            tokens = tokens.clone()
            tokens[:, changed] = (tokens[:, changed] + 1) % VOCABULARY
        for before, after in zip(*outcomes, strict=True):
            assert_near(after, before, 1e-11)


@over_mixers
def test_packed_state_continues(name: str) -> None:
    """Prompts packed in one row; then one token each as a batch, and several each as packed documents."""
    model, (cu_seqlens, documents) = build(name), packed()
    tokens, n = ids(1, sum(LENGTHS)), len(LENGTHS)
    logits, state = model.step(tokens, None, cu_seqlens, last_only=True)
    assert logits.shape == (1, n, VOCABULARY)
    assert state.positions.tolist() == LENGTHS
    one = ids(n, 1)
    batch, state = model.step(one, state)
    more = [ids(1, 3 + i % 2) for i in range(n)]
    ends = torch.tensor([0, *(m.shape[1] for m in more)]).cumsum(0)
    rest, state = model.step(torch.cat(more, dim=1), state, ends)
    for i, document in enumerate(documents):
        alone = model(torch.cat([tokens[:, document], one[i : i + 1], more[i]], dim=1))
        length = LENGTHS[i]
        if length:
            assert_near(logits[:, i], alone[:, length - 1])
        assert_near(batch[i], alone[0, length : length + 1])
        assert_near(rest[0, ends[i] : ends[i + 1]], alone[0, length + 1 :])


@over_mixers
def test_state_select_reset_clone(name: str) -> None:
    model = build(name)
    tokens, more = ids(3, 70), ids(3, 5)
    with torch.no_grad():
        _, state = model.step(tokens)
        expected, _ = model.step(more, state)
        chosen, _ = model.step(more[[2, 0, 2]], state.select([2, 0, 2]))
        assert_near(chosen, expected[[2, 0, 2]])
        fresh, reset = model.step(more, state.reset([1]))
        assert_near(fresh[[0, 2]], expected[[0, 2]])
        assert_near(fresh[1:2], model(more[1:2]))
        assert reset.positions.tolist() == [75, 5, 75]
        copy = state.clone()
        model.step(more, copy)
        assert_near(model.step(more, state)[0], expected, 0)
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        assert_near(model.step(more, torch.load(buffer))[0], expected, 0)


@over_mixers
def test_save_and_load_bit_equal(name: str) -> None:
    model, other = build(name), build(name)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    for (key, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), key
    tokens = ids(2, 70)
    assert torch.equal(model(tokens), other(tokens))


def check_compiled(name: str, backend: str, tolerance: float) -> None:
    """In place, as the trainer does it. Other document boundaries of the same number compile nothing anew, and from
    the second number of documents on no other number does."""
    torch._dynamo.reset()
    model, (cu_seqlens, _) = build(name), packed()
    names = list(model.state_dict())
    others = sum(LENGTHS) - cu_seqlens.flip(0)
    packings = [cu_seqlens, others]
    if backend != "inductor":  # a minute a mixer
        packings += [cu_seqlens[[0, 2, 4, -1]], cu_seqlens[[0, 3, 4, 5, -1]]]
    for layer, calls in [(0, [None]), (1, packings)]:  # a hybrid has another mixer in layer 1
        block = model.blocks[layer]
        eager = [run_block(block, boundaries) for boundaries in calls]
        block.compile(fullgraph=True, backend=backend)
        compiled = []
        for i, boundaries in enumerate(calls):
            with torch._dynamo.config.patch(error_on_recompile=i not in (0, 2)):
                compiled.append(run_block(block, boundaries))
        for expected, actual in zip(eager, compiled, strict=True):
            for a, b in zip(actual, expected, strict=True):
                assert_near(a, b, tolerance)
    assert list(model.state_dict()) == names


def run_block(block: torch.nn.Module, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Output and gradients, for the same input at every call."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 1, sum(LENGTHS), 32, dtype=torch.float64, generator=generator)
    block.zero_grad()
    y = block(x.requires_grad_(), cu_seqlens)
    (y * weight).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in block.parameters())]


@over_mixers
def test_compiled_equals_eager(name: str) -> None:
    check_compiled(name, "aot_eager", 1e-10)


@pytest.mark.slow
@over_mixers
def test_compiled_by_inductor_equals_eager(name: str) -> None:
    check_compiled(name, "inductor", 1e-8)


@over_mixers
@pytest.mark.parametrize("seq_len", [256, 1024])
def test_flops_against_counter(name: str, seq_len: int) -> None:
    """The formula is what the algebra needs: our PyTorch forms do at most twice as much, and hardly less.

    Less by the short convolution, which is element-wise here and not counted. `test_costs.py` has the parts:
    projections and softmax exactly, each operator within its factor.
    """
    mixer = mixer_of(name, d_model=64).float()
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        mixer(torch.randn(1, seq_len, 64))
    counted, formula = counter.get_total_flops() / seq_len, mixer.flops_per_token(seq_len)
    print(f"{name}: counted {counted:.0f}, formula {formula:.0f}, ratio {counted / formula:.2f}")
    assert 0.95 * formula <= counted <= 2 * formula


@over_mixers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_bytes(name: str, dtype: torch.dtype) -> None:
    model = build(name).float()
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        for seq_len in (1, 63, 64, 65, 200):
            _, state = model.step(ids(1, seq_len))
            assert state.num_bytes == model.state_bytes(seq_len, dtype), seq_len
            assert state.capacity_bytes >= state.num_bytes


@over_mixers
def test_gradients_reach_every_parameter(name: str) -> None:
    options = MIXERS.get(name).Config(name=name)
    model = LanguageModel(ModelConfig(d_model=32, n_layers=2), options, VOCABULARY, 256)
    tokens = ids(2, 130)
    torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.any(), key


@over_mixers
def test_each_parameter_is_in_one_group_and_only_matrices_decay(name: str) -> None:
    """Decayed: the weights of linear layers and convolutions, by name; not gates, scales, norms, embeddings."""
    options = MIXERS.get(name).Config(name=name)
    model = LanguageModel(ModelConfig(d_model=32, n_layers=2), options, VOCABULARY, 256)
    groups = parameter_groups(model, 0.1)
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for key, parameter in model.named_parameters():
        owner, _, kind = key.rpartition(".")
        if kind in ("A_log", "D", "dt_bias", "L", "bias", "logit") or owner.endswith(("norm", "embedding")):
            assert decay[id(parameter)] == 0.0, key
        elif owner.endswith(("proj", "conv")):
            assert decay[id(parameter)] == 0.1, key
        else:  # a plugin's own
            assert name not in BUILT_IN, f"{key}: say here whether it decays"


@over_mixers
@pytest.mark.parametrize("d_model", [16, 48, 80, 112, 256])
def test_any_width(name: str, d_model: int) -> None:
    model = build(name, d_model=d_model)
    tokens = ids(1, 12)
    logits, _ = model.step(tokens[:, :9])
    assert_near(logits, model(tokens)[:, :9])


@over_mixers
def test_bf16_autocast(name: str) -> None:
    """Near the fp32 result, with parameters and gradients in fp32.

    By token, and of each half of the rows the best nine tenths: a read that is almost 0, as one in some thousands
    is, has no correct digit in bf16, and the norm after it makes it as large as any other.
    """
    model = build(name).float()
    tokens = ids(2, 100)
    expected = model(tokens).detach()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
    logits.float().square().mean().backward()
    errors = (logits.detach().float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    for half in errors.split(50, dim=1):
        assert half.flatten().sort().values[:90].square().mean().sqrt() < 0.08
    assert all(p.dtype == p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())
