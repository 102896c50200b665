"""Measure a trained model: `python -m src.evaluate run=<name> task=positions`; `--help` lists every option."""

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only
from torch.utils.tensorboard import SummaryWriter

from src import config
from src.evaluation import EvaluateConfig, Report, Trained, changed, open_run, task_of
from src.files import write_json
from src.loggers import quiet_lightning
from src.options import show


@rank_zero_only
def main(options: EvaluateConfig) -> None:
    results = evaluate(options)
    print(results.pop("table"))
    print(f"\nwritten to {results['file']}" + (f" and {results['figure']}" if "figure" in results else ""))
    if "kept" in results:
        print(results["kept"])


def evaluate(options: EvaluateConfig) -> dict[str, Any]:
    """What is measured; the same is written as JSON, as a figure, and to the run's TensorBoard events."""
    quiet_lightning()
    trained = open_run(options)
    name, task = task_of(trained)
    with trained.arithmetic():
        report = task(trained)
    return {**_write(trained, name, report), "table": report.table}


def _write(trained: Trained, name: str, report: Report) -> dict[str, Any]:
    options, run_dir = trained.options, trained.run_dir
    results: dict[str, Any] = {
        "run": run_dir.name,
        "task": name,
        **({"split": options.split} if report.by_split else {}),
        "checkpoint": options.checkpoint,
        "step": trained.module.loaded_step,
        "trained_length": trained.trained_length,
        "mixer": trained.run.mixer.name,
        "parameters": trained.model.num_parameters(),
        "peak_state_bytes": trained.model.peak_state_bytes(trained.trained_length),
        "seed": trained.run.seed,
        "device": str(trained.device),
        "precision": trained.precision,
        "options": {key: value for key, value in changed(options).items() if key != "split"},
        **report.values,
    }
    file = Path(options.output) if options.output else run_dir / f"evaluation-{_label(trained, name, report)}.json"
    picture = file.with_suffix(".png")
    kept = None if options.output else _keep_other(file, results["options"])
    write_json(file, results)
    results["file"] = str(file)
    if kept:
        results["kept"] = kept
    if report.figure is not None:
        report.figure.savefig(picture, dpi=150, bbox_inches="tight")
        results["figure"] = str(picture)
    elif not options.output:
        picture.unlink(missing_ok=True)  # of an earlier call: it would not belong to the numbers beside it
    if not options.output:
        _to_tensorboard(trained, name, report)
    return results


def _label(trained: Trained, name: str, report: Report) -> str:
    """Task and split, and what makes the result one of something else than the trained model on its data."""
    parts = [name, *([trained.options.split] if report.by_split else [])]
    chosen = changed(trained.options)
    for key in ("checkpoint", "beyond", "precision", "max_tokens", "limit"):
        if key in chosen:
            parts.append(f"{key}={chosen[key]}")
    if "data" in chosen:
        parts.append("data=" + hashlib.sha256(repr(sorted(chosen["data"].items())).encode()).hexdigest()[:8])
    return "-".join(parts)


def _keep_other(file: Path, options: dict[str, Any]) -> str | None:
    """Put aside an earlier result of other options, such as lengths=, which may be hours of work; says where."""
    try:
        before = json.loads(file.read_text())["options"]
    except (OSError, ValueError, KeyError):
        return None  # there is none, or it is no result
    if _measured(before) == _measured(options):
        return None
    number = 1
    while (aside := file.with_name(f"{file.stem}-{number}.json")).exists():
        number += 1
    file.rename(aside)
    with contextlib.suppress(FileNotFoundError):
        file.with_suffix(".png").rename(aside.with_suffix(".png"))
    chosen = " ".join(f"{key}={show(value).replace(' ', '')}" for key, value in before.items()) or "the default options"
    return f"the earlier result, of {chosen}, is kept as {aside}"


def _measured(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != "piece"}  # changes no number


def _to_tensorboard(trained: Trained, name: str, report: Report) -> None:
    """Events of their own in the run folder, so that the curves lie over those of other runs."""
    step, prefix = trained.module.loaded_step, _label(trained, name, report)
    with SummaryWriter(str(trained.run_dir), filename_suffix=f".{prefix}") as writer:
        for tag, value in report.scalars.items():
            writer.add_scalar(f"{prefix}/{tag}", value, step)
        for tag, points in report.curve.items():
            for place, value in points:
                writer.add_scalar(f"{prefix}/{tag}", value, place)
        if report.figure is not None:
            writer.add_figure(prefix, report.figure, step)


if __name__ == "__main__":
    config.run_cli(main, EvaluateConfig)
