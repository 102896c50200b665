"""Mixers at long context, over seeds: `python -m tools.long_context runs/novels-* runs/needles-* --figure long.png`.

Reads what `python -m src.evaluate` has left in the run folders (task=perplexity, positions, niah) and groups runs by
mixer. A number is the mean over the seeds, with the smallest and largest where there are several; a mixer with one
seed is marked, since one seed claims nothing. Losses of other data or tokens are not compared; a warning says where
runs were trained or measured in another way. Only `evaluation-<task>-<split>.json` is compared: a line for each run
says which other evaluations of the split (with `max_tokens=` or `beyond=`, say) are left out, or that it has none.
"""

import argparse
import csv
import json
import os
import sys
from collections.abc import Callable, Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

from src.data.common.tokenizer import load_tokenizer
from src.errors import UserError
from src.evaluation.figures import tokens_label
from src.options import one_line, show
from tools.long_context_views import depths, draw, points, tables

TASKS = ("perplexity", "positions", "niah")
NEEDED = ("mixer", "task", "seed", "parameters", "peak_state_bytes", "trained_length")
FIGURES = (".png", ".pdf", ".svg", ".jpg")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.long_context", description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders with evaluations")
    parser.add_argument("--split", default="test", choices=("val", "test"))
    parser.add_argument("--figure", type=Path, default=None, metavar="PNG", help="draw the curves here")
    parser.add_argument("--csv", type=Path, default=None, metavar="CSV", help="write every number of every seed here")
    options = parser.parse_args()
    try:
        found = load(options.runs, options.split)
        check(found)
        for option, file in (("--csv", options.csv), ("--figure", options.figure)):
            if file is not None:
                check_output(option, file)
        for folder in options.runs:
            if what := left_out(folder, options.split):
                sys.stderr.write(f"left out: {what}\n")
        if differing := differences(found):
            sys.stderr.write(f"warning: not the same for all runs: {'; '.join(differing)}\n")
        print(tables(found))
        if options.csv:
            write_csv(found, options.csv)
        if options.figure:
            draw(found).savefig(options.figure, dpi=150, bbox_inches="tight")
            print(f"figure: {options.figure}")
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def load(folders: Iterable[Path], split: str) -> list[dict[str, Any]]:
    """The evaluations in the folders, those of `TASKS`. Raises UserError where there is none."""
    folders = list(folders)
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder}: is no folder of a run")
    paths = [
        path for folder in folders for task in TASKS if (path := folder / f"evaluation-{task}-{split}.json").is_file()
    ]
    found = [read(path) for path in paths]
    if not found:
        names = sorted({name for folder in folders for name in evaluations(folder)})
        raise UserError(
            f"no evaluation-<task>-{split}.json in these folders (tasks: {', '.join(TASKS)}){instead(names, split)}"
        )
    seen: dict[tuple, Path] = {}
    for result, path in zip(found, paths, strict=True):
        key = (result["mixer"], result["task"], result["seed"])
        if key in seen:
            raise UserError(f"{path} and {seen[key]} are of the same mixer, task and seed: give one of the two")
        seen[key] = path
    return found


def evaluations(folder: Path) -> list[str]:
    """What the files are called that `python -m src.evaluate` has left there, as `niah-test`."""
    return [path.stem.removeprefix("evaluation-") for path in sorted(folder.glob("evaluation-*.json"))]


def left_out(folder: Path, split: str) -> str | None:
    """Which evaluations of that split in the folder are not compared, or that there is none to compare, and why."""
    names, own = evaluations(folder), [f"{task}-{split}" for task in TASKS]
    if not set(own) & set(names):
        return f"{folder}: no evaluation-<task>-{split}.json (tasks: {', '.join(TASKS)}){instead(names, split)}"
    others = [name for name in names if name.startswith(tuple(f"{name}-" for name in own))]
    if not others:
        return None
    return f"{folder}: {', '.join(others)}: only evaluation-<task>-{split}.json is compared, without such options"


def instead(names: Iterable[str], split: str) -> str:
    """What to do without any evaluation of the split, where there are those of these names."""
    other = "val" if split == "test" else "test"
    usable = [name for name in names if name in {f"{task}-{other}" for task in TASKS}]
    there = ", ".join(f"evaluation-{name}.json" for name in usable or names)
    if usable:
        return f"; there is {there}: give --split {other}, or run python -m src.evaluate with split={split}"
    return f"{f'; there is only {there}' if there else ''}: run python -m src.evaluate with split={split} first"


def read(path: Path) -> dict[str, Any]:
    """Raises UserError for a file that is not one of `python -m src.evaluate`."""
    try:
        result = json.loads(path.read_text())
        missing = [key for key in NEEDED if key not in result]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)})") from error
    if missing:
        raise UserError(f"{path}: has no {', '.join(missing)}; evaluate this run again")
    try:
        empty = not list(points([result]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: is no result of task={result['task']} ({one_line(error)})") from error
    if empty:
        raise UserError(f"{path}: has no number of task={result['task']}; evaluate this run again")
    return {**result, "folder": str(path.parent)}


def check(found: list[dict[str, Any]]) -> None:
    """Raises UserError for two runs whose numbers of a task cannot stand side by side."""
    for task in TASKS:
        own = [result for result in found if result["task"] == task]
        for a, b in combinations(own, 2):
            if a["mixer"] == b["mixer"] and a["parameters"] != b["parameters"]:
                sizes = f"{a['parameters']:,} and {b['parameters']:,} parameters"
                raise UserError(
                    f"{a['folder']} and {b['folder']} are both {a['mixer']}, but have {sizes}: no two seeds"
                )
        if len(own) < 2:
            continue
        # The examples of needles are drawn with the run's seed, and so is their fingerprint.
        data = {"haystack_tokens": _haystack} if task == "niah" else {"data": _data}
        for name, fact in {**data, "split": _split, "tokenizer": _tokenizer}.items():
            first, *others = [(result, fact(result)) for result in own]
            for other, value in others:
                if value != first[1]:
                    raise _not_comparable(task, first[0], other, name, first[1], value)
        for a, b in combinations(own, 2):
            counts = _token_counts(a), _token_counts(b)
            for length in sorted(counts[0].keys() & counts[1].keys()):
                if counts[0][length] != counts[1][length]:
                    what = f"the number of tokens at {tokens_label(length)}"
                    raise _not_comparable(task, a, b, what, counts[0][length], counts[1][length])


def differences(found: list[dict[str, Any]]) -> list[str]:
    """What runs of a task were trained or measured with, where it differs: a phrase each, with two of the runs."""
    facts: dict[str, Callable[[dict], Any]] = {
        key: lambda result, key=key: result.get(key) for key in ("trained_length", "step")
    }
    facts["packing"] = lambda result: result.get("data", {}).get("packing")
    facts["window"] = lambda result: result["length"] if result["task"] == "positions" and "length" in result else None
    options = sorted({key for result in found for key in result.get("options") or {}})
    facts |= {f"options.{key}": lambda result, key=key: (result.get("options") or {}).get(key) for key in options}
    phrases: dict[str, None] = {}  # each once, though several tasks have it
    for task in TASKS:
        own = [result for result in found if result["task"] == task]
        for name, fact in facts.items():
            for other in own[1:]:
                if (a := fact(own[0])) != (b := fact(other)):
                    phrases[f"{name} ({show(a)} in {own[0]['folder']}, {show(b)} in {other['folder']})"] = None
                    break
    return list(phrases)


def check_output(option: str, file: Path) -> None:
    """Raises UserError for a file that cannot be written."""
    if not file.resolve().parent.is_dir():
        raise UserError(f"{option} {file}: there is no folder {file.resolve().parent}")
    if file.is_dir():
        raise UserError(f"{option} {file}: is a folder")
    if not os.access(file if file.exists() else file.resolve().parent, os.W_OK):
        raise UserError(f"{option} {file}: cannot be written")
    if option == "--figure" and file.suffix.lower() not in FIGURES:
        raise UserError(f"{option} {file}: must end with one of {', '.join(FIGURES)}")


def _data(result: dict[str, Any]) -> str | None:
    return result.get("data", {}).get("fingerprint")


def _haystack(result: dict[str, Any]) -> int | None:
    return result.get("haystack_tokens")


def _split(result: dict[str, Any]) -> str | None:
    return result.get("split")


def _tokenizer(result: dict[str, Any]) -> str | None:
    """The fingerprint of the run's tokenizer; None where the folder keeps none."""
    folder = Path(result["folder"])
    return load_tokenizer(folder).fingerprint if (folder / "tokenizer.json").is_file() else None


def _token_counts(result: dict[str, Any]) -> dict[int, int]:
    """length -> tokens that the loss is of; empty where only some were looked at, which a warning is about."""
    if "max_tokens" in (result.get("options") or {}):
        return {}
    return {row["length"]: row["tokens"] for row in result.get("lengths", ()) if "tokens" in row}


def _not_comparable(task: str, a: dict, b: dict, what: str, of_a: object, of_b: object) -> UserError:
    values = f"{show(of_a)} in {a['folder']}, {show(of_b)} in {b['folder']}"
    return UserError(f"task={task}: {what} must be the same to compare, but is {values}")


def write_csv(found: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["mixer", "task", "what", "x", "seed", "value"])
        writer.writerows(sorted([*points(found), *depths(found)]))


if __name__ == "__main__":
    raise SystemExit(main())
