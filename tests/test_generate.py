import re
from pathlib import Path

import pytest
import torch

from src.config import run_cli
from src.errors import UserError
from src.generate import GenerateConfig, main
from src.layers import LevelScales
from tests.training import run


@pytest.fixture(scope="module")
def text_run(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("generate"), "run.name=text", "mixer=loglinear_gdn")


def generate(run_dir: Path, *arguments: str) -> None:
    run_cli(main, GenerateConfig, [f"run={run_dir}", "device=cpu", "max_new_tokens=12", *arguments])


@pytest.mark.parametrize(
    "arguments",
    [
        ["prompt=def "],
        ["prompt="],
        ["prompt=x", "temperature=0"],
        ["prompt=x", "top_p=0"],
        ["prompt=x", "top_k=3", "top_p=0.9", "seed=5"],
        ["prompt=x", "checkpoint=best"],
        ["prompt=é € ${x} ???"],
    ],
)
def test_prompt_is_continued(text_run, capsys, arguments):
    generate(text_run, *arguments)
    out, err = capsys.readouterr()
    assert out.startswith(arguments[0].removeprefix("prompt="))
    assert "tokens/s]" in err
    read = re.search(r"prompt: (\d+) tokens.*generated: (\d+) tokens.*bytes after (\d+) tokens", err, re.DOTALL)
    prompt, new, state = map(int, read.groups())
    assert state == prompt + new - ("end of text" not in err)  # a last token is read only to find the end
    assert "exceed" not in err


def test_same_seed_same_text(text_run, capsys):
    texts = []
    for seed in (1, 1, 2):
        generate(text_run, "prompt=a", f"seed={seed}")
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_prompt_longer_than_the_training_rows(text_run, capsys):
    generate(text_run, "prompt=" + "abc " * 30)
    out, err = capsys.readouterr()
    assert out.startswith("abc abc")
    assert "[the prompt's 121 tokens exceed the 16 of the training rows]" in err


def test_prompt_from_a_file_is_that_text(text_run, tmp_path, capsys):
    text = "def é(x):\n    return " * 9
    generate(text_run, f"prompt={text}")
    said = capsys.readouterr().out
    file = tmp_path / "a.txt"
    file.write_text(text)
    generate(text_run, f"prompt_file={file}", "piece=7")
    out, err = capsys.readouterr()
    assert text + out == said
    assert f"[{file}'s {len(text.encode()) + 1} tokens exceed the 16" in err


def test_several_prompts_each_give_what_they_give_alone(text_run, tmp_path, capsys):
    texts = {"a.txt": "x", "b.txt": "def " * 30, "empty.txt": ""}
    alone = {}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        generate(text_run, f"prompt_file={tmp_path / name}", "seed=3")
        alone[name] = capsys.readouterr().out
    files = [str(tmp_path / name) for name in texts]
    generate(text_run, f"prompt_file=[{','.join(files)}]", "seed=3")
    out, err = capsys.readouterr()
    parts = [f"== {tmp_path / name} ==\n{text}" for name, text in alone.items()]
    assert sorted(out) == sorted("".join(parts))
    assert all(part in out for part in parts)
    assert re.search(r"prompt: 124 tokens", err)
    assert f"{tmp_path / 'empty.txt'} is empty: a new document begins" in err


def test_numbers_at_the_end(text_run, capsys):
    """Of many steps, the first and the last; the state's bytes against keys and values of the model's width."""
    run_cli(main, GenerateConfig, [f"run={text_run}", "device=cpu", "prompt=abc", "max_new_tokens=250", "seed=1"])
    err = capsys.readouterr().err
    new = int(re.search(r"generated: (\d+) tokens", err)[1])
    steps = new - ("end of text" not in err)
    assert (steps >= 100) == bool(re.search(r"first tenth of the steps, [\d,]+ in the last", err))
    state, positions, cache, times = re.search(
        r"state: ([\d,]+) bytes after (\d+) tokens.*keeps: ([\d,]+) bytes, ([\d,.]+) times", err
    ).groups()
    state, positions, cache, times = (float(x.replace(",", "")) for x in (state, positions, cache, times))
    assert cache == positions * 2 * 16 * 4  # one layer of width 16 in fp32
    assert times == pytest.approx(cache / state, abs=0.06)


def test_generation_goes_on_behind_end_of_text(text_run, capsys, monkeypatch):
    """A model that says nothing else."""
    monkeypatch.setattr("src.generation.probabilities", lambda logits, _: torch.eye(257)[256].expand(len(logits), -1))
    generate(text_run, "prompt=x")
    out, err = capsys.readouterr()
    assert out == "x\n"
    assert "[end of text]" in err
    generate(text_run, "prompt=x", "stop_at_end=false")
    out, err = capsys.readouterr()
    assert out == "x" + "<|endoftext|>" * 12 + "\n"
    assert "end of text" not in err


def test_synthetic_task_has_no_text(tmp_path, capsys):
    run_dir = run(tmp_path, "run.name=recall", "data=mqar", "data.n_pairs=2", "data.vocab_size=32", "data.examples=64")
    with pytest.raises(SystemExit) as end:
        generate(run_dir)
    assert end.value.code == 2
    assert "not trained on text" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        *("temperature=-1", "top_p=2", "top_k=0", "max_new_tokens=0", "piece=0", "beyond=first"),
        *("seed=x", "seed=-1", f"seed={2**32}", "seed=99999999999999999999"),
    ],
)
def test_mistakes_are_one_line(text_run, capsys, wrong):
    with pytest.raises(SystemExit) as end:
        run_cli(main, GenerateConfig, [f"run={text_run}", "device=cpu", wrong])
    assert end.value.code == 2
    check_error(capsys, wrong.partition("=")[0])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b"abc\xff", "not UTF-8 (byte 3): convert it"),
        ("folder", "is not a file"),
    ],
)
def test_a_file_that_is_no_prompt_is_named(text_run, tmp_path, capsys, content, words):
    file = tmp_path / "wrong.txt"
    if content == "folder":
        file.mkdir()
    elif content is not None:
        file.write_bytes(content)
    with pytest.raises(SystemExit) as end:
        generate(text_run, f"prompt_file={file}")
    assert end.value.code == 2
    check_error(capsys, "prompt_file: ", str(file), words)


def test_seed_has_the_bounds_of_training():
    GenerateConfig(run="a", seed=2**32 - 1)
    for seed in (-1, 2**32):
        with pytest.raises(UserError, match=f"^seed={seed}: must be between 0 and 4294967295$"):
            GenerateConfig(run="a", seed=seed)


def test_a_short_text_has_no_factor(text_run, capsys):
    """Where keys and values are smaller than the state."""
    run_cli(main, GenerateConfig, [f"run={text_run}", "device=cpu", "prompt=", "max_new_tokens=1"])
    assert re.search(r"as softmax attention keeps: 128 bytes\]$", capsys.readouterr().err.strip())


def test_beyond_is_set_on_every_layer(text_run, capsys, monkeypatch):
    seen = []
    real = LevelScales.forward
    monkeypatch.setattr(LevelScales, "forward", lambda self, x: (seen.append(self.beyond), real(self, x))[1])
    for more, expected in (([], "last"), (["beyond=mean"], "mean"), (["beyond=decay"], "decay")):
        generate(text_run, "prompt=" + "abc " * 30, *more)
        assert set(seen) == {expected}
        seen.clear()


def test_beyond_needs_level_scales(tmp_path, capsys):
    run_dir = run(tmp_path, "run.name=linear")
    with pytest.raises(SystemExit) as end:
        generate(run_dir, "beyond=mean")
    assert end.value.code == 2
    check_error(capsys, "beyond=mean: mixer=mamba2 has no level scales")


def test_prompt_and_file_are_one_too_many(text_run, capsys):
    with pytest.raises(SystemExit) as end:
        generate(text_run, "prompt=a", "prompt_file=b")
    assert end.value.code == 2
    check_error(capsys, "prompt=a", "prompt_file")


def check_error(capsys, *words: str) -> None:
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert all(word in error for word in words)
