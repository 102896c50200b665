"""Plugins are found by name without imports, loaded alone, and fail with one line that says why."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from src import registry
from src.errors import UserError
from src.mixers import Mixer
from src.registry import DATA, MIXERS, build_options, load_file

MIXER = """
    from dataclasses import dataclass
    from typing import Literal
    from src.mixers import Mixer

    class Toy(Mixer):
        @dataclass
        class Config(Mixer.Config):
            width: int = 4
            "Taps."
            sides: list[int] | None = None
            kind: Literal["sum", "mean"] = "sum"

        def mix(self, x, state, cu_seqlens, return_state):
            return x, None

        def flops_per_token(self, seq_len):
            return 0.0

        def state_bytes(self, seq_len, dtype=None):
            return 0
"""
DATA_MODULE = """
    from src.data import DataModule

    class ToyData(DataModule):
        vocab_size = 2
"""


@pytest.fixture(autouse=True)
def _forget_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (MIXERS, DATA):
        monkeypatch.setattr(kind, "_files", {})


def write(path: Path, *sources: str) -> Path:
    path.write_text("\n".join(textwrap.dedent(source) for source in sources))
    return path


def error_of(call, *args) -> str:
    with pytest.raises(UserError) as caught:
        call(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_names_are_files_without_underscore() -> None:
    assert {"softmax", "loglinear_gdn", "hybrid"} <= set(MIXERS.names())
    assert not any(name.startswith("_") for name in MIXERS.names() + DATA.names())
    assert "common" not in DATA.names()


def test_listing_names_imports_no_plugin() -> None:
    code = """
        import sys
        from src.registry import DATA, MIXERS
        MIXERS.names(), DATA.names()
        bad = [m for m in sys.modules if m.startswith(("src.mixers", "src.data", "torch", "lightning"))]
        assert not bad, bad
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_get_imports_only_the_chosen_plugin() -> None:
    code = """
        import sys
        from src.registry import MIXERS
        assert MIXERS.get("softmax").__module__ == "src.mixers.softmax"
        assert "src.mixers.mamba2" not in sys.modules and "triton" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


@pytest.mark.parametrize("kind", [MIXERS, DATA])
def test_every_plugin_loads_and_its_options_have_help(kind: registry.Registry) -> None:
    from src.config_help import docstrings
    from src.options import type_hints

    for name in kind.names():
        cls = kind.get(name)
        assert issubclass(cls, kind.base)
        assert kind.name_of(cls) == name
        assert set(type_hints(cls.Config)) == set(docstrings(cls.Config)), name


def test_unknown_name_lists_and_suggests() -> None:
    message = error_of(MIXERS.get, "loglinear_gnd")
    assert "did you mean 'loglinear_gdn'?" in message
    assert "softmax" in message


def test_a_file_is_a_plugin_named_by_its_stem(tmp_path: Path) -> None:
    load_file(write(tmp_path / "toy.py", MIXER))
    cls = MIXERS.get("toy")
    assert issubclass(cls, Mixer)
    assert cls.Config().width == 4
    assert "toy" not in DATA.names()


def test_a_file_may_define_a_mixer_and_a_data_module(tmp_path: Path) -> None:
    load_file(write(tmp_path / "both.py", MIXER, DATA_MODULE))
    assert MIXERS.get("both").__name__ == "Toy"
    assert DATA.get("both").__name__ == "ToyData"


def test_a_file_is_executed_again_only_when_it_changed(tmp_path: Path) -> None:
    file = write(tmp_path / "toy.py", MIXER)
    load_file(file)
    first = MIXERS.get("toy")
    load_file(file)
    assert MIXERS.get("toy") is first
    write(file, MIXER.replace("width: int = 4", "width: int = 5"))
    load_file(file)
    assert MIXERS.get("toy").Config().width == 5


def test_equal_stems_in_other_folders_do_not_mix(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "toy.py", MIXER)
    load_file(tmp_path / "a" / "toy.py")
    message = error_of(load_file, tmp_path / "b" / "toy.py")
    assert str(tmp_path / "a" / "toy.py") in message
    assert str(tmp_path / "b" / "toy.py") in message


def test_a_file_named_like_a_built_in_names_both(tmp_path: Path) -> None:
    file = write(tmp_path / "softmax.py", MIXER)
    message = error_of(load_file, file)
    assert str(file) in message
    assert str(Path("src", "mixers", "softmax.py")) in message
    assert MIXERS.get("softmax").__module__ == "src.mixers.softmax"


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("import no_such_package_x.sub", ["no_such_package_x", "pip install no_such_package_x"]),
        ("from src.mixers import Mixr", ["Mixr", "broken.py:"]),
        ("def f(:", ["SyntaxError", "broken.py:"]),
        ("1 / 0", ["ZeroDivisionError", "broken.py:"]),
        ("from src.no_such import x", ["src.no_such"]),
        ("x = 1", ["Mixer", "DataModule"]),
    ],
)
def test_a_broken_file_says_what_failed(tmp_path: Path, source: str, parts: list[str]) -> None:
    file = write(tmp_path / "broken.py", source)
    message = error_of(load_file, file)
    assert all(part in message for part in [*parts, str(file)])


def test_two_classes_are_named(tmp_path: Path) -> None:
    more = "\nclass Second(Toy):\n    pass\n"
    message = error_of(load_file, write(tmp_path / "two.py", MIXER, more))
    assert "Toy, Second" in message
    load_file(write(tmp_path / "two.py", MIXER.replace("Toy", "_Base"), "class Second(_Base):\n    pass"))
    assert MIXERS.get("two").__name__ == "Second"


def test_options_without_dataclass_are_an_error(tmp_path: Path) -> None:
    load_file(write(tmp_path / "bare.py", MIXER.replace("@dataclass\n", "\n")))
    assert "lacks @dataclass" in error_of(MIXERS.get, "bare")


@pytest.mark.parametrize("name", ["missing.py", "folder", "notes.txt"])
def test_no_such_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").touch()
    assert str(tmp_path / name) in error_of(load_file, tmp_path / name)


def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """A distribution `toydist` whose module `toydist_mixers` holds the class Toy."""
    write(tmp_path / "toydist_mixers.py", MIXER)
    info = tmp_path / "toydist-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toydist\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[src.mixers]\n{name} = {value}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "toydist_mixers", raising=False)


def test_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "outside", "toydist_mixers:Toy")
    assert "outside" in MIXERS.names()
    assert "toydist_mixers" not in sys.modules
    cls = MIXERS.get("outside")
    assert build_options(cls, {}, "mixer").name == "outside"
    monkeypatch.delitem(sys.modules, "toydist_mixers")


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("softmax", "toydist_mixers:Toy", ["toydist", "softmax.py", "taken twice"]),
        ("outside", "toydist_mixers:dataclass", ["outside", "Mixer"]),
        ("outside", "toydist_mixers:Absent", ["outside", "Absent"]),
        ("outside", "toydist_absent:Toy", ["outside", "toydist_absent"]),
    ],
)
def test_bad_entry_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, parts: list[str]
) -> None:
    install(tmp_path, monkeypatch, name, value)
    message = error_of(MIXERS.get, name)
    assert all(part in message for part in parts)


def test_build_options(tmp_path: Path) -> None:
    load_file(write(tmp_path / "toy.py", MIXER))
    cls = MIXERS.get("toy")
    options = build_options(cls, {"width": "8", "sides": "1,2", "kind": "mean"}, "mixer.options.toy")
    assert (options.name, options.width, options.sides, options.kind) == ("toy", 8, [1, 2], "mean")
    message = error_of(build_options, cls, {"widht": 8}, "mixer.options.toy")
    assert "'mixer.options.toy.widht'" in message
    assert "did you mean 'mixer.options.toy.width'" in message
    message = error_of(build_options, cls, {"kind": "man"}, "mixer.options.toy")
    assert message.startswith("mixer.options.toy.kind=man: expected one of: sum, mean")
