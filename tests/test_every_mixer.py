"""Each mixer through everything that a user does with it: train, evaluate, generate, continue."""

import math
from pathlib import Path

import pytest

from src.config import run_cli
from src.evaluate import evaluate
from src.evaluation import EvaluateConfig
from src.generate import GenerateConfig
from src.generate import main as generate
from src.registry import MIXERS
from tests.training import checkpoint, run

EXAMPLE = Path(__file__).parent / "plugins" / "ema.py"


@pytest.fixture
def example():
    yield [f"plugins=[{EXAMPLE}]"]
    MIXERS._files.pop(EXAMPLE.stem, None)  # other tests look at the registry as it is without it


@pytest.mark.parametrize("name", [*MIXERS.names(), EXAMPLE.stem])
def test_train_evaluate_generate_resume(tmp_path, capsys, example, name):
    """Rows of more than one chunk, documents of several lengths, two layers (a hybrid has two mixers)."""
    more = [f"mixer={name}", "model.n_layers=2", "data.seq_len=96", "trainer.val_every=2", "trainer.val_batches=1"]
    more += example if name == EXAMPLE.stem else []
    run_dir = run(tmp_path, "run.name=a", "trainer.max_steps=2", *more)

    results = evaluate(EvaluateConfig(run=str(run_dir), device="cpu", max_tokens=200))
    assert results["step"] == 2
    assert 0 < results["loss"] < 2 * math.log(257)

    run_cli(generate, GenerateConfig, [f"run={run_dir}", "device=cpu", "prompt=" + "def " * 20, "max_new_tokens=3"])
    out, err = capsys.readouterr()
    assert "def def" in out
    assert "bytes after" in err

    run(tmp_path, "run.name=a", "resume=auto", "trainer.max_steps=3", *more)
    assert checkpoint(run_dir)["global_step"] == 3
