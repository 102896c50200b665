"""Evaluate a trained model: `python -m src.evaluate run=<name> split=test`; `--help` lists every option."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer

from src import config, runs
from src.config import Config
from src.data import DataModule
from src.errors import UserError
from src.files import write_json
from src.loggers import quiet_lightning
from src.module import LanguageModule, check_backend, load_module, pick_device
from src.options import type_hints
from src.registry import DATA, build_options


@dataclass(kw_only=True)
class EvaluateConfig:
    """Validation or test loss of a trained model, with its run's data or others."""

    run: str
    """Name of the run in runs_dir, or the path of its folder."""
    split: Literal["val", "test"] = "val"
    """Which part of the data; all of it, not only the batches that training looked at."""
    checkpoint: Literal["last", "best"] = "last"
    """Which checkpoint of the run: the last, or the one of the lowest validation loss."""
    data: dict[str, Any] = field(default_factory=dict)
    """Data options that replace the run's, as data.path=… or data.seq_len=…; data.name chooses other data."""
    batches: int | None = None
    """Batches to evaluate; null: all."""
    precision: Literal["32-true", "bf16-mixed"] | None = None
    """Arithmetic; null: as in training."""
    device: str = "auto"
    """cpu, cuda, cuda:1 or mps; auto: a GPU where there is one."""
    output: str | None = None
    """JSON file to write; null: evaluation-<split>.json in the run folder."""
    runs_dir: str = "runs"
    """Folder that holds the runs."""

    def __post_init__(self) -> None:
        if self.batches is not None and self.batches < 1:
            raise UserError(f"batches={self.batches}: must be at least 1 (null evaluates all)")


def main(cfg: EvaluateConfig) -> None:
    results = evaluate(cfg)
    for name in ("loss", "perplexity", "word_perplexity", "bits_per_byte", "accuracy"):
        if name in results:
            print(f"{name.replace('_', ' '):<15} {results[name]:.4f}")
    print(f"{'tokens':<15} {results['tokens']:,}")
    if results["recall"]:
        print(recall_table(results["recall"]))
    print(f"written to {results['file']}")


def evaluate(cfg: EvaluateConfig) -> dict[str, Any]:
    """The numbers of `main`, which are also written as JSON."""
    quiet_lightning()
    run_dir = runs.find(cfg.run, cfg.runs_dir)
    device = pick_device(cfg.device)
    run = config.load(run_dir)
    check_backend(run.mixer, device.type, cfg.precision or run.trainer.precision)
    module = load_module(runs.checkpoint(run_dir, cfg.checkpoint))
    data = build_data(run, run_dir, cfg.data)
    if data.vocab_size != module.model.vocab_size:
        raise UserError(
            f"data.name={data.config.name} has {data.vocab_size} token ids,"
            f" the model of run {run_dir.name} has {module.model.vocab_size}"
        )
    trainer = Trainer(
        accelerator="gpu" if device.type == "cuda" else device.type,
        devices=[device.index or 0] if device.type == "cuda" else 1,
        precision=cfg.precision or run.trainer.precision,
        limit_val_batches=cfg.batches or 1.0,
        limit_test_batches=cfg.batches or 1.0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    (trainer.validate if cfg.split == "val" else trainer.test)(module, datamodule=data, verbose=False)
    return _write(cfg, run_dir, data, module, device)


def _write(
    cfg: EvaluateConfig, run_dir: Path, data: DataModule, module: LanguageModule, device: torch.device
) -> dict[str, Any]:
    prefix = f"{cfg.split}/"
    results: dict[str, Any] = {
        "run": run_dir.name,
        "split": cfg.split,
        "checkpoint": cfg.checkpoint,
        "step": module.loaded_step,
        "tokens": module.evaluated_tokens,
        **{tag.removeprefix(prefix): v for tag, v in module.evaluated.items()},
        "recall": [
            {"seq_len": seq_len, "n_pairs": n_pairs, "accuracy": total / n, "sequences": n}
            for (seq_len, n_pairs), (total, n) in sorted(module.recall_kinds.items())
        ],
        "data": {**data.options(), "fingerprint": data.fingerprint},
        "device": str(device),
    }
    file = Path(cfg.output) if cfg.output else run_dir / f"evaluation-{cfg.split}.json"
    write_json(file, results)
    return {**results, "file": str(file)}


def recall_table(rows: list[dict[str, Any]]) -> str:
    """Accuracy by sequence length (lines) and number of pairs (columns)."""
    lengths = sorted({row["seq_len"] for row in rows})
    pairs = sorted({row["n_pairs"] for row in rows})
    cells = {(row["seq_len"], row["n_pairs"]): f"{row['accuracy']:.1%}" for row in rows}
    lines = ["accuracy, mean over sequences", f"{'tokens / pairs':<14}" + "".join(f"{n:>8}" for n in pairs)]
    for length in lengths:
        lines.append(f"{length:<14}" + "".join(f"{cells.get((length, n), ''):>8}" for n in pairs))
    return "\n".join(lines)


def build_data(run: Config, run_dir: Path, changes: dict[str, Any]) -> DataModule:
    """The data of a run with some options replaced, set up; text keeps the tokenizer that the run saved."""
    name = changes.get("name", run.data.name)
    cls = DATA.get(name)
    saved = config.asdict(run.data)
    if name != run.data.name:
        saved = {"name": name, "seq_len": saved["seq_len"], "batch_size": saved["batch_size"]}
    if "val_rows" in type_hints(cls.Config):
        saved["val_rows"] = None
    tokenizer = run_dir / "tokenizer.json"
    if tokenizer.is_file() and "tokenizer" in type_hints(cls.Config):
        if "tokenizer" in changes:
            raise UserError("data.tokenizer: a trained model keeps the tokenizer of its run")
        saved["tokenizer"] = str(tokenizer)
    # As many rows at once as training had room for, unless the call says how many.
    micro = None if "batch_size" in changes else run.trainer.micro_batch_size
    data = cls(build_options(cls, {**saved, **changes}, "data"), seed=run.seed, micro_batch_size=micro)
    data.prepare_data()
    data.setup("test")
    return data


if __name__ == "__main__":
    config.run_cli(main, EvaluateConfig)
