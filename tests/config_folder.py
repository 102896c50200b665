"""A configs folder of its own for the tests of options."""

import textwrap
from pathlib import Path

import pytest

from src.config import Config, compose
from src.errors import UserError
from src.registry import DATA, MIXERS

PLUGIN = """
    from dataclasses import dataclass, field
    from typing import Any, Literal
    from src.data import DataModule
    from src.errors import UserError
    from src.mixers import Mixer

    class Toy(Mixer):
        @dataclass
        class Config(Mixer.Config):
            width: int = 4
            "Taps of the toy."
            layers: list[int] = field(default_factory=lambda: [1])
            "Where it is."
            span: tuple[float, float] = (0.0, 1.0)
            "From, to."
            size: int | Literal["auto"] = "auto"
            "Any size."
            options: dict[str, Any] = field(default_factory=dict)
            "More."

            def __post_init__(self):
                if self.span[0] > self.span[1]:
                    raise UserError(f"mixer.span={list(self.span)}: must rise")
                if self.width == 13:
                    raise ValueError("unlucky\\nwidth")

    class ToyData(DataModule):
        pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configs folder with the plugin `toy` beside it, and an empty current directory."""
    for kind in (MIXERS, DATA):
        monkeypatch.setattr(kind, "_files", {})
    monkeypatch.delenv("SRC_RUN", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.py").write_text(textwrap.dedent(PLUGIN))
    for group in ("mixer", "data", "model", "trainer", "experiment"):
        (tmp_path / "configs" / group).mkdir(parents=True)
    write(tmp_path, "config", f"plugins: [{tmp_path}/toy.py]\nmixer: toy\ndata: toy")
    return tmp_path


def write(folder: Path, name: str, text: str) -> None:
    (folder / "configs" / f"{name}.yaml").write_text(textwrap.dedent(text))


def made(folder: Path, *argv: str) -> Config:
    return compose(argv, configs=folder / "configs")


def error_of(folder: Path, *argv: str) -> str:
    with pytest.raises(UserError) as caught:
        made(folder, *argv)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message
