"""Tiny runs for the tests of training."""

import csv
from pathlib import Path
from typing import Any

import torch

from src.config import Config, compose
from src.train import train

TINY = (
    "mixer=mamba2",
    "data=text",
    "data.tokenizer=bytes",
    "data.seq_len=16",
    "data.batch_size=4",
    "model.d_model=16",
    "model.n_layers=1",
    "trainer.accelerator=cpu",
    "trainer.devices=1",
    "trainer.max_steps=6",
    "trainer.val_every=3",
    "trainer.val_batches=2",
    "trainer.log_every=1",
    "trainer.checkpoint_every=2",
    "trainer.sample_tokens=0",
    "trainer.progress=false",
    "optim.warmup_steps=2",
)


def write_corpus(folder: Path, documents: int = 40) -> Path:
    """A folder of short, different text files."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(documents):
        text = "".join(f"def f{i}_{j}(x): return x + {i * j}\n" for j in range(3 + i % 5))
        (folder / f"{i}.txt").write_text(text)
    return folder


def options(tmp_path: Path, *more: str) -> list[str]:
    """The command line of a tiny run in `tmp_path`; later keys replace earlier ones."""
    corpus = tmp_path / "corpus"
    if not corpus.exists():
        write_corpus(corpus)
    lines = [*TINY, f"data.path={corpus}", f"run.dir={tmp_path / 'runs'}", *more]
    keyed = {line.partition("=")[0]: line for line in lines}
    if "data=text" not in keyed.values():  # another data set has not all of its options
        for key in ("data.path", "data.tokenizer"):
            keyed.pop(key)
    return list(keyed.values())


def config(tmp_path: Path, *more: str) -> Config:
    return compose(options(tmp_path, *more))


def run(tmp_path: Path, *more: str) -> Path:
    """Train a tiny run in this process; its folder."""
    return train(config(tmp_path, *more))


def checkpoint(run_dir: Path, name: str = "last") -> dict[str, Any]:
    return torch.load(run_dir / "checkpoints" / f"{name}.ckpt", weights_only=True)


def rows(run_dir: Path) -> list[dict[str, str]]:
    """`metrics.csv` without what depends on the machine's speed and memory."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if not k.startswith(("perf/", "mem/"))} for row in csv.DictReader(file)]


def assert_same_state(a: Any, b: Any, where: str = "") -> None:
    """Bit-equal tensors and equal values, at every depth."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same_state(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same_state(x, y, f"{where}[{i}]")
    else:
        assert a == b or (a != a and b != b), f"{where}: {a} != {b}"
