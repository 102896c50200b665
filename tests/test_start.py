"""init_from=: a run that starts from the weights of another."""

import pytest

from src.config import Config, load, run_cli
from src.evaluation import EvaluateConfig, open_run
from src.train import main
from tests.training import checkpoint, options, rows, run


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    run(folder, "run.name=origin", "mixer=loglinear_gdn", "data.tokenizer=bpe", "data.vocab_size=300")
    return folder


def further(folder, *more: str) -> list[str]:
    """Options that say nothing of the mixer, the model or the tokenizer."""
    lines = options(folder, *more)
    return [line for line in lines if not line.startswith(("mixer=", "model.", "data.tokenizer"))] + [
        line for line in more if line.startswith(("mixer=", "model.", "data.tokenizer"))
    ]


def test_starts_where_the_other_run_ended(origin, capsys):
    run_cli(main, Config, further(origin, "run.name=on", "init_from=origin", "data.seq_len=32", "trainer.max_steps=4"))
    assert "from the weights of origin" in capsys.readouterr().out
    first, on = origin / "runs" / "origin", origin / "runs" / "on"
    assert load(on).mixer == load(first).mixer
    assert load(on).model.d_model == load(first).model.d_model
    assert load(on).model.max_seq_len == 16  # the levels of the first run, though rows are longer
    assert (on / "tokenizer.json").read_text() == (first / "tokenizer.json").read_text()
    untrained, before = rows(on)[0]["val/loss"], rows(first)[-1]["val/loss"]
    assert float(untrained) == pytest.approx(float(before), rel=0.1)  # other rows of the same text
    assert float(untrained) < float(rows(first)[0]["val/loss"])
    assert checkpoint(on)["global_step"] == 4
    assert open_run(EvaluateConfig(run=str(on), device="cpu")).trained_length == 32


def test_same_rows_give_the_same_loss_and_a_resume_goes_on(origin):
    more = ["run.name=same", "init_from=origin", "trainer.val_batches=2"]
    run_cli(main, Config, further(origin, *more, "trainer.max_steps=2"))
    same, first = origin / "runs" / "same", origin / "runs" / "origin"
    assert rows(same)[0]["val/loss"] == rows(first)[-1]["val/loss"]
    weights = checkpoint(same)["state_dict"]
    run_cli(main, Config, [f"run.dir={origin / 'runs'}", "run.name=same", "resume=auto", "trainer.max_steps=3"])
    assert checkpoint(same)["global_step"] == 3
    after = checkpoint(same)["state_dict"]
    moved = max((after[k] - weights[k]).abs().max() for k in weights)
    assert 0 < moved < 0.01  # one step on, not a new start


RECALL = ("data=mqar", "data.n_pairs=2", "data.vocab_size=257", "data.examples=64")


def test_a_run_without_a_tokenizer_starts_no_run_on_text(tmp_path, capsys):
    """Though both have as many token ids."""
    run(tmp_path, "run.name=recall", *RECALL)
    for data in ("text", "niah"):
        more = ["data=niah", "data.haystack=pystdlib"] if data == "niah" else [f"data={data}"]
        with pytest.raises(SystemExit) as end:
            run_cli(main, Config, options(tmp_path, "run.name=wrong", "init_from=recall", *more))
        assert end.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith(
            f"error: data={data}: init_from=recall was trained on data=mqar, which has no tokenizer"
        )
        assert error.count("\n") == 1
        assert not (tmp_path / "runs" / "wrong").exists()
    run_cli(main, Config, options(tmp_path, "run.name=on", "init_from=recall", *RECALL))
    assert "from the weights of recall" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["init_from=orign"], "init_from=orign: no such run; did you mean 'origin'?"),
        (["init_from=origin", "mixer=softmax"], "is a run of loglinear_gdn"),
        (["init_from=origin", "model.d_model=32"], "has shape"),
        (["init_from=origin", "data.tokenizer=bytes"], "brings its own tokenizer"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(origin, more, message, capsys):
    with pytest.raises(SystemExit) as end:
        run_cli(main, Config, further(origin, "run.name=wrong", *more))
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not (origin / "runs" / "wrong").exists()
