"""`tools.bench`: its shapes, and who runs at them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.test_bench import TINY
from tools import bench, bench_figure, bench_latency
from tools.bench_peers import FlaLinear, candidates, choose
from tools.bench_shapes import SHAPES, Setup, draw


def resolved(arguments: list[str]) -> tuple[Setup, list[int]]:
    return bench.resolve(bench.build_parser().parse_args(arguments))


def test_heads_decay_at_all_rates() -> None:
    setup = Setup("ssd", "own sizes", 1, 4, 1, 16, 16, "float32", "cpu")
    means = draw(setup, 2000)["g"].mean((0, 1))
    torch.testing.assert_close(means, -torch.tensor([5e-5, 5e-4, 5e-3, 5e-2]), rtol=0.1, atol=0)


def test_first_steps_of_a_family(monkeypatch) -> None:
    """What is trained, and candidates with the sizes that they have here."""
    commands: list[list[str]] = []
    monkeypatch.setattr(
        bench_latency, "fresh", lambda words, printed: commands.append(words) or {"command": "", "seconds": 1.0}
    )
    for family, mixer in (("ssd", "loglinear_mamba2"), ("delta_rule", "loglinear_gdn")):
        setup, _ = resolved([family, "--shape", "paper_delta"])
        chosen = [candidates(family)[name] for name in ("loglinear", "softmax")]
        rows = bench_latency.first_steps(chosen, setup, 64)
        assert [row["what"] for row in rows] == ["loglinear", "softmax", f"training {mixer}"]
        assert f"mixer={mixer}" in commands[-1]
        for command in commands[-3:-1]:  # the fresh process means the same sizes
            fresh, lengths = resolved(command[2:])
            assert replace(fresh, shape="") == replace(setup, shape="")
            assert lengths == [64]


def test_softmax_peers_have_the_heads_that_a_shape_gives_them() -> None:
    sized = ["delta_rule", "--device", "cpu", "--shape", "paper_delta"]
    assert [resolved([*sized, *more])[0].attention for more in ([], ["--batch", "1"], ["--attention", "3", "32"])] == [
        (16, 96),
        (16, 96),
        (3, 32),
    ]
    assert resolved([*sized, "--heads", "2"])[0].attention is None
    assert resolved(["delta_rule", "--device", "cpu", "--shape", "delta"])[0].attention is None
    setup = resolved([*sized, "--batch", "1"])[0]
    tokens = draw(setup, 64)
    assert tokens["v"].shape == (1, 64, 6, 384)
    peer = candidates("delta_rule", setup.attention)["softmax"]
    assert {x.shape for x in peer.inputs(tokens).values()} == {(1, 64, 16, 96)}
    assert peer.about.endswith("16 heads of 96")
    assert "softmax 16 x 96" in str(setup)
    as_wide = candidates("delta_rule", (6, 384))["softmax"].inputs(tokens)
    assert as_wide["v"] is tokens["v"]


@pytest.mark.parametrize("name", ["delta", "delta1", "paper_delta"])
def test_shapes_of_the_delta_rule(name: str, monkeypatch) -> None:
    shape = SHAPES[name]
    assert shape.groups == shape.heads  # keys are of one head each
    assert shape.lengths == (2048, 4096, 8192, 16384, 131072)
    setup = Setup(
        "delta_rule", name, 1, shape.heads, shape.groups, shape.key_dim, shape.value_dim, "bfloat16", "cuda",
        shape.attention,
    )  # fmt: skip
    monkeypatch.setattr(FlaLinear, "load", lambda self: None)
    chosen, left_out = choose(setup, None)
    assert [one.name for one in chosen] == ["loglinear", "linear", "flash2", "cudnn", "fla_linear"]
    assert set(left_out) == {"loglinear_torch", "linear_torch", "loglinear_compiled", "softmax"}
    assert [one.name for one in choose(setup, ["loglinear_torch", "linear_torch"])[0]] == [
        "loglinear_torch",
        "linear_torch",
    ]


def test_own_heads_of_softmax_peers_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    asked = ["delta_rule", *TINY, "--attention", "2", "32", "--backward", "--json", str(file)]
    assert bench.main(asked) == 0
    assert "V 16, softmax 2 x 32, float32" in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert {row["candidate"] for row in report["rows"]} == {"loglinear", "linear", "softmax"}
    assert report["setup"]["attention"] == [2, 32]
    assert bench.main(["--from-json", str(file), "--figure", str(picture)]) == 0
    assert bench_figure.title_lines(report)[0].endswith("float32, softmax: 2 heads of 32")


def test_shapes_are_what_the_operators_take() -> None:
    for name, shape in SHAPES.items():
        sizes = (1, shape.heads, shape.groups, shape.key_dim, shape.value_dim)
        setup = Setup("ssd", name, *sizes, "bfloat16", "cpu")
        assert candidates("ssd")["loglinear"](draw(setup, 3)).dtype == torch.bfloat16
