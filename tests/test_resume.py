"""A run that was stopped and continued equals the one that was not, bit for bit."""

import os
import signal

import pytest

from src.callbacks.preemption import Preempted, Preemption
from src.errors import UserError
from src.module import LanguageModule
from tests.training import assert_same_state, checkpoint, rows, run

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
    whole = run(tmp_path, "run.name=whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 6, RuntimeError)
        with pytest.raises(RuntimeError, match="killed"):
            run(tmp_path, "run.name=parts")
    parts = tmp_path / "runs" / "parts"
    assert checkpoint(parts)["global_step"] == 4
    assert [row["step"] for row in rows(parts)] == ["0", "1", "2", "3", "4", "5"]
    assert_equal_runs(run(tmp_path, "run.name=parts", "resume=auto"), whole)


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
    assert capsys.readouterr().out == "run a is finished: 6 steps done, trainer.max_steps=6\n"
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


def test_second_interrupt_aborts_at_once(tmp_path):
    from src.callbacks.preemption import Aborted

    callback = Preemption(tmp_path / "last.ckpt")
    callback._handle(signal.SIGINT, None)
    with pytest.raises(Aborted):
        callback._handle(signal.SIGINT, None)
