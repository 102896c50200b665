"""task=mqar: every cell of length and pairs, beyond the trained lengths too."""

import json

import pytest

from src.config import run_cli
from src.data.mqar import Kind
from src.errors import UserError
from src.evaluate import main
from src.evaluation import EvaluateConfig, open_run
from src.evaluation.mqar import cells, evaluate
from src.metrics import recall_table
from tests.training import rows, run


@pytest.fixture(scope="module")
def recall_run(tmp_path_factory):
    return run(
        tmp_path_factory.mktemp("recall"), "run.name=recall", "data=mqar", "data.seq_len=16", "data.n_pairs=2",
        "data.examples=64", "data.vocab_size=32", "data.val=16:2:8,16:4:8,32:4:8", "trainer.val_batches=null",
    )  # fmt: skip


def test_cells_of_training_and_beyond(recall_run, capsys):
    run_cli(main, EvaluateConfig, [f"run={recall_run}", "device=cpu", "examples=12"])
    out = capsys.readouterr().out
    saved = json.loads((recall_run / "evaluation-mqar-val.json").read_text())
    sizes = {(row["seq_len"], row["n_pairs"]): row["sequences"] for row in saved["recall"]}
    own = {(16, 2): 8, (16, 4): 8, (32, 4): 8}
    assert sizes == own | {(64, 4): 12, (64, 8): 12, (128, 4): 12, (256, 4): 12}  # 16 and 32 pairs need more keys
    assert recall_table(saved["recall"], 16) in out  # trained on 16; validation's 32 are beyond that
    assert (recall_run / "evaluation-mqar-val.png").stat().st_size > 1000
    last = rows(recall_run)[-1]
    for row in saved["recall"]:
        if (row["seq_len"], row["n_pairs"]) in own:  # the same examples as the last validation of training
            logged = float(last[f"val/accuracy/{row['seq_len']}x{row['n_pairs']}"])
            assert row["accuracy"] == pytest.approx(logged, abs=1e-6)


def test_the_figure_says_what_it_shows(recall_run):
    figure = evaluate(open_run(EvaluateConfig(run=str(recall_run), device="cpu", examples=12))).figure
    assert figure._suptitle.get_text().splitlines() == [
        "recall: recall by length and pairs",
        "val, 8 to 12 examples a cell",
    ]
    assert [list(line.get_ydata()) for line in figure.axes[0].lines] == [[0.5, 0.5]]
    assert figure._supxlabel.get_text() == "pairs\n(dashed: the trained length)\n(empty: not measured)"
    assert figure.axes[1].get_ylabel() == "accuracy"


def test_the_trained_length_is_that_of_training_examples(recall_run, tmp_path):
    def trained_length(run_dir) -> int:
        return open_run(EvaluateConfig(run=str(run_dir), device="cpu")).trained_length

    assert trained_length(recall_run) == 16  # validated at 32
    short = ["data=mqar", "data.seq_len=8", "data.n_pairs=2", "data.examples=64", "data.vocab_size=32"]
    further = run(tmp_path, "run.name=b", f"init_from={recall_run}", *short, "trainer.max_steps=1")
    assert trained_length(further) == 16  # the model's own
    room = run(tmp_path, "run.name=c", "model.max_seq_len=64", *short, "trainer.max_steps=1")
    assert trained_length(room) == 8


def test_lengths_that_are_asked_for():
    own = [Kind(16, 2, 8), Kind(32, 4, 8)]
    assert cells(own, [8, 64], 5, 100) == [Kind(8, 2, 5), Kind(64, 2, 5), Kind(64, 4, 5)]
    with pytest.raises(UserError, match="need 8 tokens"):
        cells(own, [4], 5, 100)


def test_table():
    kinds = [(64, 4, 0.5), (64, 8, 0.25), (128, 8, 1.0)]
    table = recall_table([{"seq_len": t, "n_pairs": n, "accuracy": a} for t, n, a in kinds])
    assert [line.split() for line in table.splitlines()[1:]] == [
        ["tokens", "/", "pairs", "4", "8"], ["64", "50.0%", "25.0%"], ["128", "100.0%"]
    ]  # fmt: skip
    assert "beyond" not in table
