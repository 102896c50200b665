"""task=niah: the scores by teacher forcing and by generation, against the definition."""

import json
import random

import pytest
import torch

from src.config import run_cli
from src.data.common.needles import contained
from src.evaluate import evaluate, main
from src.evaluation import EvaluateConfig, open_run
from src.evaluation.niah import _data, forced, greedy
from src.model import LanguageModel, ModelConfig
from src.pieces import prefill
from src.registry import MIXERS, build_options
from tests.training import rows, run, write_corpus


@pytest.fixture(scope="module")
def needle_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("needles")
    write_corpus(folder / "corpus")
    return run(
        folder, "run.name=needles", "data=niah", "data.haystack=text",
        f"data.haystack_options.path={folder / 'corpus'}", "data.vocab_size=337", "data.seq_len=512",
        "data.batch_size=2", "data.tasks=single_2,multivalue", "data.val_examples=1", "trainer.max_steps=2",
        "mixer=loglinear_gdn",
    )  # fmt: skip


@pytest.mark.parametrize("name", MIXERS.names())
def test_scores_of_uneven_answers_are_those_of_whole_sequences(name, seed):
    mixer = build_options(MIXERS.get(name), {}, "mixer")
    model = LanguageModel(ModelConfig(d_model=32, n_layers=2, mlp_ratio=1), mixer, 20, 64).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    prompts = [torch.randint(20, (n,)).tolist() for n in (5, 90, 33, 64)]
    logits, state = prefill(model, prompts, 50)
    said = greedy(model, logits, state, 6, eot=-1)
    for prompt, ids in zip(prompts, said, strict=True):
        whole = model(torch.tensor([prompt + ids]))[0, len(prompt) - 1 : -1].argmax(-1)
        assert whole.tolist() == ids
    sizes = [1, 6, 3, 5]
    answers = [ids[:n] for ids, n in zip(said, sizes, strict=True)]
    assert forced(model, logits, state, answers) == [True] * 4
    for n in range(4):  # one wrong token, anywhere in it, and only its own example is wrong
        place = random.randrange(sizes[n])
        wrong = [list(answer) for answer in answers]
        wrong[n][place] = (wrong[n][place] + 1) % 20
        assert forced(model, logits, state, wrong) == [i != n for i in range(4)]
    eot = said[1][3]
    assert greedy(model, logits, state, 6, eot)[1] == said[1][: said[1].index(eot)]


def test_table_figure_and_file(needle_run, capsys):
    run_cli(
        main, EvaluateConfig,
        [f"run={needle_run}", "task=niah", "lengths=512,1024", "examples=2", "depths=3", "split=test", "device=cpu"],
    )  # fmt: skip
    out = capsys.readouterr().out
    assert 0 <= float(rows(needle_run)[-1]["val/exact_match"]) <= 1
    saved = json.loads((needle_run / "evaluation-niah-test.json").read_text())
    places = {(row["task"], row["length"], row["depth"]) for row in saved["cells"]}
    assert places == {(t, n, d) for t in ("single_2", "multivalue") for n in (512, 1024) for d in (0, 0.5, 1)}
    assert all(row["examples"] == 2 for row in saved["cells"])
    assert "single_2: needles found" in out
    assert "beyond the trained length" in out
    assert (needle_run / "evaluation-niah-test.png").stat().st_size > 1000


@pytest.mark.parametrize("good", [True, False])
def test_a_model_that_knows_the_answer_finds_every_needle(needle_run, monkeypatch, good):
    """One that says the answer to each prompt has both scores 1; one that says something else has 0."""
    trained = open_run(EvaluateConfig(run=str(needle_run), device="cpu", task="niah", split="test"))
    data = _data(trained)
    drawn = [
        data.example("test", task, 512, n, depth)
        for task in data.config.tasks for n in range(2) for depth in (0.0, 1.0)
    ]  # fmt: skip
    answers = {tuple(example.prompt_ids): example.answer_ids for example in drawn}
    nothing = data.tokenizer.encode("nothing")
    said = "src.evaluation.niah."
    monkeypatch.setattr(said + "prefill", lambda model, prompts, size: (None, prompts))
    monkeypatch.setattr(said + "forced", lambda model, logits, state, answers: [good] * len(answers))
    monkeypatch.setattr(
        said + "greedy",
        lambda model, logits, prompts, tokens, eot: [answers[tuple(p)] if good else nothing for p in prompts],
    )
    options = {"run": str(needle_run), "device": "cpu", "task": "niah", "split": "test"}
    results = evaluate(EvaluateConfig(lengths=[512], examples=2, depths=2, **options))
    assert {row["found"] for row in results["cells"]} == {float(good)}
    assert {row["exact"] for row in results["cells"]} == {float(good)}


def test_needles_in_the_text_of_a_run_on_text(tmp_path):
    run_dir = run(tmp_path, "run.name=text", "trainer.max_steps=1")
    options = {"run": str(run_dir), "device": "cpu", "task": "niah", "tasks": ["single_1"], "depths": 1, "examples": 1}
    results = evaluate(EvaluateConfig(lengths=[400], **options))
    assert results["data"]["haystack"] == "text"
    assert results["data"]["haystack_options"]["path"] == [str(tmp_path / "corpus")]
    assert [row["length"] for row in results["cells"]] == [400]


def test_contained():
    assert contained("It is ABC and 12.", ["abc", "13"]) == 0.5


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["lengths=20"], "at least"),
        (["tasks=single_9"], "single_9"),
        (["depths=0"], "depths=0"),
        (["data.name=prose"], "data.name=prose: task=niah measures data.name=niah"),
        (["data.name=null"], "data.name=null: name the data"),
        (["max_tokens=5"], "does not use it"),
    ],
)
def test_mistakes_are_one_line(needle_run, more, message, capsys):
    with pytest.raises(SystemExit) as end:
        run_cli(main, EvaluateConfig, [f"run={needle_run}", "task=niah", "device=cpu", *more])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
