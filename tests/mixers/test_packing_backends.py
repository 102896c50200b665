"""Packed documents do not touch each other through the whole model, with each implementation of the operators."""

import pytest
import torch
from torch import Tensor

from src.model import LanguageModel, ModelConfig
from src.registry import MIXERS, build_options

VOCABULARY = 50
LENGTHS = [70, 0, 1, 130, 64, 15]
RECURRENT = [name for name in MIXERS.names() if name not in ("softmax", "hybrid")]


def build(name: str, **options) -> LanguageModel:
    mixer = build_options(MIXERS.get(name), options, "mixer")
    model = LanguageModel(ModelConfig(d_model=64, n_layers=2, mlp_ratio=1), mixer, VOCABULARY, 128)
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


def check_documents_apart(model: LanguageModel, device: str, dtype: torch.dtype | None = None) -> None:
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    cu_seqlens = torch.tensor([*ends, *[ends[-1]] * 3], dtype=torch.int32, device=device)  # padded, as loaders do
    tokens = torch.randint(VOCABULARY, (1, ends[-1]), device=device)
    model = model.to(device)
    for kept, changed in [(3, 0), (3, 4), (4, 3), (2, 3)]:
        here, there = (slice(ends[i], ends[i + 1]) for i in (kept, changed))
        weight = torch.randn(1, LENGTHS[kept], 64, device=device)
        with torch.autocast(device, dtype, enabled=dtype is not None):
            before = outcome(model, tokens, cu_seqlens, here, weight)
            other = tokens.clone()
            other[:, there] = (other[:, there] + 1) % VOCABULARY
            after = outcome(model, other, cu_seqlens, here, weight)
        for a, b in zip(before, after, strict=True):
            assert a.isfinite().all()
            scale = a.float().abs().max().clamp(min=1e-3)
            assert (a.float() - b.float()).abs().max() <= 1e-6 * scale


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", RECURRENT)
def test_documents_are_apart_with_each_backend(name, backend, seed) -> None:
    """On the CPU Triton's kernels are interpreted."""
    if backend == "triton" and torch.cuda.is_available():
        pytest.skip("a CUDA device is there: the kernels run on it, in the test below")
    check_documents_apart(build(name, backend=backend), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MIXERS.names())
def test_documents_are_apart_on_the_gpu(name, dtype, seed) -> None:
    check_documents_apart(build(name), "cuda", dtype)
