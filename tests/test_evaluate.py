import json
import math
from pathlib import Path

import pytest

from src import config, generate
from src.config import run_cli
from src.evaluate import EvaluateConfig, build_data, evaluate, main, recall_table
from src.module import pick_device
from tests.training import rows, run, write_corpus


@pytest.fixture(scope="module")
def text_run(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("evaluate"), "run.name=text", "trainer.val_batches=null", "data.val_rows=null")


@pytest.fixture(scope="module")
def recall_run(tmp_path_factory) -> Path:
    return run(
        tmp_path_factory.mktemp("recall"), "run.name=recall", "data=mqar", "data.seq_len=16", "data.n_pairs=2",
        "data.examples=64", "data.vocab_size=32", "data.val=16:2:8,16:4:8,32:4:8", "trainer.val_batches=null",
    )  # fmt: skip


def test_last_checkpoint_gives_the_last_validation(text_run):
    results = evaluate(EvaluateConfig(run=str(text_run), device="cpu"))
    last = rows(text_run)[-1]
    for name in ("loss", "perplexity", "word_perplexity", "bits_per_byte"):
        assert results[name] == pytest.approx(float(last[f"val/{name}"]), rel=1e-6)
    saved = json.loads((text_run / "evaluation-val.json").read_text())
    assert saved["loss"] == results["loss"]
    assert saved["tokens"] > 0
    assert saved["step"] == 6


def test_batch_size_changes_nothing(text_run, tmp_path):
    output = str(tmp_path / "a.json")
    a, b = (
        evaluate(EvaluateConfig(run=str(text_run), device="cpu", data={"val_batch_size": n}, output=output))
        for n in (1, 7)
    )
    assert a["tokens"] == b["tokens"]
    assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def test_rows_at_once_are_those_of_training(tmp_path):
    run_dir = run(tmp_path, "run.name=a", "trainer.micro_batch_size=2")
    cfg = config.load(run_dir)
    for changes, rows_at_once in (({}, 2), ({"batch_size": 3}, 3), ({"val_batch_size": 1}, 1)):
        data = build_data(cfg, run_dir, changes)
        assert len(next(iter(data.val_dataloader().sampler)).samples) == rows_at_once, changes


def test_both_perplexities_and_the_token_count_are_printed(text_run, capsys):
    main(EvaluateConfig(run=str(text_run), device="cpu"))
    lines = {line[:15].strip(): line[15:].strip() for line in capsys.readouterr().out.splitlines()}
    saved = json.loads((text_run / "evaluation-val.json").read_text())
    assert lines["perplexity"] == f"{saved['perplexity']:.4f}"
    assert lines["word perplexity"] == f"{saved['word_perplexity']:.4f}"
    assert lines["tokens"] == f"{saved['tokens']:,}"
    assert saved["word_perplexity"] > saved["perplexity"]  # several bytes a word


def test_numbers_that_json_does_not_know_are_null(text_run, tmp_path, monkeypatch):
    monkeypatch.setattr("src.module.LanguageModule._end_of_evaluation", end_with_nan)
    output = tmp_path / "a.json"
    assert math.isnan(evaluate(EvaluateConfig(run=str(text_run), device="cpu", output=str(output)))["loss"])

    def refuse(constant):
        raise AssertionError(constant)

    assert json.loads(output.read_text(), parse_constant=refuse)["loss"] is None


def end_with_nan(self, split):
    self.evaluated_tokens, self.recall_kinds = 1, {}
    self.evaluated = {f"{split}/loss": math.nan, f"{split}/perplexity": math.inf}
    return self.evaluated


def test_test_split_and_best_checkpoint(text_run):
    results = evaluate(EvaluateConfig(run=str(text_run), split="test", checkpoint="best", device="cpu"))
    assert (results["split"], results["checkpoint"]) == ("test", "best")
    assert results["loss"] > 0


def test_other_text_is_read_with_the_tokenizer_of_the_run(tmp_path):
    bpe = run(tmp_path, "run.name=bpe", "data.tokenizer=bpe", "data.vocab_size=300")
    other = write_corpus(tmp_path / "other", documents=25)
    (other / "x.txt").write_text("zebra quagga okapi " * 400)
    results = evaluate(EvaluateConfig(run=str(bpe), device="cpu", data={"path": [str(other)]}))
    assert results["data"]["tokenizer"] == str(bpe / "tokenizer.json")
    assert results["data"]["path"] == [str(other)]


def test_recall_by_pairs_and_length(recall_run, capsys):
    main(EvaluateConfig(run=str(recall_run), device="cpu"))
    out = capsys.readouterr().out
    saved = json.loads((recall_run / "evaluation-val.json").read_text())
    kinds = [(row["seq_len"], row["n_pairs"], row["sequences"]) for row in saved["recall"]]
    assert kinds == [(16, 2, 8), (16, 4, 8), (32, 4, 8)]
    assert saved["accuracy"] == pytest.approx(sum(row["accuracy"] for row in saved["recall"]) / 3)
    assert recall_table(saved["recall"]) in out


def test_recall_table():
    kinds = [(64, 4, 0.5), (64, 8, 0.25), (128, 8, 1.0)]
    table = recall_table([{"seq_len": t, "n_pairs": n, "accuracy": a} for t, n, a in kinds])
    assert [line.split() for line in table.splitlines()[1:]] == [
        ["tokens", "/", "pairs", "4", "8"], ["64", "50.0%", "25.0%"], ["128", "100.0%"]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run=nothing"], "no such run"),
        (["run={run}", "split=train"], "split=train"),
        (["run={run}", "data.seq_lne=4"], "seq_len"),
        (["run={run}", "data.tokenizer=bytes"], "data.tokenizer"),
        (["run={run}", "device=tpu7"], "device=tpu7"),
        (["run={run}", "data.name=mqar"], "token ids"),
        ([], "run"),
    ],
)
def test_mistakes_are_one_line(text_run, arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        run_cli(main, EvaluateConfig, [a.format(run=text_run) for a in arguments])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


def test_kernels_of_a_run_without_a_device_are_one_line(tmp_path, monkeypatch, capsys):
    """Evaluation and generation on a CPU of what was trained on a GPU."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    trained = run(tmp_path, "run.name=a", "mixer=mamba2")
    file = trained / "config.yaml"
    file.write_text(file.read_text().replace("backend: auto", "backend: triton"))
    assert config.load(trained).mixer.backend == "triton"
    for command, options in ((main, EvaluateConfig), (generate.main, generate.GenerateConfig)):
        with pytest.raises(SystemExit) as end:
            run_cli(command, options, [f"run={trained}", "device=cpu"])
        assert end.value.code == 2
        assert capsys.readouterr().err.startswith("error: mixer.backend=triton: needs a CUDA device")


def test_auto_device_is_there():
    assert pick_device("auto").type in ("cpu", "cuda", "mps")
