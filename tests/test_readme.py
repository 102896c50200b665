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


def test_there_are_commands() -> None:
    assert {command for command, _ in COMMANDS} == set(SCHEMAS)


@pytest.mark.parametrize("target", re.findall(r"\]\(((?!http)[^)#]+)", README))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists(), target
