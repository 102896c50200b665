import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from src.callbacks.manifest import git_state
from src.module import LanguageModule
from src.registry import DATA
from tests.training import run

COPY_TASK = Path(__file__).parents[1] / "plugins" / "copy_task.py"


def sessions(run_dir):
    return json.loads((run_dir / "manifest.json").read_text())


def test_manifest_describes_the_run(tmp_path):
    run_dir = run(tmp_path, "run.name=a", "seed=7")
    (session,) = sessions(run_dir)
    assert session["state"] == "finished"
    assert (session["from_step"], session["to_step"], session["seed"]) == (0, 6, 7)
    assert session["config"]["data"]["batch_size"] == 4
    assert session["data"]["fingerprint"]
    assert session["argv"] == sys.argv
    assert session["versions"]["torch"]
    assert session["hardware"]["device"] == "cpu"
    assert session["started"] <= session["finished"]


def test_failure_is_recorded_and_a_resumed_run_adds_a_session(tmp_path, monkeypatch):
    def fail(self, batch, batch_idx):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(LanguageModule, "training_step", fail)
        with pytest.raises(ZeroDivisionError):
            run(tmp_path, "run.name=a")
    run_dir = run(tmp_path, "run.name=a", "resume=auto")
    assert [session["state"] for session in sessions(run_dir)] == ["ZeroDivisionError", "finished"]


def test_git_state(tmp_path):
    assert git_state(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("one")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    state = git_state(tmp_path)
    assert len(state["commit"]) == 40
    assert state["dirty"] is False
    (tmp_path / "file").write_text("two")
    assert git_state(tmp_path)["dirty"] is True
    subprocess.run([*git, "checkout", "-q", "file"], check=True)
    assert git_state(tmp_path)["dirty"] is False
    (tmp_path / "mine.py").write_text("a new mixer")
    assert git_state(tmp_path)["dirty"] is True


def test_plugin_files_are_recorded_by_content(tmp_path):
    plugin = tmp_path / "manifest_task.py"
    plugin.write_text(COPY_TASK.read_text())
    try:
        run_dir = run(tmp_path, "run.name=a", f"plugins=[{plugin}]", "data=manifest_task", "data.seq_len=8")
    finally:
        DATA._files.pop("manifest_task", None)  # other tests look at the registry as it is without it
    assert sessions(run_dir)[0]["plugins"] == {str(plugin): hashlib.sha256(plugin.read_bytes()).hexdigest()}
