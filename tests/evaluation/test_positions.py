"""task=positions and task=perplexity with several lengths: beyond the trained length, in pieces."""

import json
import random

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from src.config import run_cli
from src.data.common.packing import Stream
from src.evaluate import evaluate, main
from src.evaluation import EvaluateConfig, open_run
from src.evaluation.positions import buckets, windows
from src.evaluation.positions import evaluate as positions
from tests.training import run

MIXERS = ("softmax", "mamba2", "loglinear_mamba2", "gated_deltanet", "loglinear_gdn")


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """Trained on rows of 16; its test text has documents of several hundred tokens."""
    folder = tmp_path_factory.mktemp("positions")
    for i in range(3):
        (folder / f"{i}.txt").write_text("".join(f"line {j} of {i} says {i * j}\n" for j in range(600)))
    return run(folder, "run.name=long", f"data.path={folder}", "data.test_fraction=0.3", "mixer=loglinear_gdn")


def test_windows_lie_inside_documents():
    stream = Stream.__new__(Stream)
    stream.starts = np.array([0, 10, 13, 33])
    assert windows(stream, 5).tolist() == [0, 5, 13, 18, 23, 28]
    assert windows(stream, 20).tolist() == [13]


def test_buckets_cover_every_position_once():
    for length in (1, 5, 16, 17, 100, 65536):
        edges = buckets(length)
        assert edges[0] == 0
        assert edges[-1] == length
        assert (np.diff(edges) > 0).all()


def test_loss_by_position(long_run, capsys):
    run_cli(main, EvaluateConfig, [f"run={long_run}", "task=positions", "split=test", "device=cpu"])
    saved = json.loads((long_run / "evaluation-positions-test.json").read_text())
    assert saved["length"] == 8 * 16
    out = capsys.readouterr().out
    n = saved["windows"]
    assert "beyond the trained length" in out
    assert f"loss in nats a token: mean and standard error over {n} windows of 128 tokens of test ({128 * n:,} " in out
    assert (long_run / "evaluation-positions-test.png").stat().st_size > 1000

    trained = open_run(EvaluateConfig(run=str(long_run), device="cpu"))
    stream = trained.data().stream("test")
    begins = windows(stream, 128)
    assert len(begins) == saved["windows"]
    tokens = torch.tensor(np.stack([stream.tokens[b : b + 129] for b in begins]).astype(np.int64))
    with torch.no_grad():
        logits = trained.model(tokens[:, :-1])
    nll = torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
    for row in saved["positions"]:
        expected = nll[:, row["begin"] : row["end"]].mean().item()
        assert row["loss"] == pytest.approx(expected, rel=1e-4)
        spread = nll[:, row["begin"] : row["end"]].mean(1).std().item() / len(begins) ** 0.5
        assert row["standard_error"] == pytest.approx(spread, rel=1e-2)

    events = EventAccumulator(str(long_run)).Reload()
    assert len(events.Scalars("positions-test/loss_128")) == len(saved["positions"])
    assert "positions-test" in events.Tags()["images"]


def test_one_window_is_no_windows(long_run):
    options = {"run": str(long_run), "device": "cpu", "task": "positions", "split": "test", "lengths": [64]}
    for tokens, said in ((64, "1 window of"), (128, "2 windows of")):
        report = positions(open_run(EvaluateConfig(max_tokens=tokens, **options)))
        assert report.figure.axes[0].get_title() == f"long, {said} 64 tokens of test"
        assert f"over {said} 64 tokens of test ({tokens} in all)" in report.table


def test_several_lengths_see_the_same_tokens(long_run):
    options = {"run": str(long_run), "device": "cpu", "split": "test"}
    rows = evaluate(EvaluateConfig(lengths=[8, 16, 64, 128], **options))["lengths"]
    assert [row["length"] for row in rows] == [8, 16, 64, 128]
    assert len({row["tokens"] for row in rows}) == 1
    assert rows[1]["loss"] == evaluate(EvaluateConfig(**options))["loss"]
    few = evaluate(EvaluateConfig(lengths=[16], max_tokens=700, **options))
    assert few["tokens"] == 700 // 16 * 16


@pytest.mark.parametrize("packing", ["documents", "concatenate"])
def test_a_sample_is_of_the_same_tokens_at_every_length(packing, tmp_path, monkeypatch, seed):
    """A made-up loss that depends on the token alone: its mean and the text's bytes must not depend on the length."""
    run_dir = run(tmp_path, "run.name=a", f"data.packing={packing}", "trainer.max_steps=1")
    seen = []

    def losses(model, input_ids, labels, cu_seqlens, size):
        seen.extend(labels[labels >= 0].tolist())
        return torch.where(labels >= 0, labels / 100, 0), labels >= 0

    monkeypatch.setattr("src.evaluation.perplexity.token_losses", losses)
    options = {"run": str(run_dir), "device": "cpu", "split": "test"}
    data = open_run(EvaluateConfig(**options)).data()
    stream = data.stream("test")
    total = len(stream)
    lengths = [random.randint(8, total) for _ in range(4)]
    longest = max(lengths)
    n = random.randint(1, total // longest)
    limit = min(n * longest + random.randrange(longest), total - 1)
    rows = evaluate(EvaluateConfig(lengths=lengths, max_tokens=limit, **options))["lengths"]
    for row in rows:
        assert row["tokens"] == n * longest
        for name in ("loss", "bits_per_byte", "word_perplexity"):
            assert row[name] == pytest.approx(rows[0][name], rel=1e-6), name
    # They stand where they should: whole rows, each in the middle of its share of them.
    begins = [(2 * i + 1) * (total // longest) // (2 * n) * longest for i in range(n)]
    labels = [token for begin in begins for token in stream.tokens[begin + 1 : begin + longest + 1].tolist()]
    assert sorted(seen[: len(labels)]) == sorted(labels)
    # Less than a row is one; all that there is, is all, the last and shorter row too.
    for limit, tokens in ((1, longest), (total, total), (10 * total, total)):
        assert evaluate(EvaluateConfig(lengths=[longest], max_tokens=limit, **options))["tokens"] == tokens


def test_a_sample_is_read_in_whole_batches(long_run, monkeypatch):
    shapes = []

    def losses(model, input_ids, labels, cu_seqlens, size):
        shapes.append(input_ids.numel())
        return torch.zeros(labels.shape), labels >= 0

    monkeypatch.setattr("src.evaluation.perplexity.token_losses", losses)
    options = {"run": str(long_run), "device": "cpu", "split": "test", "data": {"val_batch_size": 8}}
    evaluate(EvaluateConfig(max_tokens=20 * 16, **options))
    assert shapes == [128, 128, 64]


@pytest.mark.parametrize("mixer", MIXERS)
def test_pieces_change_nothing(mixer, tmp_path):
    """Rows of 8 times the trained length, whole and in pieces of uneven size."""
    run_dir = run(tmp_path, "run.name=a", f"mixer={mixer}", "trainer.max_steps=1")
    results = [
        evaluate(EvaluateConfig(run=str(run_dir), device="cpu", split="test", lengths=[128], piece=piece))
        for piece in (4096, 50, 7)
    ]
    assert len({r["tokens"] for r in results}) == 1
    for r in results[1:]:
        assert r["loss"] == pytest.approx(results[0]["loss"], rel=1e-5)


def test_policies_differ_beyond_the_trained_length_only(long_run):
    options = {"run": str(long_run), "device": "cpu", "task": "positions", "split": "test"}
    curves = {
        beyond: evaluate(EvaluateConfig(beyond=beyond, **options))["positions"] for beyond in ("last", "mean", "decay")
    }
    for a, b, c in zip(*curves.values(), strict=True):
        equal = a["loss"] == pytest.approx(b["loss"], rel=1e-6) == pytest.approx(c["loss"], rel=1e-6)
        assert equal == (a["end"] <= 16), a


def test_results_of_something_else_have_a_file_of_their_own(long_run):
    """A policy, a part of the split or other data never take the place of the model's own result."""
    plain = long_run / "evaluation-positions-test.json"
    base = {"run": str(long_run), "device": "cpu", "task": "positions", "split": "test", "lengths": [64]}
    evaluate(EvaluateConfig(**base))
    before = plain.read_text()
    for more in ({"beyond": "mean"}, {"max_tokens": 64}, {"data": {"val_fraction": 0.06}}, {"precision": "bf16-mixed"}):
        results = evaluate(EvaluateConfig(**base, **more))
        assert results["file"] != str(plain)
        assert results["options"] == {"lengths": [64]} | more
    assert plain.read_text() == before


def test_a_figure_of_earlier_numbers_does_not_stay(long_run):
    options = {"run": str(long_run), "device": "cpu", "split": "test"}
    picture = long_run / "evaluation-perplexity-test.png"
    evaluate(EvaluateConfig(lengths=[8, 16], **options))
    assert picture.exists()
    evaluate(EvaluateConfig(lengths=[16, 16], **options))
    assert not picture.exists()
