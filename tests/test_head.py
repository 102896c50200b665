"""The output head and the loss behind it: any vocabulary, any number of labels, plain and compiled."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from src.layers.linear import padded_linear
from src.model import LanguageModel, ModelConfig
from src.module import head_loss
from src.registry import MIXERS

pytestmark = pytest.mark.usefixtures("seed")

VOCAB, WIDTH = 1001, 32


def model_of(device: str = "cpu", **config) -> LanguageModel:
    sizes = ModelConfig(d_model=WIDTH, n_layers=1, init_std=0.3, **config)
    return LanguageModel(sizes, MIXERS.get("softmax").Config(name="softmax"), VOCAB, 64).to(device)


def loss_and_gradients(loss, model: LanguageModel, hidden: Tensor, labels: Tensor) -> list[Tensor]:
    weight = model.embedding.weight if model.lm_head is None else model.lm_head.weight
    hidden = hidden.detach().requires_grad_()
    value = loss(model, hidden, labels)
    return [value.detach(), *torch.autograd.grad(value, [hidden, weight])]


def drawn(n: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    return torch.randn(n, WIDTH, device=device), torch.randint(VOCAB, (n,), device=device)


@pytest.mark.parametrize("rows", [1, 63, 64, 65])
def test_padded_linear_is_linear(rows: int) -> None:
    x, weight = torch.randn(2, 5, 16, dtype=torch.float64), torch.randn(rows, 16, dtype=torch.float64)
    weights = torch.randn(2, 5, rows, dtype=torch.float64)
    results = []
    for product in (F.linear, lambda x, weight: padded_linear(x, weight, 64)):
        inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = product(*inputs)
        results.append([y.detach(), *torch.autograd.grad((y * weights).sum(), inputs)])
    for expected, actual in zip(*results, strict=True):
        assert actual.shape == expected.shape
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tied", [True, False])
def test_compiled_loss_is_the_loss_and_seldom_compiled_again(tied: bool) -> None:
    """Without a label, with one, with up to 4,096 and with more."""
    torch._dynamo.reset()
    model, compiled = model_of(tie_embeddings=tied), torch.compile(head_loss, dynamic=True)
    for n, anew in ((300, True), (301, False), (77, False), (5000, True), (6001, False), (0, True), (1, True)):
        hidden, labels = drawn(n)
        expected = loss_and_gradients(head_loss, model, hidden, labels)
        with torch._dynamo.config.patch(error_on_recompile=not anew):
            actual = loss_and_gradients(compiled, model, hidden, labels)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_loss_on_a_gpu_against_float64(compiled: bool, precision: torch.dtype) -> None:
    """Few labels, and so many that the matrix is padded."""
    model = model_of("cuda")
    loss = torch.compile(head_loss, dynamic=True) if compiled else head_loss
    for n in (9, 5000):
        hidden, labels = drawn(n, "cuda")
        with torch.autocast("cuda", precision, enabled=precision != torch.float32):
            actual = loss_and_gradients(loss, model, hidden, labels)
        expected = loss_and_gradients(head_loss_float64, model, hidden.double(), labels)
        bound = 1e-5 if precision == torch.float32 else 1e-2
        for a, b in zip(actual, expected, strict=True):
            assert (a.double() - b).norm() <= bound * b.norm()


def head_loss_float64(model: LanguageModel, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, model.embedding.weight.double()), labels, reduction="sum")
