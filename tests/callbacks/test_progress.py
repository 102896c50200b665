import io

from src.callbacks import progress
from tests.training import run


def test_plain_lines_are_few(tmp_path, capsys):
    run(tmp_path, "run.name=a", "trainer.max_steps=60", "trainer.val_every=60", "trainer.log_every=1")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert 10 <= len(lines) <= 14
    assert lines[0].startswith("step  1/60  loss ")
    assert lines[-1].startswith("step 60/60  loss ")
    assert lines[-1].endswith("tokens/s")


def test_bar_on_a_terminal(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(progress.sys, "stdout", terminal)
    run(tmp_path, "run.name=a", "trainer.progress=null")
    text = terminal.getvalue()
    assert "100%" in text
    assert "tokens/s" in text
    assert "validation at step 3: loss" in text
    assert "step 6/6" not in text
