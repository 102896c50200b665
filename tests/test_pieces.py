"""A sequence in pieces with carried state equals the sequence at once."""

import random
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from src.model import LanguageModel, ModelConfig
from src.pieces import cut, prefill, token_losses
from src.registry import MIXERS, build_options

VOCABULARY = 40


def build(name: str) -> LanguageModel:
    mixer = build_options(MIXERS.get(name), {}, "mixer")
    model = LanguageModel(ModelConfig(d_model=32, n_layers=2, mlp_ratio=1), mixer, VOCABULARY, 128).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def lengths_of(n: int, most: int) -> list[int]:
    return [random.choice([0, 1, random.randrange(2, most)]) for _ in range(n)] + [most]


def test_pieces_hold_every_place_and_document(seed):
    ends = torch.tensor([0, *lengths_of(12, 70)]).cumsum(0).tolist()
    for size in (1, 7, 64, 1000):
        pieces = list(cut(ends, size))
        assert [p.begin for p in pieces] == list(range(0, ends[-1], size))
        assert {p.begin + place for p in pieces for place in p.cu_seqlens} >= set(ends)
        for before, after in zip(pieces[:-1], pieces[1:], strict=True):
            assert before.end == after.begin
            assert before.goes_on == after.continues == (before.end not in ends)


@pytest.mark.parametrize("name", MIXERS.names())
def test_losses_in_pieces_equal_those_at_once(name, seed):
    model = build(name)
    lengths = lengths_of(6, 200)
    total = sum(lengths)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    ids, labels = torch.randint(VOCABULARY, (2, 1, total))
    labels[torch.rand(1, total) < 0.3] = -100
    expected = torch.nn.functional.cross_entropy(model(ids, cu).mT, labels, reduction="none").float()
    for size in (total, random.randrange(20, 100)):
        nll, right = token_losses(model, ids, labels, cu, size)
        torch.testing.assert_close(nll, expected.detach(), rtol=1e-5, atol=1e-5)
        assert torch.equal(right, (model(ids, cu).argmax(-1) == labels))
    rows, targets = torch.randint(VOCABULARY, (2, 3, 90))
    nll, _ = token_losses(model, rows, targets, None, 37)
    expected = torch.nn.functional.cross_entropy(model(rows).mT, targets, reduction="none").float()
    torch.testing.assert_close(nll, expected.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MIXERS.names())
def test_prefill_of_uneven_prompts_in_pieces(name, seed):
    model = build(name)
    prompts = [torch.randint(VOCABULARY, (n,)).tolist() for n in (1, 150, 3, 64, random.randrange(2, 90))]
    for size in (1000, random.randrange(10, 80)):
        logits, state = prefill(model, prompts, size)
        assert state.positions.tolist() == [len(p) for p in prompts]
        following = torch.randint(VOCABULARY, (len(prompts), 1))
        after, _ = model.step(following, state)
        for n, prompt in enumerate(prompts):
            whole = model(torch.tensor([[*prompt, int(following[n])]]))[0]
            torch.testing.assert_close(logits[n], whole[-2], rtol=1e-8, atol=1e-8)
            torch.testing.assert_close(after[n, 0], whole[-1], rtol=1e-8, atol=1e-8)


class Live(TorchDispatchMode):
    """The most bytes of tensors that were alive at once, of those that operations have made."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor) and (storage := x.untyped_storage()) not in self.known:
                self.known.add(storage)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.free, storage.nbytes())
        return out

    def free(self, size: int) -> None:
        self.now -= size


@pytest.mark.parametrize("name", [name for name in MIXERS.names() if name not in ("softmax", "hybrid")])
def test_memory_of_prefill_does_not_grow_with_the_prompt(name, seed):
    """But for the ids themselves, and a matrix a head for each doubling."""
    model, peaks, told = build(name), [], []
    for length in (2_000, 16_000):
        ids = torch.randint(VOCABULARY, (length,))
        with Live() as live:
            prefill(model, [ids], 256, told.append)
        peaks.append(live.most - 2 * ids.nbytes)
    assert sum(told) == 18_000
    assert max(told) == 256
    print(name, peaks)
    assert peaks[1] < 1.2 * peaks[0]
