"""Gradients, metrics and their bookkeeping on hand-made batches."""

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader

from src.config import asdict, compose
from src.data import IGNORE
from src.model import Block
from src.module import LanguageModule, build_model, head_loss, load_module
from src.optim import lr_at

VOCAB, LENGTH = 32, 8


def batch(rows: int, labelled: list[int] | None = None, **more: Any) -> dict[str, Any]:
    """Random ids; row i has its first `labelled[i]` places labelled (all where it is None)."""
    labels = torch.randint(VOCAB, (rows, LENGTH))
    for i, n in enumerate(labelled or ()):
        labels[i, n:] = IGNORE
    ids = torch.randint(VOCAB, (rows, LENGTH))
    absent = dict.fromkeys(("cu_seqlens", "n_bytes", "n_words", "n_pairs"))
    return {"input_ids": ids, "labels": labels, **absent, **more}


def joined(batches: list[dict[str, Any]]) -> dict[str, Any]:
    return batches[0] | {key: torch.cat([b[key] for b in batches]) for key in ("input_ids", "labels")}


class Batches(LightningDataModule):
    def __init__(self, train: list[dict], val: list[dict] = ()) -> None:
        super().__init__()
        self.batches = {"train": list(train), "val": list(val)}

    def train_dataloader(self):
        return DataLoader(self.batches["train"], batch_size=None)

    def val_dataloader(self):
        return DataLoader(self.batches["val"], batch_size=None)


class Recorder(Callback):
    """Gradients, after clipping, of every micro-batch's end."""

    def __init__(self) -> None:
        self.gradients: list[list[torch.Tensor]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.gradients.append([p.grad.clone() for p in module.parameters()])


class Log(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))


def new_module(*options: str) -> LanguageModule:
    cfg = compose(["mixer=softmax", "data=mqar", "model.d_model=16", "model.n_layers=1", *options])
    torch.manual_seed(0)
    module = LanguageModule(asdict(cfg), VOCAB, LENGTH)
    module.configure_model()
    return module


def trainer_of(log: Log | None = None, callbacks: list[Callback] = (), **options: Any) -> Trainer:
    defaults = {"max_steps": 1, "max_epochs": -1, "log_every_n_steps": 1, "limit_val_batches": 1.0}
    return Trainer(
        accelerator="cpu",
        devices=1,
        logger=[log] if log else False,
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        **{**defaults, **options},
    )


def first_gradients(batches: list[dict], **options: Any) -> tuple[list[torch.Tensor], list]:
    recorder, log = Recorder(), Log()
    trainer = trainer_of(log, [recorder], accumulate_grad_batches=len(batches), **options)
    trainer.fit(new_module(), datamodule=Batches(batches))
    return recorder.gradients[-1], log.rows


def test_accumulated_gradient_is_that_of_one_batch(seed):
    parts = [batch(2), batch(2, [3, 1]), batch(2, [0, 0])]
    accumulated, rows = first_gradients(parts)
    whole, whole_rows = first_gradients([joined(parts)])
    for a, b in zip(accumulated, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
    assert rows[0][1]["train/loss"] == pytest.approx(whole_rows[0][1]["train/loss"], rel=1e-5)


def test_gradient_is_that_of_the_mean_over_labelled_tokens(seed):
    data = batch(3, [8, 2, 5])
    gradients, rows = first_gradients([data])
    module = new_module()
    logits = module.model(data["input_ids"])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), data["labels"].flatten())  # mean, -100 left out
    expected = torch.autograd.grad(loss, list(module.parameters()))
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
    assert rows[0][1]["train/loss"] == pytest.approx(float(loss), rel=1e-5)


def test_clipping_follows_the_division_and_the_logged_norm_precedes_it(seed):
    data = batch(4)
    free, rows = first_gradients([data])
    clipped, clipped_rows = first_gradients([data], gradient_clip_val=0.01)
    norm = torch.stack([g.norm() for g in free]).norm()
    assert rows[0][1]["train/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert clipped_rows[0][1]["train/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert float(torch.stack([g.norm() for g in clipped]).norm()) == pytest.approx(0.01, rel=1e-3)
    torch.testing.assert_close(clipped[0], free[0] * (0.01 / norm), rtol=1e-3, atol=1e-8)


def test_a_step_without_any_label_changes_nothing(seed):
    module = new_module("optim.weight_decay=0")
    before = [p.detach().clone() for p in module.parameters()]
    trainer_of().fit(module, datamodule=Batches([batch(2, [0, 0])]))
    for a, b in zip(before, module.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_logged_learning_rate_is_the_schedule(seed):
    module, log = new_module("optim.warmup_steps=3"), Log()
    trainer_of(log, max_steps=6, accumulate_grad_batches=2).fit(module, datamodule=Batches([batch(1)] * 12))
    config = compose(["data=mqar", "mixer=softmax", "optim.warmup_steps=3"]).optim
    logged = {step: row["train/lr"] for step, row in log.rows}
    assert logged == {s: pytest.approx(config.lr * lr_at(s - 1, config, 6)) for s in range(1, 7)}


def test_numbers_are_written_at_log_steps_only(seed):
    log = Log()
    trainer_of(log, max_steps=7, log_every_n_steps=3).fit(new_module(), datamodule=Batches([batch(1)] * 7))
    assert [step for step, _ in log.rows] == [1, 3, 6, 7]


def test_validation_is_weighted_by_tokens(seed):
    parts = [batch(1, n_bytes=10.0, n_words=2.0), batch(3, [1, 0, 2], n_bytes=5.0, n_words=1.5)]
    module = new_module()
    trainer_of().validate(module, datamodule=Batches([], parts), verbose=False)
    data = joined(parts)
    loss = float(
        torch.nn.functional.cross_entropy(
            module.model(data["input_ids"]).detach().flatten(0, 1).double(), data["labels"].flatten()
        )
    )
    assert module.metrics == {
        "val/loss": pytest.approx(loss, rel=1e-5),
        "val/perplexity": pytest.approx(math.exp(loss), rel=1e-5),
        "val/word_perplexity": pytest.approx(math.exp(loss * 11 / 3.5), rel=1e-5),
        "val/bits_per_byte": pytest.approx(loss * 11 / math.log(2) / 15, rel=1e-5),
    }
    assert module.evaluated_tokens == 11


def test_bits_per_byte_needs_every_batch_to_know_its_bytes(seed):
    module = new_module()
    data = Batches([], [batch(1, n_bytes=3.0), batch(1)])
    trainer_of().validate(module, datamodule=data, verbose=False)
    assert set(module.metrics) == {"val/loss", "val/perplexity"}


def test_recall_is_the_mean_over_sequences_of_their_accuracy(seed):
    """One sequence with one of one right, one with one of four: 62.5 %, where tokens would say 40 %."""
    module = new_module()
    data = batch(2, [1, 4], n_pairs=4)
    answers = module.model(data["input_ids"]).argmax(-1)
    wrong = (answers + 1) % VOCAB
    labels = data["labels"]
    labels[0, 0] = answers[0, 0]
    labels[1, :4] = wrong[1, :4]
    labels[1, 2] = answers[1, 2]
    other = batch(1, [2], n_pairs=2)
    other["labels"][0, :2] = module.model(other["input_ids"]).argmax(-1)[0, :2]
    trainer_of().validate(module, datamodule=Batches([], [data, other]), verbose=False)
    assert module.metrics["val/accuracy/pairs_4"] == pytest.approx(0.625)
    assert module.metrics["val/accuracy/pairs_2"] == 1.0
    assert module.metrics["val/accuracy"] == pytest.approx((1 + 0.25 + 1) / 3)
    assert module.recall_kinds == {(LENGTH, 4): (1.25, 2), (LENGTH, 2): (1.0, 1)}


def test_checkpoint_is_plain_and_loads_without_a_trainer(tmp_path, seed):
    module = new_module()
    trainer = trainer_of()
    trainer.fit(module, datamodule=Batches([batch(2)]))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    torch.load(tmp_path / "a.ckpt", weights_only=True)
    loaded = load_module(tmp_path / "a.ckpt")
    ids = torch.randint(VOCAB, (2, LENGTH))
    assert torch.equal(loaded.model(ids), module.model(ids))
    assert not loaded.training


def test_configure_model_keeps_the_model():
    module = new_module()
    model = module.model
    module.configure_model()
    assert module.model is model


def test_only_training_compiles_and_parameter_names_stay(tmp_path, monkeypatch, seed):
    compiled = []
    monkeypatch.setattr(Block, "compile", lambda block: compiled.append(block))
    module, trainer = new_module("trainer.compile=true"), trainer_of()
    trainer.validate(module, datamodule=Batches([], [batch(1)]), verbose=False)
    assert not compiled
    assert module.head_loss is head_loss
    trainer.fit(module, datamodule=Batches([batch(1)]))
    assert compiled == list(module.model.blocks)
    assert module.head_loss is not head_loss
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    load_module(tmp_path / "a.ckpt")
    assert len(compiled) == 1

    monkeypatch.undo()
    trainer_of(max_steps=0).fit(module, datamodule=Batches([batch(1)]))
    assert module.model.blocks[0]._compiled_call_impl is not None
    assert build_model(module.hparams["config"], VOCAB, LENGTH).state_dict().keys() == {
        name.removeprefix("model.") for name in module.state_dict()
    }


def test_flops_by_hand():
    """Width 16, one softmax layer with an MLP of 48: logits cost only where there is a label."""
    module = new_module("model.mlp_ratio=3", "data.seq_len=8")
    mixer = module.model.blocks[0].mixer
    data = {"input_ids": torch.zeros(2, 8), "cu_seqlens": None, "n_tokens": 3}
    per_token = mixer.flops_per_token(8) + 3 * 2 * 16 * 48
    assert module.flops(data) == pytest.approx(16 * per_token + 3 * 2 * 16 * VOCAB)
    longer = {**data, "input_ids": torch.zeros(1, 16)}  # a row of another length, as mqar mixes them
    extra = 16 * (mixer.flops_per_token(16) - mixer.flops_per_token(8))
    assert module.flops(longer) == pytest.approx(module.flops(data) + extra)
    packed = {**longer, "cu_seqlens": torch.tensor([0, 8, 16])}  # two rows of data.seq_len
    assert module.flops(packed) == pytest.approx(module.flops(data))
