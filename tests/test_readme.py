"""What the README shows is what is there."""

import re
import shlex
from pathlib import Path

import pytest

from src.config import compose
from src.evaluate import EvaluateConfig
from src.generate import GenerateConfig
from src.train import Config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SCHEMAS = {"train": Config, "evaluate": EvaluateConfig, "generate": GenerateConfig}
COMMANDS = re.findall(r"^python -m src\.(train|evaluate|generate) ([^#\n]+)", README, flags=re.M)


def test_example_mixer_is_the_tested_one() -> None:
    assert (ROOT / "tests/plugins/ema.py").read_text() in README


@pytest.mark.parametrize(("command", "arguments"), COMMANDS, ids=[f"{c} {a.strip()}" for c, a in COMMANDS])
def test_commands_compose(command: str, arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_a_run = ("resume=auto", "init_from=")
    words = [word for word in shlex.split(arguments) if not word.startswith(needs_a_run)]
    compose(words, schema=SCHEMAS[command])


SWEEP = (ROOT / "docs/long_context_commands.txt").read_text()
PARTS = [line.split(" && ") for line in SWEEP.splitlines() if not line.startswith("#")]


def test_sweep_of_the_long_context_comparison_composes() -> None:
    """Every mixer with two seeds, each evaluation of a run that the same line has trained."""
    trained = {}
    for line in PARTS:
        for part in line:
            python, _, module, *words = shlex.split(part)
            assert python == "python"
            command = module.removeprefix("src.")
            cfg = compose([w for w in words if not w.startswith(("resume=", "init_from="))], schema=SCHEMAS[command])
            if command == "train":
                trained[cfg.run.name] = cfg
                [start] = [w.partition("=")[2] for w in words if w.startswith("init_from=")] or [None]
                assert start is None or start in trained
                assert cfg.run.name.endswith(f"-{cfg.seed}")
            else:
                assert cfg.run in trained
    kinds = {(name.split("-")[0], cfg.seed) for name, cfg in trained.items()}
    assert kinds == {(kind, seed) for kind in ("novels", "needles") for seed in (0, 1)}
    assert len(trained) == 2 * 2 * 5


def test_there_are_commands() -> None:
    assert {command for command, _ in COMMANDS} == set(SCHEMAS)


@pytest.mark.parametrize("target", re.findall(r"\]\(((?!http)[^)#]+)", README))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists(), target
