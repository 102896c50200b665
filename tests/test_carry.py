"""data.carry_state=true: long documents cross rows; the state goes from step to step."""

import signal

import pytest
import torch

from src.callbacks.preemption import Preempted
from src.carry import CarriedStates
from src.config import Config, run_cli
from src.data.common.lanes import lane_rows
from src.data.text import Text
from src.errors import UserError
from src.model import LanguageModel, ModelConfig
from src.registry import MIXERS, build_options
from src.train import main
from tests.test_resume import assert_equal_runs, stop_after
from tests.training import assert_same_state, checkpoint, options, run

BOUNDED = [name for name in MIXERS.names() if name not in ("softmax", "hybrid")]


def build(name: str) -> LanguageModel:
    mixer = build_options(MIXERS.get(name), {}, "mixer")
    model = LanguageModel(ModelConfig(d_model=32, n_layers=2, mlp_ratio=1), mixer, 257, 512).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def novels(tmp_path, seed: int, **more) -> Text:
    for i, lines in enumerate((30, 2, 50, 3, 20)):
        (tmp_path / f"{i}.txt").write_text(f"{i} is {i * i}\n" * lines)
    config = Text.Config(
        name="text", path=[str(tmp_path / "*.txt")], tokenizer="bytes", seq_len=70, batch_size=2, carry_state=True,
        cache_dir=str(tmp_path / "cache"), split="tail", **more,
    )  # fmt: skip
    data = Text(config, seed=seed)
    data.setup()
    return data


@pytest.mark.parametrize("name", BOUNDED)
def test_rows_one_after_the_other_equal_whole_documents(name, tmp_path, seed):
    """The hidden states of an epoch are those of every document read at once; a new epoch begins anew."""
    data, model = novels(tmp_path, seed), build(name)
    rows = lane_rows(data.stream("train"), 2, 70)
    carried = CarriedStates()
    for epoch in range(2):
        lanes: list[list[torch.Tensor]] = [[], []]
        ids: list[list[int]] = [[], []]
        for step in range(epoch * rows, (epoch + 1) * rows):
            batch = data.batch("train", range(2 * step, 2 * step + 2))
            hidden = carried.hidden(model, batch, 0)
            for lane in range(2):
                lanes[lane].append(hidden[0, 70 * lane : 70 * lane + 70].detach())
                ids[lane] += batch["input_ids"][0, 70 * lane : 70 * lane + 70].tolist()
        for lane in range(2):
            line, tokens = torch.cat(lanes[lane]), torch.tensor(ids[lane])
            starts = [0, *(i for i in range(1, len(tokens)) if tokens[i] == 256), len(tokens)]  # 256: end of text
            for begin, end in zip(starts[:-1], starts[1:], strict=True):
                whole = model.hidden(tokens[None, begin:end])[0]
                torch.testing.assert_close(line[begin:end], whole, rtol=1e-8, atol=1e-8)


def test_gradients_stay_within_a_step(tmp_path, seed):
    data, model, carried = novels(tmp_path, seed), build("loglinear_gdn"), CarriedStates()
    for step in range(3):
        hidden = carried.hidden(model, data.batch("train", range(2 * step, 2 * step + 2)), 0)
        hidden.square().sum().backward()  # a graph that reached into the step before would be freed already
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize("step", [3, 5])
def test_resumed_run_equals_uninterrupted_one(tmp_path, monkeypatch, seed, step, micro):
    more = [
        f"seed={seed}",
        f"trainer.micro_batch_size={micro or 'null'}",
        "data.carry_state=true",
        "data.num_workers=2",
    ]
    more.append("mixer=loglinear_mamba2")
    whole = run(tmp_path, "run.name=whole", *more)
    with monkeypatch.context() as patch:
        stop_after(patch, step, signal.SIGTERM)
        with pytest.raises(Preempted):
            run(tmp_path, "run.name=parts", *more)
    parts = run(tmp_path, "run.name=parts", "resume=auto", *more)
    assert_equal_runs(parts, whole)
    saved = [checkpoint(run_dir)["carried_states"] for run_dir in (parts, whole)]
    for a, b in zip(saved[0][0].values(), saved[1][0].values(), strict=True):
        for x, y in zip(a.layers, b.layers, strict=True):
            assert_same_state(vars(x["memory"]), vars(y["memory"]))


def test_state_changes_what_is_learned(tmp_path):
    """Otherwise the tests above could pass with states that are never used."""
    runs = [run(tmp_path, f"run.name=a{c}", f"data.carry_state={c}", "mixer=mamba2") for c in ("true", "false")]
    losses = [checkpoint(run_dir)["metrics"]["train/loss"] for run_dir in runs]
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["mixer=softmax"], "mixer=softmax keeps keys and values"),
        (["mixer=hybrid", "model.n_layers=2"], "mixer=hybrid keeps keys and values"),
        (["data.packing=concatenate"], "needs data.packing=documents"),
        (["trainer.compile=true"], "trainer.compile=true"),
        (["data.batch_size=4096"], "data.batch_size=4096"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(tmp_path, more, message, capsys):
    with pytest.raises(SystemExit) as end:
        run_cli(main, Config, options(tmp_path, "data.carry_state=true", "run.name=a", *more))
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "runs" / "a").exists()


@pytest.mark.parametrize("more", ["mixer=softmax", "trainer.compile=true"])
def test_what_cannot_be_carried_is_said_before_the_data_is_prepared(tmp_path, more):
    cache = tmp_path / "cache"
    with pytest.raises(UserError, match="carry_state"):
        run(tmp_path, "data.carry_state=true", f"data.cache_dir={cache}", more)
    assert not cache.exists()


def test_other_micro_batches_cannot_take_the_states_over(tmp_path, capsys):
    more = ["data.carry_state=true", "run.name=a"]
    run(tmp_path, *more)
    with pytest.raises(SystemExit) as end:
        run_cli(
            main, Config,
            options(tmp_path, *more, "resume=auto", "trainer.max_steps=8", "trainer.micro_batch_size=2"),
        )  # fmt: skip
    assert end.value.code == 2
    assert "keep the number of ranks and trainer.micro_batch_size" in capsys.readouterr().err
