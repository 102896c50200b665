"""Options from a terminal: --help, --cfg, exit statuses, ranks; and the project's own presets."""

import dataclasses
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from src import runs
from src.compose import CONFIGS, resolve
from src.config import Config, asdict, compose, from_dict, run_cli
from src.config_help import render
from src.errors import UserError
from src.registry import DATA, MIXERS
from tests.config_folder import made


def test_cfg_is_an_experiment(folder: Path, capsys: pytest.CaptureFixture) -> None:
    argv = [f"plugins={folder}/toy.py", "mixer=toy", "data=toy", "mixer.span=1,2", "optim.betas=0.5,0.6"]
    argv += ["trainer=debug", "run.name=1e-3"]
    run_cli(pytest.fail, argv=[*argv, "--cfg"])
    (folder / "printed.yaml").write_text(capsys.readouterr().out)
    assert compose(["experiment=printed.yaml"]) == compose(argv)


def test_help_lists_every_key_with_type_default_and_text(folder: Path) -> None:
    resolved = resolve(["mixer.width=5"], Config, folder / "configs")
    text = render(resolved)
    keys = [k for k in resolved.keys() if k not in ("mixer.name", "data.name")]  # noqa: SIM118
    for key in keys:
        assert f"\n  {key}: " in text
    assert "  mixer.width: int = 5\n      Taps of the toy." in text
    assert "  mixer.size: int | auto = auto\n" in text
    assert "  optim.betas: tuple[float, float] = [0.9, 0.95]\n" in text
    assert "  optim.schedule: cosine | wsd | constant = cosine\n" in text
    assert "  resume: auto | null = null\n" in text
    assert max(map(len, text.splitlines())) <= 100
    for group in ("mixer=", "data=", "model=", "trainer=", "experiment="):
        assert f"\n  {group}" in text
    lines = text.splitlines()
    for key in keys:
        at = next(i for i, line in enumerate(lines) if line.startswith(f"  {key}: "))
        assert any(line.startswith("      ") for line in lines[at + 1 : at + 3]), f"{key} has no help"


@dataclass
class Part:
    depth: int = 1
    """How deep."""


@dataclass(kw_only=True)
class Small:
    """Do one small thing."""

    run: str
    """A run."""
    prompt: str = ""
    """Text."""
    split: Literal["val", "test"] = "val"
    """Which."""
    part: Part = field(default_factory=Part)


def test_a_schema_without_groups(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert compose(["run=x", "split=test", "part.depth=2"], schema=Small) == Small(run="x", split="test", part=Part(2))
    assert compose(["run=x", "prompt=null {1: [2"], schema=Small).prompt == "null {1: [2"
    assert compose(["run=x", "prompt=null"], schema=Small).prompt == "null"
    assert compose(["run=x", "prompt="], schema=Small).prompt == ""
    for argv, part in [([], "run is required"), (["run=x", "experiment=y"], "unknown key 'experiment'")]:
        with pytest.raises(UserError, match=part):
            compose(argv, schema=Small)
    run_cli(pytest.fail, Small, ["--help"])
    text = capsys.readouterr().out
    assert text.startswith("Do one small thing.")
    assert "  run: str (required)\n      A run." in text
    assert "  part.depth: int = 1" in text
    assert "experiment" not in text


def test_run_cli_exit_status(folder: Path, capsys: pytest.CaptureFixture) -> None:
    seen = []
    run_cli(seen.append, Small, ["run=x"])
    assert seen == [Small(run="x")]

    def refuse(cfg: Small) -> None:
        raise UserError("two\nlines")

    for main, argv in [(refuse, ["run=x"]), (seen.append, ["run=x", "splt=val"])]:
        with pytest.raises(SystemExit) as caught:
            run_cli(main, Small, argv)
        assert caught.value.code == 2
        out, err = capsys.readouterr()
        assert not out
        assert err.startswith("error: ")
        assert err.count("\n") == 1
    with pytest.raises(ZeroDivisionError):
        run_cli(lambda cfg: 1 / 0, Small, ["run=x"])


def test_a_rank_runs_the_options_of_its_parent(folder: Path) -> None:
    """Rank 1 is started with another command line; what it runs is what its parent composed."""
    cfg = made(folder, "run.name=mine", "seed=5")
    runs.create(cfg)
    code = "from src.config import run_cli; run_cli(lambda c: print(c.seed, c.run.name), argv=['seed=6'])"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**_environment(), "LOCAL_RANK": "1"},
        capture_output=True,
        text=True,
    )
    assert result.stdout == "5 mine\n", result.stderr


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(CONFIGS.parent)}


# The project's own files


def _own(group: str) -> list[str]:
    return sorted(p.stem for p in (CONFIGS / group).glob("*.yaml"))


@pytest.mark.parametrize(
    "argument",
    [f"{g}={name}" for g in ("mixer", "data", "model", "trainer", "experiment") for name in _own(g)]
    + [f"mixer={name}" for name in MIXERS.names()]
    + [f"data={name}" for name in DATA.names()],
)
def test_every_choice_composes(argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = compose([argument])
    assert from_dict(asdict(cfg)) == cfg
    assert all(dataclasses.is_dataclass(part) for part in (cfg.mixer, cfg.data, cfg.model, cfg.optim))
    text = render(resolve([argument], Config, CONFIGS))
    assert argument.startswith("experiment=") or f" ({argument}):" in text


def test_default_run() -> None:
    cfg = compose()
    assert (cfg.mixer.name, cfg.data.name) == ("loglinear_gdn", "pystdlib")
    debug = compose(["trainer=debug"]).trainer
    assert debug.max_steps <= 10
    assert debug.val_batches <= 4
    assert not runs.is_child({})
