import re
from pathlib import Path

import pytest

from src.config import run_cli
from src.generate import GenerateConfig, main
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


def test_synthetic_task_has_no_text(tmp_path, capsys):
    run_dir = run(tmp_path, "run.name=recall", "data=mqar", "data.n_pairs=2", "data.vocab_size=32", "data.examples=64")
    with pytest.raises(SystemExit) as end:
        generate(run_dir)
    assert end.value.code == 2
    assert "not trained on text" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["temperature=-1", "top_p=2", "top_k=0", "max_new_tokens=0", "seed=x"])
def test_mistakes_are_one_line(text_run, capsys, wrong):
    with pytest.raises(SystemExit) as end:
        run_cli(main, GenerateConfig, [f"run={text_run}", "device=cpu", wrong])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert wrong.partition("=")[0] in error
