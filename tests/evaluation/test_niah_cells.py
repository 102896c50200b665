"""task=niah: the scores by teacher forcing and by generation, against the definition."""

import json
import random

import pytest
import torch

from src.config import run_cli
from src.errors import UserError
from src.evaluate import evaluate, main
from src.evaluation import EvaluateConfig, open_run
from src.evaluation.niah import _data, forced, greedy
from src.evaluation.niah import evaluate as measure
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
    assert all(abs(row["mean_depth"] - row["depth"]) < 0.2 for row in saved["cells"])
    assert saved["haystack_tokens"] == _data(_opened(needle_run)).haystack_tokens("test")


def test_the_figure_says_what_it_shows(needle_run):
    """Where all lengths are within the trained one, there is no line, and no word of one."""
    for lengths, note in (([512], ""), ([512, 600], "\n(dashed: the trained length)")):
        figure = measure(_opened(needle_run, lengths=lengths, examples=1, depths=1)).figure
        assert figure._suptitle.get_text().splitlines() == ["needles: needles found", "val, 1 example a cell"]
        assert figure._supxlabel.get_text() == f"length, tokens{note}"
        assert figure.axes[-1].get_ylabel() == "needles found"


def _opened(run_dir, **options):
    return open_run(EvaluateConfig(run=str(run_dir), device="cpu", task="niah", **options))


def _measured(run_dir, **options):
    defaults = {"depths": 1, "examples": 1}
    return evaluate(EvaluateConfig(run=str(run_dir), device="cpu", task="niah", **(defaults | options)))


def test_mean_depth_is_that_of_the_examples_and_the_table_says_where_it_is_another(needle_run):
    trained = _opened(needle_run, tasks=["multikey_2", "single_1"])
    data = _data(trained)
    least = data.smallest("multikey_2")
    results = _measured(needle_run, tasks=["multikey_2", "single_1"], lengths=[least, 3000], depths=3, examples=3)
    for row in results["cells"]:
        first = {0.0: 0, 0.5: 3, 1.0: 6}[row["depth"]]  # other examples at every depth
        drawn = [data.example("val", row["task"], row["length"], first + n, row["depth"]).depth for n in range(3)]
        assert row["mean_depth"] == pytest.approx(sum(drawn) / 3)
    far = {(r["task"], r["length"]) for r in results["cells"] if abs(r["mean_depth"] - r["depth"]) > 0.1}
    assert ("multikey_2", least) in far  # a whole line and the rest of one have no middle
    notes = [line for line in results["table"].splitlines() if "could not stand" in line]
    assert len(notes) == len(far)
    assert not any("3,000" in note for note in notes)
    assert any(f"at {least:,} tokens" in note for note in notes)


def test_each_task_and_length_is_measured_once(needle_run):
    results = _measured(needle_run, tasks=["single_2", "multivalue", "single_2"], lengths=[700, 500, 700])
    cells = [(row["task"], row["length"]) for row in results["cells"]]
    assert cells == [(task, n) for task in ("single_2", "multivalue") for n in (500, 700)]
    assert results["table"].count("single_2: needles found") == 1


def test_a_haystack_shorter_than_an_example_is_said_once(needle_run):
    tokens = _data(_opened(needle_run)).haystack_tokens("val")
    note = f"the val haystack has {tokens:,} tokens: longer examples repeat it"
    long = _measured(needle_run, lengths=[tokens + 500, 500])
    assert long["table"].count(note) == 1
    assert long["haystack_tokens"] == tokens
    assert "repeat" not in _measured(needle_run, tasks=["single_2"], lengths=[tokens])["table"]
    noise = _measured(needle_run, tasks=["single_1"], lengths=[tokens + 500])
    assert "repeat" not in noise["table"]
    assert noise["haystack_tokens"] is None


def test_other_haystacks_and_options_over_those_of_the_run(tmp_path, needle_run, monkeypatch):
    """Of a run on a text and of one on needles: its own corpus's options go with its own corpus only."""
    cache = tmp_path / "cache"
    on_text = run(
        tmp_path, "run.name=text", "trainer.max_steps=1", f"data.cache_dir={cache}", "data.val_fraction=0.3",
        "data.encoding_errors=replace",
    )  # fmt: skip
    other = write_corpus(tmp_path / "other", documents=30)
    own = tmp_path / "corpus"
    with monkeypatch.context() as patch:
        patch.setattr("src.data.common.corpus.build", lambda *_: pytest.fail("tokenised again"))
        data = _data(_opened(on_text, lengths=[600]))
        assert data.config.cache_dir == str(cache)
    assert data.config.haystack_options["path"] == [str(own)]
    asked = {"haystack_options": {"path": str(other)}}
    merged = _data(_opened(on_text, lengths=[600], data=asked)).config.haystack_options
    assert merged["path"] == str(other)
    assert (merged["val_fraction"], merged["encoding_errors"]) == (0.3, "replace")
    asked = {"haystack_options": {"val_fraction": 0.4}}
    merged = _data(_opened(needle_run, data=asked)).config.haystack_options
    assert merged == {"path": str(needle_run.parent.parent / "corpus"), "val_fraction": 0.4}
    monkeypatch.setattr("src.data.prose.Prose.documents", lambda *_: ["A short text. " * 200])
    for run_dir in (on_text, needle_run):
        prose = _data(_opened(run_dir, lengths=[600], data={"haystack": "prose", "cache_dir": str(cache)}))
        assert prose.config.haystack == "prose"
        assert prose.config.haystack_options == {}


@pytest.mark.parametrize("good", [True, False])
def test_a_model_that_knows_the_answer_finds_every_needle(needle_run, monkeypatch, good):
    """One that says the answer to each prompt has both scores 1; one that says something else has 0."""
    trained = open_run(EvaluateConfig(run=str(needle_run), device="cpu", task="niah", split="test"))
    data = _data(trained)
    drawn = [
        data.example("test", task, 512, n, depth)
        for task in data.config.tasks for n, depth in ((0, 0.0), (1, 0.0), (2, 1.0), (3, 1.0))
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


def test_a_trained_length_too_short_for_a_task_is_an_error(tmp_path):
    run_dir = run(tmp_path, "run.name=text", "trainer.max_steps=1")
    with pytest.raises(UserError, match=r"^trained length 16: multiquery needs at least \d+ .*, not 16: leave out"):
        _measured(run_dir)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["lengths=[20]"], "lengths=[20]: multivalue needs at least "),
        (["lengths=[20,5000]"], "lengths=[20, 5000]: multivalue needs at least "),
        (["lengths=[20,5000]"], ", not 20: leave out the task (tasks=) or the length (lengths=)"),
        (["lengths=[150,5000]", "tasks=[single_1,multikey_3]"], "lengths=[150, 5000]: multikey_3 needs at least "),
        (["lengths=[300]", "tasks=[single_1,multikey_3]"], "error: lengths=[300]: multikey_3 needs at least "),
        (["lengths=[300]", "data.seq_len=100"], "data.seq_len=100: task=niah takes lengths: give lengths alone"),
        (["data.val_lengths=[100]"], "data.val_lengths=[100]: task=niah takes lengths: give lengths alone"),
        (["data.tasks=[single_1]"], "data.tasks=['single_1']: task=niah takes tasks: give tasks alone"),
        (["data.haystack_options=5"], "data.haystack_options=5: expected a mapping"),
        (["data.haystack_options.foo=5"], "unknown key 'data.haystack_options.foo' (allowed in data.hay"),
        (["tasks=single_9"], "error: tasks=single_9: unknown; did you mean"),
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
