"""Packed documents do not touch each other through the whole model, with each implementation of the operators."""

import pytest
import torch
from torch import Tensor

from src.model import LanguageModel, ModelConfig
from src.registry import MIXERS, build_options

VOCABULARY = 50
LENGTHS = [70, 0, 1, 130, 64, 15]
PAIRS = [(3, 0), (3, 4), (4, 3), (2, 3)]
"""Documents: one that is looked at, and one that is changed."""
# For the interpreter, which takes its time: the one that is looked at has two chunks and a neighbour on each side.
FEW_LENGTHS = [20, 0, 70, 3]
FEW_PAIRS = [(2, 0), (2, 3)]
NARROW = {"mamba2": {"n_heads": 1, "d_state": 16}, "gated_deltanet": {"n_heads": 1, "expand_v": 1.0}}
NARROW |= {"loglinear_mamba2": NARROW["mamba2"], "loglinear_gdn": NARROW["gated_deltanet"]}
RECURRENT = [name for name in MIXERS.names() if name not in ("softmax", "hybrid")]


def build(name: str, d_model: int = 64, n_layers: int = 2, **options) -> LanguageModel:
    mixer = build_options(MIXERS.get(name), options, "mixer")
    model = LanguageModel(ModelConfig(d_model=d_model, n_layers=n_layers, mlp_ratio=1), mixer, VOCABULARY, 128)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.1))
    return model


def outcome(model: LanguageModel, tokens: Tensor, cu_seqlens: Tensor, kept: slice, weight: Tensor) -> list[Tensor]:
    """Hidden states of one document, and the gradients of their weighted sum; the others' inputs have none."""
    model.zero_grad()
    x = model.embedding(tokens).detach().requires_grad_()
    h = x
    for block in model.blocks:
        h = block(h, cu_seqlens)
    h = model.norm(h)[:, kept]
    (h.float() * weight).sum().backward()
    outside = torch.ones(tokens.shape[1], dtype=torch.bool)
    outside[kept] = False
    assert (x.grad[:, outside.to(x.device)] == 0).all()
    return [h.detach(), x.grad[:, kept], *(p.grad for p in model.blocks.parameters())]


def check_documents_apart(
    model: LanguageModel,
    device: str,
    dtype: torch.dtype | None = None,
    lengths: list[int] = LENGTHS,
    pairs: list[tuple[int, int]] = PAIRS,
) -> None:
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    cu_seqlens = torch.tensor([*ends, *[ends[-1]] * 3], dtype=torch.int32, device=device)  # padded, as loaders do
    tokens = torch.randint(VOCABULARY, (1, ends[-1]), device=device)
    model = model.to(device)
    weights = {kept: torch.randn(1, lengths[kept], model.embedding.embedding_dim, device=device) for kept, _ in pairs}

    def of(kept: int, ids: Tensor) -> list[Tensor]:
        with torch.autocast(device, dtype, enabled=dtype is not None):
            return outcome(model, ids, cu_seqlens, slice(ends[kept], ends[kept + 1]), weights[kept])

    before = {kept: of(kept, tokens) for kept in weights}
    for kept, changed in pairs:
        other, there = tokens.clone(), slice(ends[changed], ends[changed + 1])
        other[:, there] = (other[:, there] + 1) % VOCABULARY
        for a, b in zip(before[kept], of(kept, other), strict=True):
            assert a.isfinite().all()
            scale = a.float().abs().max().clamp(min=1e-3)
            assert (a.float() - b.float()).abs().max() <= 1e-6 * scale


@pytest.mark.parametrize("name", RECURRENT)
def test_documents_are_apart(name, seed) -> None:
    check_documents_apart(build(name, backend="torch"), "cpu")


@pytest.mark.parametrize("name", RECURRENT)
def test_documents_are_apart_in_the_kernels(name, seed) -> None:
    """On the CPU Triton's kernels are interpreted."""
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is there: the kernels run on it, in the test below")
    model = build(name, d_model=16, n_layers=1, backend="triton", **NARROW[name])
    check_documents_apart(model, "cpu", lengths=FEW_LENGTHS, pairs=FEW_PAIRS)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MIXERS.names())
def test_documents_are_apart_on_the_gpu(name, dtype, seed) -> None:
    check_documents_apart(build(name), "cuda", dtype)
