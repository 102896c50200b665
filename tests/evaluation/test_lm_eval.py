"""task=lm_eval: the harness's own numbers for tasks made here, against the model's logits."""

import json
import random
import sys
from functools import partialmethod
from pathlib import Path

import pytest
import torch
import yaml

from src.config import run_cli
from src.data.common.tokenizer import ByteTokenizer
from src.errors import UserError
from src.evaluate import evaluate, main
from src.evaluation import EvaluateConfig, open_run
from src.module import load_module
from tests.training import run

EOT = ByteTokenizer.eot
TEXTS = ["def f0_1(x): return x + 1\n", "x", "é return " * 40, "a b  c\n\n", "def " * 9]
pytest.importorskip("lm_eval", reason="pip install '.[lm-eval]'")


@pytest.fixture(scope="module")
def text_run(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("lm_eval"), "run.name=text", "mixer=loglinear_gdn", "trainer.max_steps=30")


@pytest.fixture(scope="module")
def model(text_run):
    return load_module(text_run / "checkpoints" / "last.ckpt", torch.device("cpu")).model.eval()


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """No network, and not the thousands of tasks that the harness brings, which take seconds to list."""
    import datasets

    from src.evaluation import harness

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    few = partialmethod(harness.TaskManager.__init__, include_defaults=False)
    monkeypatch.setattr(harness.Tasks, "__init__", few)


def write_task(folder: Path, name: str, documents: list[dict], **options) -> None:
    (folder / f"{name}.json").write_text("\n".join(json.dumps(d) for d in documents))
    data = {"data_files": {"test": str(folder / f"{name}.json")}, "cache_dir": str(folder / "cache")}
    task = {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test", **options}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))


def measured(run_dir: Path, folder: Path, *tasks: str, **options) -> dict:
    options = {"device": "cpu", "output": str(folder / "out.json"), **options}
    return evaluate(
        EvaluateConfig(run=str(run_dir), task="lm_eval", tasks=list(tasks), task_path=str(folder), **options)
    )


def ids_of(text: str) -> list[int]:
    return list(text.encode())


@torch.inference_mode()
def score(model, before: list[int], after: list[int]) -> tuple[float, bool]:
    """From the logits of one sequence, the model called once."""
    logits = model(torch.tensor([[*before, *after]]))[0, len(before) - 1 : -1].log_softmax(-1)
    target = torch.tensor(after)
    return float(logits.gather(1, target[:, None]).sum()), bool((logits.argmax(-1) == target).all())


@torch.inference_mode()
def greedy(model, text: str, most: int, until: str) -> str:
    """From the logits of whole sequences."""
    ids, new = [EOT, *ids_of(text)], []
    while len(new) < most:
        token = int(model(torch.tensor([[*ids, *new]]))[0, -1].argmax())
        if token == EOT:
            break
        new.append(token)
        if until in bytes(new).decode(errors="replace"):
            break
    return bytes(new).decode(errors="replace").partition(until)[0]


def test_multiple_choice(text_run, model, tmp_path, seed):
    words = ["return", "x + 1", " def", "(", "éé", "zzz", "x", " import os"]
    documents = [
        {"question": random.choice(TEXTS), "choices": random.sample(words, 3), "answer": random.randrange(3)}
        for _ in range(20)
    ]
    write_task(
        tmp_path,
        "choice",
        documents,
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_choice="{{choices}}",
        doc_to_target="{{answer}}",
        target_delimiter=":",
        metric_list=[{"metric": "acc"}],
    )
    right = []
    for document in documents:
        before = [EOT, *ids_of(document["question"])]
        totals = [score(model, before, ids_of(":" + choice))[0] for choice in document["choices"]]
        right.append(totals.index(max(totals)) == document["answer"])
    for options in ({}, {"piece": 7}):
        results = measured(text_run, tmp_path, "choice", **options)
        assert results["results"]["choice"]["acc,none"] == pytest.approx(sum(right) / 20)
        assert results["examples"]["choice"]["effective"] == 20
    first = measured(text_run, tmp_path, "choice", limit=5)
    assert first["results"]["choice"]["acc,none"] == pytest.approx(sum(right[:5]) / 5)
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved["results"] == first["results"]
    assert (saved["task"], "split" in saved) == ("lm_eval", False)


def test_log_likelihoods_in_batches(text_run, model, seed):
    """Packed together, in pieces, alone, and from the logits: the same."""
    from lm_eval.api.instance import Instance

    from src.evaluation.harness import Harness

    pairs = [(random.choice(["", "x ", *TEXTS]), random.choice(["x", *TEXTS])) for _ in range(12)]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    # A blank at a context's end belongs to the continuation, for the harness.
    moved = [(a.rstrip(), a[len(a.rstrip()) :] + b) if a else (a, b) for a, b in pairs]
    expected = [score(model, [EOT, *ids_of(a)], ids_of(b)) for a, b in moved]
    for piece in (10_000, 50):
        lm = Harness(open_run(EvaluateConfig(run=str(text_run), device="cpu", piece=piece)))
        alone = [lm.loglikelihood([request])[0] for request in requests]
        for found in (lm.loglikelihood(requests), alone):
            assert [total for total, _ in found] == pytest.approx([total for total, _ in expected], rel=1e-4)
            assert [hit for _, hit in found] == [hit for _, hit in expected]
        whole = lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (t,), 0) for t in TEXTS])
        assert whole == pytest.approx([score(model, [EOT], ids_of(t))[0] for t in TEXTS], rel=1e-4)


def test_perplexity_of_whole_texts(text_run, model, tmp_path):
    write_task(
        tmp_path,
        "rolling",
        [{"text": text} for text in TEXTS],
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "bits_per_byte"}],
    )
    found = measured(text_run, tmp_path, "rolling")["results"]["rolling"]["bits_per_byte,none"]
    total = sum(score(model, [EOT], ids_of(text))[0] for text in TEXTS)
    expected = -total / sum(len(text.encode()) for text in TEXTS) / torch.log(torch.tensor(2.0)).item()
    assert found == pytest.approx(expected, rel=1e-4)


def test_generated_texts(text_run, model, tmp_path):
    """Half of the targets are what the model says."""
    documents = []
    for i, text in enumerate(TEXTS):
        answer = greedy(model, text, 9, "t")
        documents.append({"question": text, "target": answer if i % 2 == 0 else answer + "?"})
    options = {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{target}}",
        "generation_kwargs": {"until": ["t"], "max_gen_toks": 9, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    write_task(tmp_path, "text", documents, **options)
    results = measured(text_run, tmp_path, "text")
    assert results["results"]["text"]["exact_match,none"] == 3 / 5
    assert any(document["target"].rstrip("?") for document in documents)


def test_texts_of_a_batch(text_run, model):
    """Rows with their own stop strings and numbers of tokens, greedy and drawn."""
    from lm_eval.api.instance import Instance

    from src.evaluation.harness import Harness

    lm = Harness(open_run(EvaluateConfig(run=str(text_run), device="cpu")))
    requests, expected = [], []
    for text in TEXTS:
        for until, most in (("e", 12), ("\n", 3)):
            requests.append(Instance("generate_until", {}, (text, {"until": until, "max_gen_toks": most}), 0))
            expected.append(greedy(model, text, most, until))
    assert lm.generate_until(requests) == expected
    drawn = {"until": [], "max_tokens": 20, "do_sample": True, "temperature": 1.0}
    twice = lm.generate_until([Instance("generate_until", {}, ("x", drawn), 0)] * 2 + requests)
    assert twice[0] != twice[1]
    assert twice[2:] == expected


@pytest.mark.parametrize(
    ("wanted", "message"),
    [({"num_beams": 4}, "num_beams=4"), ({"best_of": 2}, "best_of=2"), ({"max_gen_toks": 0}, "max_gen_toks=0")],
)
def test_generation_that_is_not_possible_is_refused(wanted, message):
    from src.evaluation.harness import wishes

    assert wishes({"until": "a", "num_beams": 1})[1:] == (["a"], 256)
    with pytest.raises(UserError, match=message):
        wishes(wanted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs tasks=["),
        (["tasks=choise", "task_path={path}"], "tasks=choise: neither lm-eval nor task_path has such a task; did you"),
        (["tasks=broken", "task_path={path}"], "tasks=['broken'] cannot be loaded (FileNotFoundError"),
        (["tasks=choice", "task_path={path}/no"], "no such folder"),
        (["tasks=choice", "limit=0"], "limit=0"),
        (["tasks=choice", "num_fewshot=-1"], "num_fewshot=-1"),
        (["tasks=choice", "data.path=x"], "data.path: task=lm_eval does not use it"),
        (["tasks=choice", "split=test"], "task=lm_eval does not use it"),
        (["tasks=choice", "task=perplexity"], "task=perplexity does not use it"),
    ],
)
def test_mistakes_are_one_line(text_run, tmp_path, arguments, message, capsys):
    write_task(tmp_path, "choice", [{"a": 1}], output_type="loglikelihood_rolling", doc_to_target="{{a}}")
    write_task(tmp_path, "broken", [], output_type="loglikelihood_rolling", doc_to_target="{{a}}")
    (tmp_path / "broken.json").unlink()
    given = {"task": "lm_eval", **dict(a.format(path=tmp_path).split("=") for a in arguments)}
    with pytest.raises(SystemExit) as end:
        run_cli(main, EvaluateConfig, [f"run={text_run}", "device=cpu", *(f"{k}={v}" for k, v in given.items())])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("error: ")
    assert message in error.splitlines()[-1]


def test_missing_package_is_one_line(text_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr("src.evaluation.lm_eval.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install '\.\[lm-eval\]'"):
        evaluate(EvaluateConfig(run=str(text_run), task="lm_eval", tasks=["arc_easy"], device="cpu"))
