import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from src import config, generate, train
from src.config import run_cli
from src.evaluate import evaluate, main
from src.evaluation import EvaluateConfig, build_data
from src.module import pick_device
from tests.training import rows, run, write_corpus


@pytest.fixture(scope="module")
def text_run(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("evaluate"), "run.name=text", "trainer.val_batches=null", "data.val_rows=null")


def test_last_checkpoint_gives_the_last_validation(text_run):
    results = evaluate(EvaluateConfig(run=str(text_run), device="cpu"))
    last = rows(text_run)[-1]
    for name in ("loss", "perplexity", "word_perplexity", "bits_per_byte"):
        assert results[name] == pytest.approx(float(last[f"val/{name}"]), rel=1e-6)
    saved = json.loads((text_run / "evaluation-perplexity-val.json").read_text())
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
    names, values = (line.split("  ") for line in capsys.readouterr().out.splitlines()[:2])
    printed = dict(zip(*([cell.strip() for cell in line if cell.strip()] for line in (names, values)), strict=True))
    saved = json.loads((text_run / "evaluation-perplexity-val.json").read_text())
    assert printed["perplexity"] == f"{saved['perplexity']:.4f}"
    assert float(printed["word perplexity"]) == pytest.approx(saved["word_perplexity"], rel=1e-3)
    assert printed["tokens"] == f"{saved['tokens']:,}"
    assert saved["word_perplexity"] > saved["perplexity"]  # several bytes a word


def test_a_result_of_other_options_is_put_aside(text_run, capsys):
    def measure(**more) -> str:
        main(EvaluateConfig(run=str(text_run), task="perplexity", split="test", device="cpu", **more))
        return capsys.readouterr().out

    file = text_run / "evaluation-perplexity-test.json"
    assert "kept" not in measure(lengths=[32, 64])
    two = file.read_text()
    assert "kept" not in measure(lengths=[32, 64], piece=32)  # the same numbers, otherwise computed
    aside = text_run / "evaluation-perplexity-test-1.json"
    assert f"the earlier result, of lengths=[32,64] piece=32, is kept as {aside}" in measure(lengths=[32])
    assert json.loads(aside.read_text())["lengths"] == json.loads(two)["lengths"]
    assert aside.with_suffix(".png").is_file()
    assert [cell["length"] for cell in json.loads(file.read_text())["lengths"]] == [32]
    assert f"is kept as {text_run / 'evaluation-perplexity-test-2.json'}" in measure()
    assert len(json.loads(aside.read_text())["lengths"]) == 2


def test_numbers_that_json_does_not_know_are_null(text_run, tmp_path, monkeypatch):
    monkeypatch.setattr("src.evaluation.perplexity.token_losses", lose_everything)
    output = tmp_path / "a.json"
    assert math.isnan(evaluate(EvaluateConfig(run=str(text_run), device="cpu", output=str(output)))["loss"])

    def refuse(constant):
        raise AssertionError(constant)

    assert json.loads(output.read_text(), parse_constant=refuse)["loss"] is None


def lose_everything(model, input_ids, labels, cu_seqlens, size):
    return torch.full(labels.shape, math.nan), labels < 0


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


def test_one_tag_is_of_one_row_length(text_run, tmp_path):
    """Other lengths are in the curve by length: the point at the step is that of training's rows, or none."""
    copy = Path(shutil.copytree(text_run, tmp_path / "run", ignore=shutil.ignore_patterns("events*")))
    for lengths in ([32, 64], [32, 16], []):
        found = evaluate(EvaluateConfig(run=str(copy), split="test", lengths=lengths, device="cpu"))
    points = EventAccumulator(str(copy)).Reload().Scalars("perplexity-test/loss")
    assert [point.value for point in points] == [pytest.approx(found["loss"])] * 2
    for lengths in ([16, 100], []):  # samples of other tokens
        found = evaluate(EvaluateConfig(run=str(copy), split="test", lengths=lengths, max_tokens=100, device="cpu"))
    points = EventAccumulator(str(copy)).Reload().Scalars("perplexity-test-max_tokens=100/loss")
    assert [point.value for point in points] == [pytest.approx(found["loss"])]


def test_a_lost_tokenizer_is_not_replaced(text_run, tmp_path, capsys):
    """Another one, of as many entries by chance, would make other text of the same ids."""
    damaged = Path(shutil.copytree(text_run, tmp_path / "run"))
    (damaged / "tokenizer.json").unlink()
    for more in ([], ["data.name=prose"]):
        with pytest.raises(SystemExit) as end:
            run_cli(main, EvaluateConfig, [f"run={damaged}", "device=cpu", *more])
        error = capsys.readouterr().err
        assert end.value.code == 2
        assert error.startswith(f"error: {damaged} has no tokenizer.json: ")
        assert error.count("\n") == 1


@pytest.mark.parametrize("part", ["half", "nothing", "no zip", "a list", "only weights"])
def test_a_damaged_checkpoint_is_one_line(text_run, tmp_path, capsys, part):
    damaged = Path(shutil.copytree(text_run, tmp_path / "runs" / "text"))
    last = damaged / "checkpoints" / "last.ckpt"
    content = last.read_bytes()
    if part in ("a list", "only weights"):
        torch.save([1] if part == "a list" else torch.load(last)["state_dict"], last)
    else:
        last.write_bytes({"half": content[: len(content) // 2], "nothing": b"", "no zip": b"\x80\x02}"}[part])
    saved = config.load(damaged)
    names = ["data=text", "mixer=mamba2", f"data.path={saved.data.path[0]}", f"run.dir={damaged.parent}"]
    for call, schema, arguments, hint in (
        (main, EvaluateConfig, [f"run={damaged}", "device=cpu"], "; checkpoint=best is there"),
        (generate.main, generate.GenerateConfig, [f"run={damaged}", "prompt=a"], "; checkpoint=best is there"),
        (
            train.main, config.Config, ["resume=auto", "run.name=text", f"run.dir={damaged.parent}"],
            "; another run.name starts a new run",
        ),
        (train.main, config.Config, [f"init_from={damaged}", "run.name=new", *names], ""),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as end:
            run_cli(call, schema, arguments)
        assert end.value.code == 2
        assert capsys.readouterr().err == f"error: {last} is damaged, or no checkpoint of a training{hint}\n"
    assert sorted(path.name for path in damaged.parent.iterdir()) == ["text"]
    assert not (damaged / ".lock").exists()


def test_an_empty_config_is_one_line(text_run, tmp_path, capsys):
    damaged = Path(shutil.copytree(text_run, tmp_path / "run"))
    (damaged / "config.yaml").write_text("")
    for call, schema, arguments in (
        (main, EvaluateConfig, [f"run={damaged}"]),
        (generate.main, generate.GenerateConfig, [f"run={damaged}"]),
        (train.main, config.Config, ["resume=auto", "run.name=run", f"run.dir={tmp_path}"]),
        (train.main, config.Config, [f"init_from={damaged}", f"run.dir={tmp_path}"]),
    ):
        with pytest.raises(SystemExit) as end:
            run_cli(call, schema, arguments)
        assert end.value.code == 2
        assert capsys.readouterr().err == f"error: {damaged / 'config.yaml'} is empty or damaged: it names no mixer\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run=nothing"], "no such run"),
        (["run={run}", "split=train"], "split=train"),
        (["run={run}", "data.seq_lne=4"], "seq_len"),
        (["run={run}", "data.tokenizer=bytes"], "data.tokenizer"),
        (["run={run}", "device=tpu7"], "device=tpu7: must be auto, cpu, cuda"),
        (["run={run}", "device=meta"], "device=meta: must be auto, cpu, cuda"),
        (["run={run}", "device=gpu"], "did you mean 'cuda'?"),
        (["run={run}", "device=cuda:99"], "not available here"),
        (["run={run}", "data.nmae=hub"], "did you mean 'data.name'?"),
        (["run={run}", "data.val_rows=2"], "max_tokens= takes a sample"),
        (["run={run}", "data.name=mqar", "task=perplexity"], "token ids"),
        (["run={run}", "task=mqar"], "was trained on data=text"),
        (["run={run}", "task=position"], "task=position"),
        (["run={run}", "lengths=0"], "lengths=[0]"),
        (["run={run}", "lengths=16,1000000"], "tokens only"),
        (["run={run}", "output=/nowhere/a.json"], "output=/nowhere/a.json"),
        (["run={run}", "output=a.png"], "must end with .json"),
        (["run={run}", "piece=0"], "piece=0"),
        (["run={run}", "max_tokens=0"], "max_tokens=0"),
        (["run={run}", "examples=5"], "task=perplexity does not use it"),
        (["run={run}", "beyond=mean"], "no level scales"),
        (["run={run}", "task=positions", "lengths=1000000"], "the longest has"),
        (["run={run}", "task=positions", "lengths=16,32"], "takes one length"),
        (["run={run}", "lengths=16,32", "data.seq_len=16"], "lengths alone"),
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
    device = pick_device("auto")
    assert device.type in ("cpu", "cuda", "mps")
    torch.zeros(1, device=device)  # with PyTorch for CUDA on a machine without a GPU it was "cuda"
