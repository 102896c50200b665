"""A run that was stopped and continued equals the one that was not, bit for bit."""

import os
import signal
import subprocess
import sys

import pytest

from src import runs
from src.callbacks.preemption import Preempted, Preemption
from src.config import Config, run_cli
from src.data.common.tokenizer import train_bpe
from src.errors import UserError
from src.module import LanguageModule
from src.train import main
from tests.training import assert_same_state, checkpoint, options, rows, run, write_corpus

PARTS = ("state_dict", "optimizer_states", "lr_schedulers", "global_step")


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int, how: type[BaseException] | int) -> None:
    """Raise an exception, or send this process a signal, in the micro-batches of optimizer step `step`."""
    original = LanguageModule.training_step

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == step - 1:
            if isinstance(how, int):
                os.kill(os.getpid(), how)
            else:
                raise how("killed")
        return original(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModule, "training_step", training_step)


def assert_equal_runs(a, b) -> None:
    for part in PARTS:
        assert_same_state(checkpoint(a)[part], checkpoint(b)[part], part)
    assert_same_state(checkpoint(a, "best")["state_dict"], checkpoint(b, "best")["state_dict"])
    assert rows(a) == rows(b)


@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize("step", [3, 4, 5])
def test_resumed_run_equals_uninterrupted_one(tmp_path, monkeypatch, seed, step, micro):
    """Validation is due after step 3, checkpoints after 2, 4 and 6; the signal comes in step 3, 4 or 5."""
    more = [f"seed={seed}", f"trainer.micro_batch_size={micro or 'null'}"]
    whole = run(tmp_path, "run.name=whole", *more)
    with monkeypatch.context() as patch:
        stop_after(patch, step, signal.SIGTERM)
        with pytest.raises(Preempted, match=rf"SIGTERM after step {step}.*last.ckpt"):
            run(tmp_path, "run.name=parts", *more)
    assert checkpoint(tmp_path / "runs" / "parts")["global_step"] == step
    assert_equal_runs(run(tmp_path, "run.name=parts", "resume=auto", *more), whole)


def test_signal_in_the_last_step_lets_the_run_end(tmp_path, monkeypatch):
    whole = run(tmp_path, "run.name=whole")
    stop_after(monkeypatch, 6, signal.SIGTERM)
    assert_equal_runs(run(tmp_path, "run.name=signalled"), whole)


def test_killed_run_continues_from_its_last_checkpoint(tmp_path, monkeypatch):
    """Killed in step 6 with a checkpoint of step 4: what was logged of step 5 is replaced, not doubled."""
    more = ["trainer.max_steps=8"]
    whole = run(tmp_path, "run.name=whole", *more)
    with monkeypatch.context() as patch:
        stop_after(patch, 6, RuntimeError)
        with pytest.raises(RuntimeError, match="killed"):
            run(tmp_path, "run.name=parts", *more)
    parts = tmp_path / "runs" / "parts"
    assert checkpoint(parts)["global_step"] == 4
    assert [row["step"] for row in rows(parts)] == ["0", "1", "2", "3", "4", "5"]
    assert_equal_runs(run(tmp_path, "run.name=parts", "resume=auto", *more), whole)


@pytest.mark.parametrize("every", [3, 4])
def test_run_killed_in_its_last_validation_makes_up_for_it(tmp_path, monkeypatch, every):
    """Whether Lightning validates at that step too (every 3 of 6 steps) or not (every 4)."""
    more = [f"trainer.val_every={every}", "trainer.checkpoint_every=100"]
    whole = run(tmp_path, "run.name=whole", *more)
    original = LanguageModule.validation_step

    def validation_step(self, batch, batch_idx):
        if self.trainer.global_step == 6:
            raise RuntimeError("killed")
        return original(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(LanguageModule, "validation_step", validation_step)
        with pytest.raises(RuntimeError, match="killed"):
            run(tmp_path, "run.name=parts", *more)
    parts = run(tmp_path, "run.name=parts", "resume=auto", *more)
    assert_equal_runs(parts, whole)
    assert checkpoint(parts)["validated_step"] == 6


def test_last_validation_runs_once_and_is_in_the_last_checkpoint(tmp_path, monkeypatch):
    validated = []
    original = LanguageModule.on_validation_epoch_end

    def on_validation_epoch_end(self):
        original(self)
        validated.append(self.trainer.global_step)

    monkeypatch.setattr(LanguageModule, "on_validation_epoch_end", on_validation_epoch_end)
    saved = checkpoint(run(tmp_path, "run.name=a"))
    assert validated == [0, 3, 6]
    assert saved["validated_step"] == 6
    best = next(state["best"] for name, state in saved["callbacks"].items() if name.startswith("BestCheckpoint"))
    losses = [float(row["val/loss"]) for row in rows(tmp_path / "runs" / "a") if row["val/loss"]]
    assert best == min(losses[1:])  # an extended run replaces best.ckpt only by a better one


def test_changed_text_is_refused_and_nothing_overwritten(tmp_path, capsys):
    more = ["run.name=a", f"data.cache_dir={tmp_path / 'cache'}"]  # a cache that cannot know the changed text yet
    run_dir = run(tmp_path, *more)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    (tmp_path / "corpus" / "new.txt").write_text("one more file\n" * 9)
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        run_cli(main, Config, options(tmp_path, *more, "resume=auto", "trainer.max_steps=9"))
    assert end.value.code == 2
    *notes, error = capsys.readouterr().err.splitlines()
    assert error.startswith("error: run 'a' cannot be continued: its data changed (fingerprint ")
    assert [note.split()[0] for note in notes] == ["tokenised"]  # the changed text, which tells its tokenizer and rows
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_changed_tokenizer_is_refused(tmp_path):
    text = "".join(path.read_text() for path in write_corpus(tmp_path / "corpus").iterdir())
    file = tmp_path / "mine.json"
    more = [f"data.tokenizer={file}"]
    file.write_text(train_bpe([text], 300).core.to_str())
    run(tmp_path, "run.name=a", *more)
    file.write_text(train_bpe([text[: len(text) // 2]], 300).core.to_str())
    with pytest.raises(UserError, match=r"data\.tokenizer=.*mine.json is not the one that the run keeps"):
        run(tmp_path, "run.name=a", "resume=auto", "trainer.max_steps=9", *more)


def test_resume_says_what_is_done_otherwise(tmp_path, capsys):
    run(tmp_path, "run.name=a")
    capsys.readouterr()
    run(tmp_path, "run.name=a", "resume=auto", "trainer.max_steps=8", "trainer.log_every=2")
    assert "changed: trainer.max_steps=8, not 6; trainer.log_every=2, not 1\n" in capsys.readouterr().out


def test_run_killed_before_its_first_checkpoint_starts_again(tmp_path, monkeypatch):
    whole = run(tmp_path, "run.name=whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 2, RuntimeError)
        with pytest.raises(RuntimeError, match="killed"):
            run(tmp_path, "run.name=parts")
    assert_equal_runs(run(tmp_path, "run.name=parts", "resume=auto"), whole)


def test_resume_starts_a_run_that_is_not_there(tmp_path):
    assert_equal_runs(run(tmp_path, "run.name=a", "resume=auto"), run(tmp_path, "run.name=b"))


def test_resuming_a_finished_run_says_so(tmp_path, capsys):
    run_dir = run(tmp_path, "run.name=a")
    before = (run_dir / "checkpoints" / "last.ckpt").stat().st_mtime_ns
    capsys.readouterr()
    run(tmp_path, "run.name=a", "resume=auto")
    said = capsys.readouterr().out
    assert said.startswith("run a is finished: 6 steps done, trainer.max_steps=6; ")
    assert said.count("\n") == 1
    assert (run_dir / "checkpoints" / "last.ckpt").stat().st_mtime_ns == before


def test_finished_run_can_be_made_longer(tmp_path):
    """With a schedule that does not depend on the end, 4 steps and 6 more are 10."""
    more = ["optim.schedule=constant", "trainer.val_every=2"]
    whole = run(tmp_path, "run.name=whole", "trainer.max_steps=10", *more)
    run(tmp_path, "run.name=parts", "trainer.max_steps=4", *more)
    parts = run(tmp_path, "run.name=parts", "trainer.max_steps=10", "resume=auto", *more)
    assert_equal_runs(parts, whole)


def test_other_micro_batches_after_a_resume_see_the_same_samples(tmp_path, monkeypatch):
    """Steps, validations and samples stay where they were; sums in another order differ by rounding only."""
    more = ["data.val_batch_size=4"]
    whole = run(tmp_path, "run.name=whole", *more)
    with monkeypatch.context() as patch:
        stop_after(patch, 3, signal.SIGTERM)
        with pytest.raises(Preempted):
            run(tmp_path, "run.name=parts", "trainer.micro_batch_size=2", *more)
    parts = run(tmp_path, "run.name=parts", "trainer.micro_batch_size=1", "resume=auto", *more)
    assert checkpoint(parts)["global_step"] == 6
    a, b = rows(whole), rows(parts)
    assert [row["step"] for row in a] == [row["step"] for row in b]
    for x, y in zip(a, b, strict=True):
        assert bool(x["val/loss"]) == bool(y["val/loss"])
        for tag in ("train/loss", "val/loss"):
            if x[tag]:
                assert float(x[tag]) == pytest.approx(float(y[tag]), rel=1e-4)


def test_other_options_are_refused(tmp_path):
    run(tmp_path, "run.name=a")
    with pytest.raises(UserError, match=r"optim\.lr"):
        run(tmp_path, "run.name=a", "resume=auto", "optim.lr=0.1", "trainer.max_steps=9")


def test_signal_handlers_are_put_back(tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    run(tmp_path, "run.name=a")
    stop_after(monkeypatch, 2, signal.SIGINT)
    with pytest.raises(Preempted) as stop:
        run(tmp_path, "run.name=b")
    assert stop.value.exit_status == 130
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_before_training_ends_in_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, signum, status):
    before = signal.getsignal(signal.SIGTERM)
    # A shell's background processes ignore Ctrl-C, and these tests may be one.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(LanguageModule, "configure_model", lambda self: os.kill(os.getpid(), signum))
            with pytest.raises(SystemExit) as end:
                run_cli(main, Config, options(tmp_path, "run.name=a"))
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert end.value.code == status
    name = signal.Signals(signum).name
    assert (
        capsys.readouterr().err.splitlines()[-1].startswith(f"stopped by {name} before training began: the same comm")
    )
    assert not (tmp_path / "runs" / "a").exists()
    assert signal.getsignal(signal.SIGTERM) == before
    run(tmp_path, "run.name=a")


def test_a_folder_that_a_kill_left_before_training_is_free(tmp_path):
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / runs.LOCK).touch()
    with runs.hold(folder), pytest.raises(UserError, match="'a' exists"):
        run(tmp_path, "run.name=a")
    (folder / runs.LOCK).touch()
    run(tmp_path, "run.name=a")
    with pytest.raises(UserError, match="'a' exists"):
        run(tmp_path, "run.name=a")


def test_second_interrupt_aborts_at_once(tmp_path):
    from src.callbacks.preemption import Aborted

    callback = Preemption(tmp_path / "last.ckpt")
    callback._handle(signal.SIGINT, None)
    with pytest.raises(Aborted):
        callback._handle(signal.SIGINT, None)


def test_a_run_is_trained_by_one_process_at_a_time(tmp_path):
    folder = run(tmp_path, "run.name=a")
    with runs.hold(folder):
        assert runs.is_held(folder)
        with pytest.raises(UserError, match="run 'a' is being trained by another process"):
            run(tmp_path, "run.name=a", "resume=auto", "trainer.max_steps=9")
    assert not runs.is_held(folder)
    run(tmp_path, "run.name=a", "resume=auto", "trainer.max_steps=9")
    assert not (folder / runs.LOCK).exists()


KILLED = '''
"""A plugin whose import makes every rank die in the micro-batches of step 5."""
import os
from src.mixers.mamba2 import Mamba2
from src.module import LanguageModule

original = LanguageModule.training_step

def training_step(self, batch, batch_idx):
    if self.trainer.global_step == 4:
        os._exit(9)
    return original(self, batch, batch_idx)

LanguageModule.training_step = training_step

class Dying(Mamba2):
    pass
'''


@pytest.mark.slow
@pytest.mark.parametrize("carry", ["true", "false"])
def test_two_killed_ranks_with_workers_continue_bit_for_bit(tmp_path, carry):
    """Killed in step 5 with a checkpoint of step 3, in mid-epoch, two loader processes a rank."""
    more = ["trainer.devices=2", "data.num_workers=2", "trainer.checkpoint_every=3", "trainer.micro_batch_size=1"]
    more += [f"data.carry_state={carry}", "mixer=loglinear_mamba2"]
    plugin = tmp_path / "dying.py"
    plugin.write_text(KILLED)

    def train(*arguments: str) -> int:
        command = [sys.executable, "-m", "src.train", *options(tmp_path, *more, *arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=environment, capture_output=True, timeout=300, check=False).returncode

    assert train("run.name=whole") == 0
    assert train("run.name=parts", f"plugins={plugin}") != 0
    parts, whole = tmp_path / "runs" / "parts", tmp_path / "runs" / "whole"
    assert checkpoint(parts)["global_step"] == 3
    assert train("run.name=parts", "resume=auto", "plugins=[]") == 0
    assert_equal_runs(parts, whole)
    if carry == "true":
        ranks = [checkpoint(run_dir)["carried_states"] for run_dir in (parts, whole)]
        assert [len(saved) for saved in ranks] == [2, 2]  # one a rank
        for a, b in zip(*ranks, strict=True):
            assert a.keys() == b.keys() == {0, 1}  # two micro-batches
            assert_same_state(a[1].layers[0]["memory"].levels, b[1].layers[0]["memory"].levels)
