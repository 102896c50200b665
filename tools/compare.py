"""Compare runs: `python -m tools.compare runs/a runs/b` (or none: all of runs/).

Prints one line a run and then every option in which the runs differ: a comparison is one of mixers only if
nothing else is listed. `--figure` draws a metric over the steps.
"""

import argparse
import csv
import json
import sys
from pathlib import Path

from src import runs
from src.errors import UserError
from src.files import read_yaml

BEST = "val/bits_per_byte", "val/loss", "val/accuracy"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.compare", description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="*", type=Path, help="run folders; default: all in runs/")
    parser.add_argument("--metric", default="val/bits_per_byte", help="what --figure draws, such as train/loss")
    parser.add_argument("--figure", type=Path, default=None, metavar="PNG", help="draw the curves here")
    options = parser.parse_args()
    try:
        folders = options.runs or sorted(path.parent for path in Path("runs").glob("*/metrics.csv"))
        if not folders:
            raise UserError("no run in runs/: train one, or name folders")
        loaded = {folder.name: load(folder) for folder in folders}
        print(table(loaded))
        if options.figure:
            draw(loaded, options.metric, options.figure)
            print(f"figure: {options.figure}")
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def load(folder: Path) -> dict:
    """`config` flat by dotted key, and `rows` of the metrics, each with the columns it has."""
    if not (folder / "metrics.csv").is_file() or not (folder / "config.yaml").is_file():
        raise UserError(f"{folder}: not a run folder (no metrics.csv and config.yaml)")
    with (folder / "metrics.csv").open() as file:
        rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    manifest = folder / "manifest.json"
    state = json.loads(manifest.read_text())[-1].get("state", "") if manifest.is_file() else ""
    if state == "running" and not runs.is_held(folder):
        state = "killed"
    return {"config": flat(read_yaml(folder / "config.yaml")), "rows": rows, "state": state}


def flat(options: dict, prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in options.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def last(rows: list[dict], tag: str) -> float | None:
    return next((row[tag] for row in reversed(rows) if tag in row), None)


def table(loaded: dict[str, dict]) -> str:
    tags = [tag for tag in BEST if any(last(run["rows"], tag) is not None for run in loaded.values())]
    width = max(len(name) for name in loaded)
    lines = [
        f"{'run':<{width}}  {'steps':>6}{'validated':>11}" + "".join(f"{tag:>19}" for tag in tags) + f"{'tokens/s':>12}"
    ]
    for name, run in loaded.items():
        rows = run["rows"]
        line = f"{name:<{width}}  {int(rows[-1]['step']) if rows else 0:>6}"
        validated = [int(row["step"]) for row in rows if any(tag in row for tag in tags)]
        line += f"{f'at {validated[-1]}' if validated else 'never':>11}"
        for tag in tags:
            value = last(rows, tag)
            line += f"{'' if value is None else f'{value:.4f}':>19}"
        rates = sorted(row["perf/tokens_per_s"] for row in rows if "perf/tokens_per_s" in row)
        line += f"{f'{rates[len(rates) // 2]:,.0f}' if rates else '':>12}"
        lines.append(line + ("" if run["state"] in ("", "finished") else f"  ({run['state']})"))
    keys = sorted({key for run in loaded.values() for key in run["config"]} - {"run.name", "run.dir", "resume"})
    differing = []
    for key in keys:
        values = [run["config"].get(key) for run in loaded.values() if key in run["config"]]
        # An option that only some mixers have is part of the choice of the mixer.
        if any(value != values[0] for value in values):
            differing.append(f"  {key}: " + ", ".join(dict.fromkeys(str(value) for value in values)))
    if len(loaded) > 1:
        lines += ["", "options that differ:" if differing else "no option differs", *differing]
    return "\n".join(lines)


def draw(loaded: dict[str, dict], metric: str, file: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise UserError("--figure needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot(xlabel="optimizer steps", ylabel=metric)
    drawn = 0
    for name, run in loaded.items():
        points = [(row["step"], row[metric]) for row in run["rows"] if metric in row]
        if points:
            axes.plot(*zip(*points, strict=True), marker="." if len(points) < 50 else "", label=name)
            drawn += 1
    if not drawn:
        known = sorted({tag for run in loaded.values() for row in run["rows"] for tag in row} - {"step"})
        raise UserError(f"--metric {metric}: no run has it (there are {', '.join(known)})")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(file, dpi=150)
    except (OSError, ValueError) as error:  # no such folder; an unknown ending
        raise UserError(f"--figure {file}: {str(error).splitlines()[0]}") from None


if __name__ == "__main__":
    sys.exit(main())
