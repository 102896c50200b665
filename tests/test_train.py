"""Whole runs of `src.train`: what is printed, what lies in the run folder, and how mistakes end."""

import csv
import json
import math
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from src import train
from src.config import Config, run_cli
from src.errors import UserError
from src.evaluate import evaluate
from src.evaluation import EvaluateConfig
from src.module import LanguageModule
from tests.training import assert_same_state, checkpoint, config, options, rows, run, write_corpus

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("train"), "run.name=one", "trainer.micro_batch_size=2")


def events(run_dir: Path) -> EventAccumulator:
    return EventAccumulator(str(run_dir)).Reload()


def spawn(*arguments: str, **env: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "src.train", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_run_folder(finished):
    files = {path.name.split(".vm")[0] for path in finished.iterdir()}
    events_file = next(name for name in files if name.startswith("events.out.tfevents"))
    assert files == {
        "config.yaml", "manifest.json", "metrics.csv", "tokenizer.json", "tokenizer_config.json", "checkpoints",
        events_file,
    }  # fmt: skip
    assert {path.name for path in (finished / "checkpoints").iterdir()} == {"last.ckpt", "best.ckpt"}


def test_tags_and_steps_are_the_same_in_both_logs(finished):
    log = events(finished)
    assert set(log.Tags()["scalars"]) == {
        "train/loss", "train/lr", "train/grad_norm", "val/loss", "val/perplexity", "val/word_perplexity",
        "val/bits_per_byte", "perf/tokens_per_s", "mem/resident",
    }  # fmt: skip
    assert [point.step for point in log.Scalars("val/loss")] == [0, 3, 6]
    assert [point.step for point in log.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    with (finished / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    for tag in log.Tags()["scalars"]:
        written = {int(row["step"]): float(row[tag]) for row in table if row[tag]}
        assert written == {p.step: pytest.approx(p.value, rel=1e-6) for p in log.Scalars(tag)}, tag


def test_hparams_tab_has_the_options(finished):
    content = events(finished).summary_metadata
    data = {tag: HParamsPluginData.FromString(m.plugin_data.content) for tag, m in content.items() if "hparams" in tag}
    hparams = data["_hparams_/session_start_info"].session_start_info.hparams
    assert hparams["mixer.name"].string_value == "mamba2"
    assert hparams["data.batch_size"].number_value == 4
    assert "_hparams_/experiment" not in data  # it would hide other runs' options
    assert data["_hparams_/session_end_info"].session_end_info.status == 1  # STATUS_SUCCESS


def test_best_is_the_lowest_validation(finished):
    losses = {int(row["step"]): float(row["val/loss"]) for row in rows(finished) if row["val/loss"]}
    losses.pop(0)
    assert checkpoint(finished, "best")["global_step"] == min(losses, key=losses.get)


def test_checkpoints_hold_plain_values_only(finished):
    for name in ("last", "best"):
        saved = checkpoint(finished, name)  # loads with weights_only=True
        assert type(saved["hyper_parameters"]["config"]) is dict
        json.dumps(saved["hyper_parameters"])


def test_two_runs_are_bit_equal(tmp_path):
    a, b = run(tmp_path, "run.name=a"), run(tmp_path, "run.name=b")
    for part in ("state_dict", "optimizer_states"):
        assert_same_state(checkpoint(a)[part], checkpoint(b)[part])
    assert rows(a) == rows(b)


def test_printout(tmp_path, capsys):
    run_dir = run(tmp_path, "run.name=a", "trainer.sample_tokens=5")
    out = capsys.readouterr().out
    for text in (
        "parameters", "bytes of state within 16 tokens", "fingerprint", "step 6/6  loss", "tokens/s",
        "bits per byte", "the validation loss fell by", "sample:", str(run_dir), "tensorboard --logdir",
    ):  # fmt: skip
        assert text in out, text
    table = {line[:14].strip(): line.split() for line in out.splitlines()}
    logged = [row for row in rows(run_dir) if row["val/loss"]]
    for name, tag in (("loss", "val/loss"), ("bits per byte", "val/bits_per_byte")):
        before, after = map(float, table[name][-2:])
        assert before == pytest.approx(float(logged[0][tag]), rel=1e-3)
        assert after == pytest.approx(float(logged[-1][tag]), rel=1e-3)


def test_recall_run_reports_accuracy(tmp_path, capsys):
    kinds = ["data.seq_len=16", "data.n_pairs=2", "data.examples=64", "data.vocab_size=32", "data.val=16:2:8,16:4:8"]
    run_dir = run(tmp_path, "run.name=a", "data=mqar", "trainer.val_batches=null", *kinds)
    assert "accuracy" in capsys.readouterr().out
    row = rows(run_dir)[-1]
    accuracies = [float(row[f"val/accuracy{end}"]) for end in ("", "/pairs_2", "/pairs_4")]
    assert accuracies[0] == pytest.approx(sum(accuracies[1:]) / 2)
    assert not row.get("val/bits_per_byte")


def test_bfloat16_keeps_parameters_in_float32(tmp_path):
    saved = checkpoint(run(tmp_path, "run.name=a", "trainer.precision=bf16-mixed"))
    assert {p.dtype for p in saved["state_dict"].values()} == {torch.float32}
    moments = saved["optimizer_states"][0]["state"].values()
    assert {m["exp_avg"].dtype for m in moments} == {torch.float32}


def test_mistake_in_the_data_leaves_no_folder(tmp_path, capsys):
    arguments = options(tmp_path, "run.name=a", f"data.path={tmp_path / 'nowhere'}")
    with pytest.raises(SystemExit) as end:
        run_cli(train.main, Config, arguments)
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "runs" / "a").exists()


@pytest.mark.parametrize("wrong", ["trainer.strategy=ddq", "trainer.accelerator=gpu"])
def test_absent_device_or_strategy_is_one_line(tmp_path, capsys, wrong):
    if "gpu" in wrong and torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(SystemExit) as end:
        run_cli(train.main, Config, options(tmp_path, "run.name=a", wrong))
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: trainer (")
    assert error.count("\n") == 1
    assert not (tmp_path / "runs" / "a").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_kernels_without_a_device_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    arguments = options(tmp_path, "run.name=a", "mixer=loglinear_mamba2", "mixer.backend=triton")
    with pytest.raises(SystemExit) as end:
        run_cli(train.main, Config, arguments)
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("error: mixer.backend=triton: needs a CUDA device")
    assert not (tmp_path / "runs" / "a").exists()


HYBRID = ("mixer=hybrid", "mixer.pattern=[loglinear_mamba2,softmax]", "mixer.options.loglinear_mamba2.backend=triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    ("asked", "interpret", "said"),
    [
        (HYBRID, "0", "mixer.options.loglinear_mamba2.backend=triton: needs a CUDA device, or TRITON_INTERPRET=1"),
        (
            ("mixer=mamba2", "mixer.backend=triton", "trainer.precision=bf16-mixed"),
            "1",
            "precision=bf16-mixed: mixer.backend=triton is interpreted in 32-true only",
        ),
        (("mixer=loglinear_gdn", "mixer.backend=triton"), "0", "mixer.backend=triton: needs a CUDA device, or"),
    ],
)
def test_kernels_that_cannot_run_are_one_line(asked, interpret, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    with pytest.raises(SystemExit) as end:
        run_cli(train.main, Config, options(tmp_path, "run.name=a", *asked))
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}")
    assert error.count("\n") == 1
    assert not (tmp_path / "runs" / "a").exists()


def test_existing_name_is_refused_and_untouched(tmp_path, finished, capsys):
    arguments = options(tmp_path, "run.name=one", f"run.dir={finished.parent}")
    before = sorted((p.name, p.stat().st_mtime_ns) for p in finished.rglob("*"))
    with pytest.raises(SystemExit) as end:
        run_cli(train.main, Config, arguments)
    assert end.value.code == 2
    assert "resume=auto" in capsys.readouterr().err
    assert sorted((p.name, p.stat().st_mtime_ns) for p in finished.rglob("*")) == before


def test_nonfinite_loss_ends_with_one_line(tmp_path, monkeypatch, capsys):
    def nll_sum(self, batch, micro_batch=0):
        return self.model.embedding.weight.sum() * torch.nan

    monkeypatch.setattr("src.module.LanguageModule.nll_sum", nll_sum)
    with pytest.raises(SystemExit) as end:
        train.main(config(tmp_path, "run.name=a"))
    assert end.value.code == 1
    errors = capsys.readouterr().err.strip().splitlines()
    assert [line for line in errors if line.startswith("error: ")] == errors[-1:]


def test_resume_command_can_be_pasted(tmp_path):
    cfg = config(tmp_path, "run.name=two words", f"run.dir={tmp_path / 'my runs'}")
    words = shlex.split(train.resume_command(cfg))
    assert words == [
        *["python", "-m", "src.train", "resume=auto"], "run.name=two words", f"run.dir={tmp_path / 'my runs'}"
    ]  # fmt: skip


def test_ranks_that_a_launcher_started_must_be_those_of_the_trainer(tmp_path, monkeypatch):
    for key, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match=r"trainer\.devices=1, .*2 ranks were started for 1"):
        run(tmp_path, "run.name=a")
    assert not (tmp_path / "runs" / "a").exists()


def test_validation_in_training_knows_the_words(finished):
    text = "".join(path.read_text() for path in (finished.parents[1] / "corpus").iterdir())
    session = json.loads((finished / "manifest.json").read_text())[-1]
    assert sum(session["data"][f"{split}.words"] for split in ("train", "val", "test")) == pytest.approx(
        len(text.split()), abs=2 * 40  # each file is cut twice, perhaps inside a word
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "status", "ranks"), [(15, 143, 1), (2, 130, 1), (15, 143, 2)])
def test_signal_saves_and_says_how_to_resume(tmp_path, signum, status, ranks):
    """With two ranks only the first gets the signal."""
    long = ["trainer.max_steps=100000", "trainer.checkpoint_every=100000", f"trainer.devices={ranks}"]
    arguments = options(tmp_path, "run.name=a", *long)
    process = spawn(*arguments)
    try:
        log = tmp_path / "runs" / "a" / "metrics.csv"
        deadline = time.monotonic() + 120
        while not (log.exists() and log.read_text().count("\n") > 5):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signum)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == status, err
    assert "resume with: python -m src.train resume=auto run.name=a" in out
    assert "Traceback" not in err
    step = checkpoint(tmp_path / "runs" / "a")["global_step"]
    assert f"after step {step}" in out
    manifest = json.loads((tmp_path / "runs" / "a" / "manifest.json").read_text())
    assert manifest[-1]["state"] == "Preempted"


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path):
    """Losses to rounding, one run folder, validation over all ranks exact."""
    write_corpus(tmp_path / "corpus")
    more = ["trainer.val_batches=null", "data.val_rows=null", "data.val_batch_size=4"]
    one = run(tmp_path, "run.name=one", *more)
    process = spawn(*options(tmp_path, "trainer.devices=2", *more))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    folders = [path for path in (tmp_path / "runs").iterdir() if path.name != "one"]
    assert len(folders) == 1
    assert out.count("run folder:") == 1
    for a, b in zip(rows(one), rows(folders[0]), strict=True):
        assert a["step"] == b["step"]
        for tag in ("train/loss", "train/grad_norm", "val/loss", "val/bits_per_byte"):
            assert bool(a[tag]) == bool(b[tag])
            if a[tag]:
                assert float(a[tag]) == pytest.approx(float(b[tag]), rel=1e-4), (a["step"], tag)


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu_between_log_steps(tmp_path, monkeypatch):
    """Steps 5 to 8 of 10 run with PyTorch raising at every synchronisation."""
    original = LanguageModule.training_step

    def training_step(self, batch, batch_idx):
        watched = 4 <= self.trainer.global_step < 8
        torch.cuda.set_sync_debug_mode("error" if watched else "default")
        return original(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModule, "training_step", training_step)
    quiet = ["trainer.log_every=10", "trainer.val_every=10", "trainer.checkpoint_every=10", "trainer.max_steps=10"]
    try:
        run_dir = run(tmp_path, "run.name=a", "trainer.accelerator=gpu", "data.packing=concatenate", *quiet)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert checkpoint(run_dir)["global_step"] == 10


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_gpu_run_equals_the_cpu(tmp_path, precision):
    more = [f"trainer.precision={precision}", "trainer.micro_batch_size=2", "data.val_batch_size=2"]
    cpu = run(tmp_path, "run.name=cpu", *more)
    gpu = run(tmp_path, "run.name=gpu", "trainer.accelerator=gpu", *more)
    for a, b in zip(rows(cpu), rows(gpu), strict=True):
        for tag in ("train/loss", "val/loss"):
            if a[tag]:
                assert float(a[tag]) == pytest.approx(float(b[tag]), rel=1e-3 if precision == "32-true" else 2e-2)
    results = evaluate(EvaluateConfig(run=str(gpu), device="cpu", output=str(tmp_path / "a.json")))
    assert results["loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["gated_deltanet", "loglinear_gdn"])
def test_loss_stays_finite_and_falls_over_300_steps(tmp_path, mixer):
    """Published code of this kind has shown NaN after about 100 steps."""
    size = ["model.d_model=32", "data.seq_len=64", "trainer.max_steps=300", "trainer.val_every=300"]
    table = rows(run(tmp_path, "run.name=a", f"mixer={mixer}", "optim.warmup_steps=50", *size))
    for tag in ("train/loss", "train/grad_norm"):
        assert all(math.isfinite(float(row[tag])) for row in table if row[tag]), tag
    losses = [float(row["val/loss"]) for row in table if row["val/loss"]]
    assert losses[-1] < losses[0] - 2
