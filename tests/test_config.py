"""Options: precedence, types, one-line errors, and the way to disk and back."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from src import config
from src.config import Config, asdict, from_dict
from src.errors import UserError
from src.options import unknown_key
from src.registry import DATA, MIXERS
from tests.config_folder import error_of, made, write

# Composition


def test_real_dataclasses_of_the_chosen_plugins(folder: Path) -> None:
    cfg = made(folder)
    assert type(cfg) is Config
    assert type(cfg.mixer) is MIXERS.get("toy").Config
    assert type(cfg.data) is DATA.get("toy").Config
    assert (cfg.mixer.name, cfg.data.name) == ("toy", "toy")
    assert type(cfg.optim.betas) is tuple
    assert type(cfg.mixer.layers) is list
    assert "omegaconf" not in type(cfg.mixer.options).__module__


def test_precedence(folder: Path) -> None:
    key, default = "trainer.max_steps", config.TrainerConfig().max_steps
    assert made(folder).trainer.max_steps == default
    write(folder, "trainer/short", "max_steps: 1")
    assert made(folder, "trainer=short").trainer.max_steps == 1
    base = f"plugins: [{folder}/toy.py]\nmixer: toy\ndata: toy\n"
    write(folder, "config", base + "trainer: short")
    assert made(folder).trainer.max_steps == 1
    write(folder, "config", base + "trainer: {max_steps: 2}\nmodel: wide")
    write(folder, "model/wide", "d_model: 256")
    assert made(folder).trainer.max_steps == 2
    write(folder, "experiment/e", "trainer: {max_steps: 3}\nmodel: {d_model: 512}")
    cfg = made(folder, "experiment=e")
    assert (cfg.trainer.max_steps, cfg.model.d_model) == (3, 512)
    assert made(folder, "experiment=e", f"{key}=4").trainer.max_steps == 4
    assert made(folder, f"{key}=4", "experiment=e").trainer.max_steps == 4
    # A preset of the command line is of the command line.
    assert made(folder, "experiment=e", "trainer=short").trainer.max_steps == 1
    assert made(folder, "experiment=e", "trainer=short", f"{key}=5").trainer.max_steps == 5


def test_mixer_preset_of_the_same_and_of_another_name(folder: Path) -> None:
    write(folder, "mixer/toy", "width: 5")
    write(folder, "mixer/wide_toy", "name: toy\nwidth: 6\nlayers: [2, 3]")
    assert made(folder).mixer.width == 5
    cfg = made(folder, "mixer=wide_toy")
    assert (cfg.mixer.name, cfg.mixer.width, cfg.mixer.layers) == ("toy", 6, [2, 3])
    assert made(folder, "mixer=wide_toy", "mixer.width=7").mixer.width == 7
    write(folder, "mixer/nameless", "width: 6")
    assert "nameless" in error_of(folder, "mixer=nameless")


def test_options_of_another_mixer_than_the_chosen_one_are_left_out(folder: Path) -> None:
    write(folder, "experiment/e", "mixer: {name: toy, width: 9}\nmodel: {n_layers: 2}")
    assert made(folder, "experiment=e").mixer.width == 9
    cfg = made(folder, "experiment=e", "mixer=softmax")
    assert (cfg.mixer.name, cfg.model.n_layers) == ("softmax", 2)
    assert made(folder, "experiment=e", "mixer.name=softmax").mixer.name == "softmax"
    assert "'mixer.width'" in error_of(folder, "mixer=softmax", "mixer.width=9")


def test_an_experiment_may_be_a_file(folder: Path) -> None:
    (folder / "mine.yaml").write_text("seed: 7")
    assert made(folder, "experiment=mine.yaml").seed == 7
    assert "no such file" in error_of(folder, "experiment=other.yaml")


def test_mappings_merge(folder: Path) -> None:
    write(folder, "experiment/e", "mixer: {options: {a: {x: 1, y: 2}}}")
    cfg = made(folder, "experiment=e", "mixer.options.a.y=3", "mixer.options.b.z=[u, v]")
    assert cfg.mixer.options == {"a": {"x": 1, "y": 3}, "b": {"z": ["u", "v"]}}


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("mixer.layers=1,2", "layers", [1, 2]),
        ("mixer.layers=[1, 2]", "layers", [1, 2]),
        ("mixer.layers=3", "layers", [3]),
        ("mixer.layers=[]", "layers", []),
        ("mixer.span=0.1,2", "span", (0.1, 2.0)),
        ("mixer.span=[1e-3,2e1]", "span", (1e-3, 20.0)),
        ("mixer.size=8", "size", 8),
        ("mixer.size=auto", "size", "auto"),
    ],
)
def test_values(folder: Path, text: str, key: str, value: Any) -> None:
    found = getattr(made(folder, text).mixer, key)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["007", "1e-3", "true", "a,b", "${x", "???", "lr=1", "[x]", "ä ö", "2024-01-01"])
def test_text_stays_text_from_the_command_line_to_disk(folder: Path, text: str) -> None:
    cfg = made(folder, f"run.name={text}")
    assert cfg.run.name == text
    config.save(cfg, folder / "config.yaml")
    assert config.load(folder) == cfg


@pytest.mark.parametrize(
    ("key", "known"),
    [("data.packing", "data.haystack"), ("data.carry_state", "data.vocab_size"), ("mixer.beyond", "mixer.backend")],
)
def test_a_common_section_makes_no_suggestion(key: str, known: str) -> None:
    assert "did you mean" not in unknown_key(key, [known], ["x"])


@pytest.mark.parametrize("text", ["null", "none", "None"])
def test_null(folder: Path, text: str) -> None:
    assert made(folder, f"trainer.grad_clip={text}", f"run.name={text}").trainer.grad_clip is None


# Mistakes


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["optim.lrr=1"], ["'optim.lrr'", "did you mean 'optim.lr'", "weight_decay"]),
        (["lr=1"], ["'lr'", "did you mean 'optim.lr'"]),
        (["max_step=1"], ["'max_step'", "did you mean 'trainer.max_steps'"]),
        (["trainer.max=1"], ["'trainer.max'", "max_steps"]),
        (["trainer.max_steps.x=1"], ["'trainer.max_steps.x'", "'trainer.max_steps'"]),
        (["mixer.widht=1"], ["'mixer.widht'", "did you mean 'mixer.width'", "mixer=toy"]),
        (["mixr=toy"], ["'mixr'", "did you mean 'mixer'"]),
        (["expermient=x"], ["did you mean 'experiment'"]),
        (["mixer=tyo"], ["mixer=tyo", "did you mean 'toy'", "softmax"]),
        (["data=tyo"], ["data=tyo", "did you mean 'toy'"]),
        (["trainer=debg"], ["trainer=debg", "did you mean 'debug'", "gpu"]),
        (["model=debg"], ["model=debg", "wide"]),
        (["experiment=x"], ["experiment", "'x'", "known"]),
        (["experiment=../experiment/known"], ["experiment", "known"]),
        (["mixer="], ["mixer=", "toy"]),
        (["trainer.max_steps="], ["trainer.max_steps=", "missing", "an integer"]),
        (["trainer.max_steps=many"], ["trainer.max_steps=many", "an integer"]),
        (["trainer.max_steps=1.5"], ["trainer.max_steps=1.5", "an integer"]),
        (["trainer.max_steps=null"], ["trainer.max_steps=null", "an integer"]),
        (["trainer.max_steps=1,2"], ["trainer.max_steps=1,2", "an integer"]),
        (["optim.lr=fast"], ["optim.lr=fast", "a number"]),
        (["optim.lr=nan"], ["optim.lr=nan", "a number"]),
        (["trainer.compile=maybe"], ["trainer.compile=maybe", "true or false"]),
        (
            ["optim.schedule=cosin"],
            ["optim.schedule=cosin", "cosine, wsd, constant", "did you mean 'cosine'"],
        ),
        (["trainer.precision=bf16"], ["bf16", "32-true, bf16-mixed"]),
        (["resume=yes"], ["resume=yes", "auto or null"]),
        (["trainer.devices=some"], ["trainer.devices=some", "an integer or auto"]),
        (["optim.betas=0.9"], ["optim.betas=0.9", "2 values"]),
        (["optim.betas=0.9,x"], ["optim.betas=0.9,x", "a number"]),
        (["mixer.layers=1,x"], ["mixer.layers=1,x", "an integer"]),
        (["mixer.layers="], ["mixer.layers=", "[]"]),
        (["mixer.options=[1"], ["mixer.options=[1", "a mapping"]),
        (["run=x"], ["run=x", "run.name=x"]),
        (["optim=x"], ["optim=x", "optim.lr"]),
        (["--max_steps=1"], ["--max_steps=1", "--help"]),
        (["--hel"], ["--hel", "did you mean '--help'"]),
        (["seed"], ["'seed'", "key=value"]),
        (["=1"], ["'=1'", "key=value"]),
        (["optim..lr=1"], ["optim..lr", "key=value"]),
        (["mixer=toy", "mixer=softmax"], ["mixer", "twice", "toy", "softmax"]),
        (["mixer=toy", "mixer.name=softmax"], ["mixer", "twice"]),
        (["seed=1", "seed=2"], ["seed", "twice"]),
        (["seed=1", "seed.x=2"], ["seed.x=2", "seed=1"]),
        (["seed=-1"], ["seed=-1", "between"]),
        (["trainer.max_steps=0"], ["trainer.max_steps=0", "at least 1"]),
        (["trainer.grad_clip=0"], ["trainer.grad_clip=0", "null"]),
        (
            ["data.batch_size=6", "trainer.micro_batch_size=4"],
            ["trainer.micro_batch_size=4", "data.batch_size=6"],
        ),
        (["model.d_model=100"], ["model.d_model=100", "16"]),
        (["mixer.span=2,1"], ["mixer.span", "must rise"]),
        (["mixer.width=13"], ["mixer", "unlucky width"]),
        (["run.name=a/b"], ["run.name", "a/b"]),
        (["run.name="], ["run.name", "empty"]),
        (["plugins=no.py"], ["no.py", "no such file"]),
        (["seed=1\n2"], ["seed=1 2", "an integer"]),
    ],
)
def test_one_line_errors(folder: Path, argv: list[str], parts: list[str]) -> None:
    for preset in ("trainer/debug", "trainer/gpu", "model/wide", "experiment/known"):
        write(folder, preset, "")
    message = error_of(folder, *argv)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("trainer: {max_stps: 1}", ["max_stps", "did you mean 'trainer.max_steps'"]),
        ("trainer: {max_steps: x}", ["trainer.max_steps=x", "an integer"]),
        ("trainer: {max_steps: [1]}", ["trainer.max_steps", "an integer"]),
        ("trainer: {max_steps: {a: 1}}", ["trainer.max_steps", "an integer"]),
        ("trainer: 3", ["trainer=3", "section"]),
        ("trainer: nothing", ["trainer=nothing", "no such trainer"]),
        ("mixer: {name: tyo}", ["tyo", "did you mean 'toy'"]),
        ("seed: 1\nseed: 2", ["'seed'", "twice"]),
        ("seed: [1", ["cannot be read"]),
        ("- seed", ["mapping"]),
        ("1: 2", ["'1'"]),
        ("optim: {schedule: off}", ["optim.schedule", "cosine, wsd, constant"]),
    ],
)
def test_errors_in_a_file_name_the_file(folder: Path, text: str, parts: list[str]) -> None:
    write(folder, "experiment/e", text)
    message = error_of(folder, "experiment=e")
    assert all(part in message for part in [*parts, "e.yaml"]), message


def test_a_group_without_choice(folder: Path) -> None:
    write(folder, "config", f"plugins: [{folder}/toy.py]\nmixer: toy")
    message = error_of(folder)
    assert message.startswith("data is not chosen: give data=<name> (available: ")
    assert "toy" in message


# Disk, checkpoints, --cfg, --help


def test_plain_dict_and_back(folder: Path) -> None:
    cfg = made(folder, "mixer.span=1,2", "mixer.options.a.b=3", "optim.betas=0.5,0.6")
    plain = asdict(cfg)
    assert json.loads(json.dumps(plain)) == plain
    assert from_dict(plain) == cfg
    # What a checkpoint does with it.
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    buffer.seek(0)
    assert from_dict(torch.load(buffer, weights_only=True)) == cfg


def test_from_dict_loads_plugin_files_from_any_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = asdict(made(folder, "plugins=toy.py"))
    assert plain["plugins"] == [str(folder / "toy.py")]
    for kind in (MIXERS, DATA):
        monkeypatch.setattr(kind, "_files", {})
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert from_dict(plain).mixer.name == "toy"
    (folder / "toy.py").unlink()
    with pytest.raises(UserError, match="no such file"):
        from_dict(plain)


def test_from_dict_names_what_no_longer_exists(folder: Path) -> None:
    plain = asdict(made(folder))
    plain["optim"]["momentum"] = 0.9
    with pytest.raises(UserError, match=r"saved options: unknown key 'optim\.momentum'"):
        from_dict(plain)


def test_save_is_whole_or_not_at_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = made(folder)
    config.save(cfg, folder / "config.yaml")
    before = (folder / "config.yaml").read_text()
    monkeypatch.setattr("os.replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        config.save(made(folder, "seed=1"), folder / "config.yaml")
    assert (folder / "config.yaml").read_text() == before
    assert not list(folder.glob(".config.yaml*"))


def test_load_of_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no run folder"):
        config.load(tmp_path)
