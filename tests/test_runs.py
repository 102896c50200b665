"""Run folders: one winner, no overwriting, names, ranks, finding."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from src import runs
from src.errors import UserError
from src.files import to_yaml
from src.options import asdict

ROOT = Path(runs.__file__).resolve().parent.parent


# Stand-ins for the parts of a Config that matter here: processes that import torch cost seconds each.


@dataclass
class Run:
    name: str | None = None
    dir: str = "runs"


@dataclass
class Trainer:
    max_steps: int = 10
    num_nodes: int = 1


@dataclass
class Plugin:
    name: str = "toy"
    width: int = 1


@dataclass
class Options:
    run: Run = field(default_factory=Run)
    resume: str | None = None
    mixer: Plugin = field(default_factory=Plugin)
    data: Plugin = field(default_factory=Plugin)
    trainer: Trainer = field(default_factory=Trainer)


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for key in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("SRC_RUN", "null")  # so that what a test sets is undone


def options(name: str | None = None, resume: str | None = None, **mixer: Any) -> Options:
    return Options(Run(name), resume, Plugin(**mixer))


def made(name: str = "a", **mixer: Any) -> Path:
    """A run folder with its saved options."""
    cfg = options(name, **mixer)
    folder = runs.create(cfg)
    (folder / "config.yaml").write_text(to_yaml(asdict(cfg)))
    return folder


def error_of(call, *args) -> str:
    with pytest.raises(UserError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_named_run() -> None:
    assert runs.create(options("a")) == Path("runs/a")
    assert Path("runs/a").is_dir()


def test_an_existing_name_is_never_overwritten() -> None:
    made("a")
    message = error_of(runs.create, options("a"))
    assert "'a' exists in runs/" in message
    assert "resume=auto" in message


def test_generated_names() -> None:
    cfgs = [options() for _ in range(5)]
    folders = [runs.create(cfg) for cfg in cfgs]
    assert len(set(folders)) == 5
    for cfg, folder in zip(cfgs, folders, strict=True):
        assert folder.name.startswith("toy-toy-")
        assert cfg.run.name == folder.name
        runs.check_name(folder.name)


def test_processes_started_together_never_share_a_folder() -> None:
    code = (
        "import sys; from tests.test_runs import options; from src import runs\n"
        "sys.stdin.read(); print(runs.create(options()))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    jobs = [subprocess.Popen([sys.executable, "-c", code], env=env, **pipes) for _ in range(4)]
    for job in jobs:
        job.stdin.close()
    names = [job.stdout.read().strip() for job in jobs]
    assert [job.wait() for job in jobs] == [0] * 4
    assert len(set(names)) == 4
    assert sorted(f.name for f in Path("runs").iterdir()) == sorted(Path(n).name for n in names)


@pytest.mark.parametrize(
    "name",
    ["", " ", "a/b", "/a", "..", ".", "../a", ".hidden", "a\\b", "a\nb", "a\0b", " a", "a ", "ä" * 101],
)
def test_refused_names(name: str) -> None:
    from src.config import RunConfig

    assert "run.name" in error_of(RunConfig, name)
    assert "run.name" in error_of(runs.create, options(name))
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", ["a", "a.b", "lr=1e-3", "größe", "a b", "-", "x" * 200])
def test_allowed_names(name: str) -> None:
    assert runs.create(options(name)).name == name


def test_the_runs_folder_is_a_file() -> None:
    Path("runs").touch()
    assert "runs" in error_of(runs.create, options("a"))


# Resuming


def test_resume_starts_and_continues() -> None:
    assert runs.create(options("a", "auto")) == runs.create(options("a", "auto"))
    assert "run.name" in error_of(runs.create, options(None, "auto"))


def test_resume_refuses_another_model_but_not_a_longer_run() -> None:
    made("a")
    message = error_of(runs.create, options("a", "auto", width=2))
    assert "mixer.width=2, not 1" in message
    longer = options("a", "auto")
    longer.trainer.max_steps += 100
    assert runs.create(longer) == Path("runs/a")


def test_resume_composes_from_the_saved_options() -> None:
    from src.config import compose, save

    cfg = compose(["run.name=a", "mixer=softmax", "seed=3", "trainer.max_steps=7"])
    save(cfg, runs.create(cfg) / "config.yaml")
    again = compose(["run.name=a", "resume=auto", "trainer.max_steps=9"])
    assert (again.mixer.name, again.seed, again.trainer.max_steps) == ("softmax", 3, 9)
    assert again.resume == "auto"
    assert runs.create(again) == Path("runs/a")
    message = error_of(runs.create, compose(["run.name=a", "resume=auto", "mixer=mamba2"]))
    assert "mixer.name=mamba2, not softmax" in message
    assert compose(["run.name=b", "resume=auto"]).mixer.name == "loglinear_gdn"


# Ranks


def test_is_child() -> None:
    assert not runs.is_child({})
    assert not runs.is_child({"LOCAL_RANK": "0", "NODE_RANK": "0", "WORLD_SIZE": "2"})
    assert runs.is_child({"LOCAL_RANK": "1", "NODE_RANK": "0"})
    assert runs.is_child({"NODE_RANK": "1"})
    assert runs.is_child({"RANK": "3", "LOCAL_RANK": "0"})
    assert not runs.is_child({"RANK": "0", "LOCAL_RANK": "0"})
    assert runs.is_child({"SLURM_PROCID": "1"})


RANK = """
import os, subprocess, sys
from tests.test_runs import options
from src import runs
try:
    cfg = options(width=int(sys.argv[1]))
    print(runs.create(cfg).resolve(), cfg.run.name)
except Exception as error:
    print(error)
"""


def rank(width: int = 1, through_shell: bool = False, **env: str) -> str:
    command = [sys.executable, "-c", RANK, str(width)]
    if through_shell:  # another parent than this process
        command = [sys.executable, "-c", f"import subprocess; subprocess.run({command!r})"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()


def test_other_ranks_inherit_the_folder() -> None:
    folder = runs.create(options()).resolve()
    assert rank(LOCAL_RANK="1") == f"{folder} {folder.name}"
    assert len(list(Path("runs").iterdir())) == 1
    # A second run of the same process hands down its own folder.
    second = runs.create(options()).resolve()
    assert rank(LOCAL_RANK="1") == f"{second} {second.name}"


def test_other_ranks_have_the_same_options() -> None:
    runs.create(options())
    assert rank(width=2, LOCAL_RANK="1") == ("this rank was given other options than rank 0: mixer.width=2, not 1")


def test_a_left_over_variable_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = runs.create(options()).resolve()
    # A new run started by this process, and one by a process that merely inherited its environment.
    assert str(folder) != rank(LOCAL_RANK="0").split()[0]
    assert rank(through_shell=True, LOCAL_RANK="1").startswith("give run.name=")
    monkeypatch.setenv("LOCAL_RANK", "1")
    for broken in ("", "{", "[]", "{}", "null"):
        monkeypatch.setenv("SRC_RUN", broken)
        assert runs.inherited_config() is None
        assert error_of(runs.create, options()).startswith("give run.name=")


def test_an_outside_launcher_needs_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}
    for number in ("0", "1"):
        for key, value in {**torchrun, "RANK": number}.items():
            monkeypatch.setenv(key, value)
        assert "run.name" in error_of(runs.create, options())
    assert not Path("runs").exists()
    assert runs.create(options("a")) == Path("runs/a")  # rank 1 makes nothing
    assert not Path("runs").exists()
    monkeypatch.setenv("RANK", "0")
    assert runs.create(options("a")).is_dir()


# Finding


def test_find_by_name_and_path(tmp_path: Path) -> None:
    folder = made("first")
    for text in ("first", "runs/first", folder.resolve(), str(folder.resolve())):
        assert runs.find(text).resolve() == folder.resolve()
    assert runs.find("first", runs_dir=tmp_path / "runs").resolve() == folder.resolve()


def test_find_suggests() -> None:
    assert "there are no runs in runs" in error_of(runs.find, "x")
    made("first")
    made("second")
    Path("runs/empty").mkdir()
    message = error_of(runs.find, "frist")
    assert "did you mean 'first'" in message
    assert "first, second" in message or "second, first" in message
    assert "no run folder" in error_of(runs.find, "empty")
    assert "run is empty" in error_of(runs.find, "")


def test_checkpoint() -> None:
    folder = made("a")
    assert "no last checkpoint" in error_of(runs.checkpoint, folder)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "last.ckpt").touch()
    assert runs.checkpoint(folder) == folder / "checkpoints" / "last.ckpt"
