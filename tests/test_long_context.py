"""tools.long_context: mixers over seeds, from made-up evaluations; one real one shows that the files fit."""

import csv
import json
import random
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from src.data.common.tokenizer import ByteTokenizer, train_bpe
from src.evaluate import evaluate
from src.evaluation import EvaluateConfig
from tests.training import run
from tools import long_context, long_context_views

MIXERS = ("loglinear_gdn", "gated_deltanet")
SEEDS = (1, 7)


@pytest.fixture
def call(monkeypatch, capsys):
    def made(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["long_context", *map(str, arguments)])
        capsys.readouterr()  # of what came before
        status = long_context.main()
        return status, *capsys.readouterr()

    return made


def result(mixer: str, task: str, seed: int, **values) -> dict:
    common = {"mixer": mixer, "task": task, "seed": seed, "parameters": 1_234_567, "peak_state_bytes": 4096}
    return {**common, "trained_length": 1024, **values}


def perplexity(mixer: str, seed: int, lengths: tuple[int, ...] = (1024, 4096), text: bool = True) -> dict:
    rows = [{"length": n, "loss": (loss := random.uniform(2, 3)), "perplexity": float(np.exp(loss))} for n in lengths]
    for row in rows if text else []:
        row |= {"word_perplexity": random.uniform(20, 40), "bits_per_byte": random.uniform(1, 2)}
    return result(mixer, "perplexity", seed, lengths=rows)


def niah(mixer: str, seed: int) -> dict:
    cells = [
        {"task": task, "length": n, "depth": d, "found": random.random(), "exact": random.random(), "examples": 10}
        for task in ("single_1", "multiquery") for n in (512, 2048) for d in (0.0, 1.0)
    ]  # fmt: skip
    return result(mixer, "niah", seed, cells=cells)


def positions(mixer: str, seed: int) -> dict:
    rows = [{"begin": a, "end": b, "loss": random.uniform(2, 3)} for a, b in ((0, 16), (256, 512), (512, 2048))]
    return result(mixer, "positions", seed, positions=rows)


def put(folder: Path, *results: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for found in results:
        (folder / f"evaluation-{found['task']}-test.json").write_text(json.dumps(found))
    return folder


def columns(out: str) -> dict[str, dict[str, str]]:
    """The Markdown tables of perplexity and needles: mixer -> column -> cell."""
    shown = defaultdict(dict)
    for head, lines in markdown(out):
        for line in lines if "log-linear minus linear" not in head[0] else []:
            shown[line[0].strip("`")] |= dict(zip(head, line, strict=True))
    return dict(shown)


def markdown(out: str) -> list[tuple[list[str], list[list[str]]]]:
    """Head and lines of every table."""
    found = []
    for part in out.split("\n\n"):
        head, rule, *lines = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("|")]
        assert set("".join(rule)) <= set("-| ")
        found.append((head, lines))
    return found


def spread(values: list[float], form: str) -> str:
    return f"{format(np.mean(values), form)} ({format(min(values), form)}–{format(max(values), form)})"


def test_table_csv_and_figure(call, tmp_path, seed):
    made = {(m, s): [perplexity(m, s), niah(m, s), positions(m, s)] for m in MIXERS for s in SEEDS}
    folders = [put(tmp_path / f"{m}-{s}", *results) for (m, s), results in made.items()]
    files = tmp_path / "all.csv", tmp_path / "all.png"
    status, out, err = call(*folders, "--csv", files[0], "--figure", files[1])
    assert (status, err) == (0, "")
    shown = columns(out)
    assert list(shown) == ["gated_deltanet", "loglinear_gdn"]  # each linear mixer before its log-linear variant
    for mixer, cells in shown.items():
        assert (cells["seeds"], cells["parameters"], cells["fp32 state within the trained length, bytes"]) == (
            "1, 7",
            "1,234,567",
            "4,096",
        )
        own = [made[mixer, s] for s in SEEDS]
        for i, length in enumerate(("1K", "4K")):
            values = [results[0]["lengths"][i]["perplexity"] for results in own]
            assert cells[f"perplexity at {length}"] == spread(values, ".2f")
        bits = [results[0]["lengths"][0]["bits_per_byte"] for results in own]
        assert cells["bits per byte at 1K"] == spread(bits, ".4f")
        for task, length, label in (("single_1", 512, "512"), ("multiquery", 2048, "2K")):
            found = [
                np.mean([c["found"] for c in results[1]["cells"] if (c["task"], c["length"]) == (task, length)])
                for results in own
            ]
            assert cells[f"{task} at {label}"] == spread(found, ".1%")
    with files[0].open(newline="") as file:
        rows = list(csv.DictReader(file))
    # mixers, seeds; perplexity, needles, needles by depth, positions
    assert len(rows) == 2 * 2 * (2 * 4 + 2 * 2 * 2 + 2 * 2 * 2 * 2 + 3)
    for (mixer, s), results in made.items():
        own = {
            (r["task"], r["what"], float(r["x"])): float(r["value"])
            for r in rows
            if r["mixer"] == mixer and r["seed"] == str(s)
        }
        assert own["perplexity", "loss", 4096.0] == results[0]["lengths"][1]["loss"]
        cell = results[1]["cells"][1]
        assert own["niah", f"found/{cell['task']}/depth=1", float(cell["length"])] == cell["found"]
        assert own["positions", "loss", 1024.0] == results[2]["positions"][2]["loss"]
    assert files[1].stat().st_size > 20_000


def test_figure_has_the_mean_and_each_seed(seed):
    made = [perplexity("mamba2", s) for s in SEEDS]
    [axes] = long_context_views.draw(made).axes
    values = np.array([[row["perplexity"] for row in found["lengths"]] for found in made])
    [mean] = [line for line in axes.lines if line.get_label() == "mamba2"]
    assert np.allclose(mean.get_xydata(), np.stack([[1024, 4096], values.mean(0)], 1))
    of_seeds = [line.get_ydata() for line in axes.lines if len(line.get_xdata()) == 2 and line.get_linewidth() < 1]
    assert np.allclose(of_seeds, values)
    [axes] = long_context_views.draw(made[:1]).axes
    assert "mamba2 (one seed)" in [line.get_label() for line in axes.lines]


def test_noise_of_early_positions_is_not_drawn():
    def losses(mixer: str, *buckets: tuple[int, int, float]) -> dict:
        rows = [{"begin": a, "end": b, "loss": loss} for a, b, loss in buckets]
        return result(mixer, "positions", 1, positions=rows)

    linear = losses("mamba2", (0, 16, 5.0), (256, 1024, 3.0), (1024, 4096, 2.9))
    levels = losses("loglinear_mamba2", (0, 16, 5.4), (256, 1024, 2.98), (1024, 4096, 2.87))
    both, gain = long_context_views.draw([linear, levels]).axes
    assert [len(line.get_xdata()) for line in both.lines[:2]] == [3, 3]
    assert gain.lines[0].get_xydata() == pytest.approx(np.array([[512, -0.02], [2048, -0.03]]))
    for found in (linear, levels):  # nothing else to show
        del found["positions"][1:]
    _, gain = long_context_views.draw([linear, levels]).axes
    assert gain.lines[0].get_xydata() == pytest.approx(np.array([[4, 0.4]]))


def test_one_far_above_does_not_flatten_the_others(seed):
    made = [perplexity(f"mine_{i}", 1) for i in range(4)]
    for found, numbers in zip(made, ([300.0, 310.0], [20.0, 21.0], [20.5, 21.5], [20.1, 20.2]), strict=True):
        for row, number in zip(found["lengths"], numbers, strict=True):
            row["perplexity"] = number
    [axes] = long_context_views.draw(made).axes
    low, high = axes.get_ylim()
    assert 19 < low < 20
    assert 21.5 < high < 23
    assert [text.get_text() for text in axes.texts] == ["far above: mine_0: 300 to 310"]
    assert len({line.get_color() for line in axes.lines if line.get_label().startswith("mine")}) == 4
    [axes] = long_context_views.draw(made[1:]).axes
    assert not axes.texts


def test_perplexity_alone(call, tmp_path, seed):
    """One task, one mixer, one seed, and no text whose words and bytes could be counted."""
    found = perplexity("mine", 3, text=False)
    found["lengths"][1]["perplexity"] = None  # was infinite
    folder = put(tmp_path / "a", found)
    status, out, err = call(folder, "--figure", tmp_path / "a.png", "--csv", tmp_path / "a.csv")
    assert (status, err) == (0, "")
    cells = columns(out)["mine"]
    assert cells["seeds"] == "3 (one)"
    assert cells["perplexity at 1K"] == f"{found['lengths'][0]['perplexity']:.2f}"
    assert cells["perplexity at 4K"] == "not finite"
    assert not any("bits" in name for name in cells)
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 1 + 4  # loss and perplexity
    assert (tmp_path / "a.png").is_file()


def test_a_mixer_without_some_task_has_gaps(call, tmp_path, seed):
    folders = [put(tmp_path / "a", perplexity("mamba2", 1)), put(tmp_path / "b", niah("softmax", 1))]
    status, out, _ = call(*folders, "--figure", tmp_path / "a.png")
    assert status == 0
    shown = columns(out)
    assert shown["softmax"]["perplexity at 1K"] == "–"
    assert "single_1 at 512" not in shown["mamba2"]
    assert shown["softmax"]["single_1 at 512"].endswith("%")


def test_gains_are_between_runs_of_one_seed(call, tmp_path, seed):
    """Seed 1 of the linear mixer is missing: only seed 7 is compared, at every length and position."""
    made = {
        (mixer, s): [perplexity(mixer, s), positions(mixer, s)]
        for mixer, s in (("loglinear_gdn", 1), ("loglinear_gdn", 7), ("gated_deltanet", 7), ("loglinear_mamba2", 7))
    }
    status, out, _ = call(*(put(tmp_path / f"{m}-{s}", *results) for (m, s), results in made.items()))
    assert status == 0
    head, lines = markdown(out)[-1]
    own, linear = (made[mixer, 7] for mixer in MIXERS)
    losses = [f"{a['loss'] - b['loss']:+.4f}" for a, b in zip(own[0]["lengths"], linear[0]["lengths"], strict=True)]
    assert head[1:] == ["seed", "at 1K", "at 4K"]
    assert lines == [["`loglinear_gdn` − `gated_deltanet`", "7", *losses]]

    figure = long_context_views.draw([result for results in made.values() for result in results])
    made["gated_deltanet", 7][0]["lengths"][1]["loss"] = None
    put(tmp_path / "gated_deltanet-7", made["gated_deltanet", 7][0])
    out = call(*(tmp_path / f"{m}-{s}" for m, s in made))[1]
    assert markdown(out)[-1][1][0][2:] == [losses[0], "not finite"]
    [axes] = [axes for axes in figure.axes if "log-linear minus linear" in axes.get_ylabel()]
    [curve] = [line for line in axes.lines if line.get_label() == "loglinear_gdn (one seed)"]
    expected = [a["loss"] - b["loss"] for a, b in zip(own[1]["positions"], linear[1]["positions"], strict=True)]
    assert np.allclose(curve.get_ydata(), expected[1:])  # not among the first tokens


@pytest.mark.parametrize(
    ("results", "more", "message"),
    [
        ([("a", perplexity("mamba2", 1)), ("b", perplexity("mamba2", 1))], [], "same mixer, task and seed"),
        ([("a",)], [], "no evaluation-<task>-test.json in these folders"),
        ([("a", perplexity("mamba2", 1))], ["--split", "val"], "no evaluation-<task>-val.json in these folders"),
        ([("a", result("mamba2", "mqar", 1))], [], "tasks: perplexity, positions, niah"),
        (
            [("a", {"task": "perplexity", "mixer": "mamba2"})],
            [],
            "has no seed, parameters, peak_state_bytes, trained_length",
        ),
        ([("a", result("mamba2", "niah", 1))], [], "is no result of task=niah ('cells')"),
        ([("a", result("mamba2", "niah", 1, cells=[]))], [], "has no number of task=niah; evaluate this run again"),
        ([("a", result("mamba2", "niah", 1, cells=[{"found": None}]))], [], "is no result of task=niah ("),
        ([("a", perplexity("mamba2", 1))], ["nowhere"], "nowhere: is no folder of a run"),
        ([("a", perplexity("mamba2", 1))], ["--figure", "none/a.png"], "--figure none/a.png: there is no folder"),
        ([("a", perplexity("mamba2", 1))], ["--csv", "none/a.csv"], "--csv none/a.csv: there is no folder"),
        ([("a", perplexity("mamba2", 1))], ["--figure", "/nope/x.png"], "--figure /nope/x.png: there is no folder"),
        ([("a", perplexity("mamba2", 1))], ["--figure", "a"], "--figure a: is a folder"),
        ([("a", perplexity("mamba2", 1))], ["--figure", "x.doc"], "--figure x.doc: must end with one of .png"),
    ],
)
def test_mistakes_are_one_line(call, tmp_path, monkeypatch, results, more, message):
    monkeypatch.chdir(tmp_path)
    folders = [put(Path(name), *found) for name, *found in results]
    status, out, err = call(*folders, *more)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_evaluations_in_another_way_are_left_out_in_one_line_a_run(call, tmp_path, seed):
    folders = [put(tmp_path / m, perplexity(m, 1), positions(m, 1)) for m in MIXERS]
    plain = call(*folders)
    ways = ["perplexity-test-max_tokens=8192", "positions-test-beyond=last", "positions-test-beyond=mean"]
    for name in [*ways, "perplexity-val", "mqar-test", "lm_eval"]:  # the split and the tasks are a choice
        (folders[0] / f"evaluation-{name}.json").write_text("{}")
    status, out, err = call(*folders)
    assert (status, out) == (0, plain[1])
    only = "only evaluation-<task>-test.json is compared, without such options"
    assert err == f"left out: {folders[0]}: {', '.join(ways)}: {only}\n"


def test_a_run_without_anything_to_compare_is_said(call, tmp_path, seed):
    folders = [put(tmp_path / name) for name in ("empty", "val", "other")]
    (folders[1] / "evaluation-niah-val.json").write_text("{}")
    (folders[2] / "evaluation-niah-test-beyond=mean.json").write_text("{}")
    status, out, err = call(put(tmp_path / "a", perplexity("mamba2", 1)), *folders)
    assert (status, list(columns(out))) == (0, ["mamba2"])
    none, first = (
        "no evaluation-<task>-test.json (tasks: perplexity, positions, niah)",
        "run python -m src.evaluate with split=test",
    )
    assert err.splitlines() == [
        f"left out: {folders[0]}: {none}: {first} first",
        f"left out: {folders[1]}: {none}; there is evaluation-niah-val.json: give --split val, or {first}",
        f"left out: {folders[2]}: {none}; there is only evaluation-niah-test-beyond=mean.json: {first} first",
    ]


@pytest.mark.parametrize(("there", "other"), [("val", "test"), ("test", "val")])
def test_results_of_the_other_split_are_named(call, tmp_path, there, other):
    (put(tmp_path / "a") / f"evaluation-perplexity-{there}.json").write_text("{}")
    status, out, err = call(tmp_path / "a", "--split", other)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: no evaluation-<task>-{other}.json in these folders")
    assert f"there is evaluation-perplexity-{there}.json: give --split {there}, or run" in err
    assert err.endswith(f"with split={other}\n")


def test_broken_file_is_one_line(call, tmp_path):
    (tmp_path / "evaluation-niah-test.json").write_text("{")
    status, _, err = call(tmp_path)
    assert status == 2
    assert err.startswith(f"error: {tmp_path / 'evaluation-niah-test.json'}: cannot be read (")
    assert err.count("\n") == 1


def test_files_of_evaluate_fit(call, tmp_path):
    run_dir = run(tmp_path, "run.name=a")
    for task, lengths in (("perplexity", [16, 32]), ("positions", [8])):
        evaluate(EvaluateConfig(run=str(run_dir), task=task, split="test", lengths=lengths, device="cpu"))
    status, out, err = call(run_dir, "--figure", tmp_path / "a.png")
    assert (status, err) == (0, "")
    measured = json.loads((run_dir / "evaluation-perplexity-test.json").read_text())["lengths"]
    cells = columns(out)["mamba2"]
    assert [cells["perplexity at 16"], cells["perplexity at 32"]] == [f"{row['perplexity']:.2f}" for row in measured]


def like(found: dict, **changes) -> dict:
    return {**found, "data": {"fingerprint": "abc", "packing": "documents"}, "split": "test", "step": 9} | changes


@pytest.mark.parametrize("make", [perplexity, positions])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"fingerprint": "def"}}, "data must be the same to compare, but is abc in a, def in b"),
        ({"split": "val"}, "split must be the same to compare, but is test in a, val in b"),
        ({"tokenizer": 300}, "tokenizer must be the same to compare, but is"),
        ({"mixer": "softmax", "parameters": 7}, "a and b are both softmax, but have 1,234,567 and 7 parameters"),
    ],
)
def test_what_cannot_be_compared_is_refused(call, tmp_path, monkeypatch, seed, make, changes, message):
    monkeypatch.chdir(tmp_path)
    other = "mamba2" if "mixer" not in changes else "softmax"
    put(Path("a"), like(make("softmax", 1)))
    put(Path("b"), like(make(other, 2), **{k: v for k, v in changes.items() if k != "tokenizer"}))
    ByteTokenizer().save(Path("a"))
    if "tokenizer" in changes:
        (Path("b") / "tokenizer.json").write_text((Path("a") / "tokenizer.json").read_text())
        train_bpe(["some words of a text"] * 9, changes["tokenizer"]).save(Path("b"))
    else:
        ByteTokenizer().save(Path("b"))
    status, out, err = call("a", "b")
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err


def test_needles_of_another_haystack_are_refused(call, tmp_path, seed):
    """Which examples are drawn differs with the seed, and so does the data's fingerprint."""
    one = {**niah("mamba2", 1), "haystack_tokens": 900, "data": {"fingerprint": "abc"}}
    two = {**niah("softmax", 2), "haystack_tokens": 900, "data": {"fingerprint": "def"}}
    folders = put(tmp_path / "a", one), put(tmp_path / "b", two)
    assert call(*folders)[0] == 0
    put(folders[1], two | {"haystack_tokens": 901})
    status, _, err = call(*folders)
    assert (status, err.count("\n")) == (2, 1)
    assert "task=niah: haystack_tokens must be the same to compare, but is 900 in" in err


def test_other_numbers_of_tokens_are_refused_where_all_were_looked_at(call, tmp_path, monkeypatch, seed):
    monkeypatch.chdir(tmp_path)
    for options, refused in (({}, True), ({"max_tokens": 100}, False)):
        for name, mixer in (("a", "softmax"), ("b", "mamba2")):
            found = like(perplexity(mixer, 1), options=options)
            for row in found["lengths"]:
                row["tokens"] = 1000 + 5 * (name == "b" and row["length"] == 4096)
            put(Path(name), found)
        status, _, err = call("a", "b")
        assert status == 2 * refused
        message = "the number of tokens at 4K must be the same to compare, but is 1000 in a, 1005 in b"
        assert (message in err) == refused


def test_one_warning_says_what_differs(call, tmp_path, monkeypatch, seed):
    monkeypatch.chdir(tmp_path)
    put(Path("a"), like(perplexity("softmax", 1)), like(niah("softmax", 1), options={"depths": 3}))
    changed = {"trained_length": 64, "options": {"beyond": "mean"}}
    put(Path("b"), like(perplexity("mamba2", 1), **changed), like(niah("mamba2", 1), step=7, options={"depths": 5}))
    status, out, err = call("a", "b")
    assert status == 0
    assert set(columns(out)) == {"softmax", "mamba2"}
    assert err == (
        "warning: not the same for all runs: trained_length (1024 in a, 64 in b);"
        " options.beyond (null in a, mean in b); step (9 in a, 7 in b); options.depths (3 in a, 5 in b)\n"
    )
    put(Path("b"), like(perplexity("mamba2", 1)), like(niah("mamba2", 1), options={"depths": 3}))
    assert call("a", "b")[2] == ""


def test_bits_per_byte_at_a_length_of_all_runs(call, tmp_path, seed):
    made = perplexity("softmax", 1, (512, 4096)), perplexity("mamba2", 1, (1024, 4096))
    folders = [put(tmp_path / found["mixer"], found) for found in made]
    shown = columns(call(*folders)[1])
    for found in made:
        cells = shown[found["mixer"]]
        assert [name for name in cells if "bits" in name] == ["bits per byte at 4K"]
        assert cells["bits per byte at 4K"] == f"{found['lengths'][1]['bits_per_byte']:.4f}"
    put(folders[1], perplexity("mamba2", 1, (1024,)))
    assert "bits per byte" not in call(*folders)[1]
