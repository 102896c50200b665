import pytest
import torch
from torch import nn

from src.callbacks.nonfinite import NonFiniteError, first_nonfinite
from src.carry import CarriedStates
from src.mixers.softmax import SoftmaxAttention
from src.model import LanguageModel, ModelConfig
from src.module import LanguageModule
from tests.training import checkpoint, run


class Bad(torch.autograd.Function):
    """The identity whose gradient is NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.nan


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.third = nn.Linear(4, 1)
        self.bad_gradient = False

    def forward(self, x):
        h = self.second(self.first(x))
        return self.third(Bad.apply(h) if self.bad_gradient else h)


class Fake:
    def __init__(self) -> None:
        self.model = Model()

    def nll_sum(self, batch):
        return self.model(batch["x"]).sum()


@pytest.fixture
def fake():
    return Fake()


BATCH = {"x": torch.ones(2, 4)}


def test_finite_model_has_no_culprit(fake):
    assert first_nonfinite(fake, BATCH) is None


def test_parameter(fake):
    fake.model.third.weight.data[0, 0] = torch.nan
    assert first_nonfinite(fake, BATCH) == "parameter third.weight"


def test_innermost_layer_whose_output_is_not_finite(fake):
    fake.model.first.weight.data.fill_(1)  # so that the sum is large, whatever the biases are
    fake.model.second[0].weight.data.fill_(3e38)
    assert first_nonfinite(fake, BATCH) == "the output of second.0 (Linear)"


def test_gradient(fake):
    fake.model.bad_gradient = True
    assert first_nonfinite(fake, BATCH) == "the gradient of second.0.bias"


def poison(monkeypatch, step: int) -> None:
    """The last norm's output becomes infinite in optimizer step `step` only."""
    original = LanguageModule.labelled_hidden

    def labelled_hidden(self, batch, micro_batch=0):
        batch_step = int(batch["input_ids"].sum())
        if self.training and self.trainer.global_step == step - 1 and not hasattr(self, "poisoned"):
            self.poisoned = batch_step
        if getattr(self, "poisoned", None) == batch_step and self.training:
            handle = self.model.norm.register_forward_pre_hook(lambda layer, args: (args[0] * torch.inf,))
            try:
                return original(self, batch, micro_batch)
            finally:
                handle.remove()
        return original(self, batch, micro_batch)

    monkeypatch.setattr(LanguageModule, "labelled_hidden", labelled_hidden)


def test_run_stops_with_the_layer_and_without_a_poisoned_checkpoint(tmp_path, monkeypatch):
    """The bad step is the third of six; numbers are looked at after the fourth, whose batch is harmless."""
    poison(monkeypatch, step=3)
    with pytest.raises(NonFiniteError, match=r"step 4 or shortly before; first in the output of norm \("):
        run(tmp_path, "run.name=a", "trainer.log_every=4", "trainer.checkpoint_every=2", "trainer.val_every=6")
    saved = checkpoint(tmp_path / "runs" / "a")
    assert saved["global_step"] == 2
    assert all(p.isfinite().all() for p in saved["state_dict"].values())


def test_an_output_matrix_of_its_own_is_named():
    """Huge weights, all finite: their products are not."""
    sizes, mixer = ModelConfig(d_model=16, n_layers=1, tie_embeddings=False), SoftmaxAttention.Config(name="softmax")
    model = LanguageModel(sizes, mixer, vocab_size=40, max_seq_len=8)
    model.lm_head.weight.data.fill_(3e38)
    module = Fake()
    module.model = model
    module.nll_sum = lambda batch: model(batch["x"]).sum()
    assert first_nonfinite(module, {"x": torch.ones(1, 4, dtype=torch.int64)}) == "the output of lm_head (Head)"


def test_batch_that_continues_a_state_is_run_again_with_that_state(tmp_path, monkeypatch):
    """Not with the state that the last of the kept batches left, which the bad numbers have reached."""
    continued = []
    original = CarriedStates.hidden

    def hidden(self, model, batch, micro_batch):
        continued.append((batch["input_ids"].clone(), self.states.get(micro_batch)))
        return original(self, model, batch, micro_batch)

    monkeypatch.setattr(CarriedStates, "hidden", hidden)
    poison(monkeypatch, step=3)
    with pytest.raises(NonFiniteError, match=r"first in the output of norm \("):
        run(tmp_path, "run.name=a", "data.carry_state=true", "trainer.log_every=4", "trainer.micro_batch_size=2")
    trained, again = continued[:8], continued[8:]
    again_steps = [next(i for i, (ids, _) in enumerate(trained) if torch.equal(ids, kept)) for kept, _ in again]
    assert again_steps == sorted(again_steps)
    for step, (_, state) in zip(again_steps, again, strict=True):
        assert state is trained[step][1]


def test_no_checkpoint_is_written_after_a_bad_step(tmp_path, monkeypatch):
    poison(monkeypatch, step=3)
    with pytest.raises(NonFiniteError, match="the output of norm"):
        run(
            tmp_path,
            "run.name=a",
            "trainer.log_every=100",
            "trainer.checkpoint_every=1",
            "trainer.val_every=6",
        )
    assert checkpoint(tmp_path / "runs" / "a")["global_step"] == 2
