import math

import pytest
import torch
from torch import nn

from src.errors import UserError
from src.optim import OptimConfig, build_optimizer, lr_at, parameter_groups


class Model(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.inner = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.scales = nn.Parameter(torch.ones(2, 3))
        self.scales.no_weight_decay = True
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.head = nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def test_each_trainable_parameter_is_in_one_group_and_only_matrices_decay():
    model = Model()
    groups = parameter_groups(model, 0.1)
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(decay)
    names = {name: decay.get(id(p)) for name, p in model.named_parameters(remove_duplicate=False)}
    assert names == {
        "embedding.weight": 0.0,
        "head.weight": 0.0,  # tied
        "inner.weight": 0.1,
        "inner.bias": 0.0,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
        "scales": 0.0,
        "frozen": None,
    }


def test_untied_head_decays():
    model = Model(tied=False)
    decayed = parameter_groups(model, 0.1)[0]["params"]
    assert [id(p) for p in decayed] == [id(model.inner.weight), id(model.head.weight)]


def test_cosine():
    config = OptimConfig(warmup_steps=4, min_lr_ratio=0.1)
    values = [lr_at(step, config, 20) for step in range(21)]
    assert values[:4] == [0.25, 0.5, 0.75, 1.0]
    assert values[4] == 1.0
    assert values[12] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2)
    assert values[20] == pytest.approx(0.1)
    assert values[4:] == sorted(values[4:], reverse=True)
    assert lr_at(100, config, 20) == pytest.approx(0.1)


def test_wsd_and_constant():
    config = OptimConfig(schedule="wsd", warmup_steps=2, decay_steps=4, min_lr_ratio=0.0)
    assert [lr_at(step, config, 10) for step in range(11)] == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])
    assert lr_at(90, OptimConfig(schedule="wsd", warmup_steps=0), 100) == pytest.approx(0.55)  # a fifth decays
    assert lr_at(10**6, OptimConfig(schedule="constant", warmup_steps=0), 10) == 1.0


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_run_shorter_than_its_warmup_never_reaches_the_peak(schedule):
    config = OptimConfig(schedule=schedule, warmup_steps=100)
    values = [lr_at(step, config, 5) for step in range(5)]
    assert all(0 < v <= (step + 1) / 100 for step, v in enumerate(values))


def test_optimizer_follows_the_schedule():
    model, config = nn.Linear(2, 2), OptimConfig(lr=0.5, warmup_steps=3)
    built = build_optimizer(model, config, 10)
    assert built["lr_scheduler"]["interval"] == "step"
    for step in range(10):
        assert built["optimizer"].param_groups[0]["lr"] == pytest.approx(0.5 * lr_at(step, config, 10))
        model(torch.ones(1, 2)).sum().backward()
        built["optimizer"].step()
        built["lr_scheduler"]["scheduler"].step()


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", 0.0), ("betas", (0.9, 1.0)), ("min_lr_ratio", 2.0), ("decay_steps", 0), ("warmup_steps", -1)],
)
def test_impossible_options_are_named(key, value):
    with pytest.raises(UserError, match=rf"^optim\.{key}="):
        OptimConfig(**{key: value})
