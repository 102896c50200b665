"""Mixers at long context, over seeds: `python -m tools.long_context runs/novels-* runs/needles-* --figure long.png`.

Reads what `python -m src.evaluate` has left in the run folders (task=perplexity, positions, niah) and groups runs by
mixer. A number is the mean over the seeds, with the smallest and largest where there are several; a mixer with one
seed is marked, since one seed claims nothing. Losses of other data or tokens are not compared; a warning says where
runs were trained or measured in another way.
"""

import argparse
import csv
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from src.data.common.tokenizer import load_tokenizer
from src.errors import UserError
from src.evaluation.figures import tokens_label
from src.options import one_line, show

ORDER = ("softmax", "mamba2", "loglinear_mamba2", "gated_deltanet", "loglinear_gdn")
COLOURS = dict(zip(ORDER, ("black", "tab:orange", "tab:red", "tab:cyan", "tab:blue"), strict=True))
TASKS = ("perplexity", "positions", "niah")
FIGURES = (".png", ".pdf", ".svg", ".jpg")
# (mixer, task, what) -> x -> the value of every seed
Values = dict[tuple[str, str, str], dict[float, list[float]]]


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
        if differing := differences(found):
            sys.stderr.write(f"warning: not the same for all runs: {'; '.join(differing)}\n")
        print(table(found))
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
        raise UserError(
            f"no evaluation-<task>-{split}.json in these folders (tasks: {', '.join(TASKS)}):"
            " run python -m src.evaluate first"
        )
    seen: dict[tuple, Path] = {}
    for result, path in zip(found, paths, strict=True):
        key = (result["mixer"], result["task"], result["seed"])
        if key in seen:
            raise UserError(f"{path} and {seen[key]} are of the same mixer, task and seed: give one of the two")
        seen[key] = path
    return found


def read(path: Path) -> dict[str, Any]:
    """Raises UserError for a file that is not one of `python -m src.evaluate`."""
    try:
        result = json.loads(path.read_text())
        missing = [key for key in ("mixer", "task", "seed", "parameters", "trained_length") if key not in result]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)})") from error
    if missing:
        raise UserError(f"{path}: has no {', '.join(missing)}; evaluate this run again")
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
        if task == "niah" or len(own) < 2:
            continue
        for name, fact in {"data": _data, "split": _split, "tokenizer": _tokenizer}.items():
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


def points(found: list[dict[str, Any]]) -> Iterator[tuple[str, str, str, float, int, float]]:
    """(mixer, task, what, x, seed, value) of everything that is drawn or listed.

    What a run has not is left out (words and bytes are counted of text only); null in a file was not finite: NaN.
    """
    for result in found:
        mixer, task, seed = result["mixer"], result["task"], result["seed"]
        if task == "perplexity":
            for row in result["lengths"]:
                for what in ("perplexity", "word_perplexity", "bits_per_byte", "loss"):
                    if what in row:
                        yield mixer, task, what, row["length"], seed, _number(row[what])
        elif task == "positions":
            for row in result["positions"]:
                yield mixer, task, "loss", (max(row["begin"], 1) * row["end"]) ** 0.5, seed, _number(row["loss"])
        elif task == "niah":
            cells = defaultdict(list)
            for row in result["cells"]:
                for what in ("found", "exact"):
                    cells[f"{what}/{row['task']}", row["length"]].append(row[what])
            for (what, length), values in cells.items():
                yield mixer, task, what, length, seed, float(np.mean(values))


def gather(found: list[dict[str, Any]]) -> Values:
    values: Values = defaultdict(lambda: defaultdict(list))
    for mixer, task, what, x, _, value in points(found):
        values[mixer, task, what][x].append(value)
    return values


def table(found: list[dict[str, Any]]) -> str:
    """A line a mixer, as Markdown: perplexity and needles by length, bits per byte at the first common length."""
    values = gather(found)
    lengths = sorted({x for (_, task, _), by in values.items() if task == "perplexity" for x in by})
    texts = common_lengths(found, "bits_per_byte")
    needles = sorted({what for _, task, what in values if task == "niah" and what.startswith("found/")})
    depths = sorted({x for (_, task, _), by in values.items() if task == "niah" for x in by})
    head = ["mixer", "seeds", "parameters", "state, bytes"]
    head += [f"perplexity at {tokens_label(n)}" for n in lengths]
    head += [f"bits per byte at {tokens_label(n)}" for n in texts[:1]]
    head += [f"{what.partition('/')[2]} at {tokens_label(n)}" for what in needles for n in depths]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for mixer in _mixers(found):
        own = [result for result in found if result["mixer"] == mixer]
        seeds = sorted({result["seed"] for result in own})
        cells = [f"`{mixer}`", ", ".join(map(str, seeds)) + (" (one)" if len(seeds) == 1 else "")]
        # A mixer's runs for another task may have another vocabulary.
        for key in ("parameters", "state_bytes"):
            cells.append(" / ".join(f"{n:,}" for n in sorted({result.get(key, 0) for result in own})))
        cells += [_spread(values[mixer, "perplexity", "perplexity"].get(n, []), ".2f") for n in lengths]
        cells += [_spread(values[mixer, "perplexity", "bits_per_byte"].get(n, []), ".4f") for n in texts[:1]]
        cells += [_spread(values[mixer, "niah", what].get(n, []), ".0%") for what in needles for n in depths]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def common_lengths(found: list[dict[str, Any]], what: str) -> list[int]:
    """The row lengths at which every run's perplexity evaluation has that number."""
    runs = [result["lengths"] for result in found if result["task"] == "perplexity"]
    lengths = [{row["length"] for row in rows if what in row} for rows in runs]
    return sorted(set.intersection(*lengths)) if lengths else []


def draw(found: list[dict[str, Any]]) -> Figure:
    """Loss by position, loss by row length, and needles by length, whichever there are; bands from seed to seed."""
    values = gather(found)
    panels = [("positions", "loss", "position, tokens", "loss, nats a token")]
    panels += [("perplexity", "perplexity", "tokens a row", "perplexity")]
    tasks = sorted({what for _, task, what in values if task == "niah" and what.startswith("found/")})
    panels += [("niah", what, "length, tokens", f"needles found, {what.partition('/')[2]}") for what in tasks]
    panels = [p for p in panels if any((m, *p[:2]) in values for m in _mixers(found))]
    figure = Figure(figsize=(5.2 * len(panels), 4))
    for axes, (task, what, x, y) in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
        for mixer in _mixers(found):
            by = values.get((mixer, task, what))
            if not by:
                continue
            places = sorted(by)
            low, mean, high = ([f(by[p]) for p in places] for f in (min, np.mean, max))
            colour = COLOURS.get(mixer)
            axes.plot(
                places, mean, label=mixer, color=colour, marker=None if task == "positions" else "o", markersize=4
            )
            axes.fill_between(places, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: tokens_label(value))
        for trained in {result["trained_length"] for result in found if result["task"] == task}:
            axes.axvline(trained, color="grey", linestyle="--", linewidth=1)
        axes.set(xlabel=x, ylabel=y)
        if task == "niah":
            axes.set_ylim(-0.03, 1.03)
        axes.grid(alpha=0.3)
    handles = {
        label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.axes[-1].legend(handles.values(), handles, fontsize=8)  # a mixer may be in some panels only
    figure.suptitle("dashed: the trained length", fontsize=9)
    return figure


def write_csv(found: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["mixer", "task", "what", "x", "seed", "value"])
        writer.writerows(sorted(points(found)))


def _mixers(found: list[dict[str, Any]]) -> list[str]:
    names = {result["mixer"] for result in found}
    return [*(name for name in ORDER if name in names), *sorted(names - set(ORDER))]


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _spread(values: list[float], form: str) -> str:
    """The mean, and from the smallest to the largest of several seeds."""
    if not values:
        return "–"
    if not np.isfinite(values).all():
        return "not finite"
    mean = format(float(np.mean(values)), form)
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}}–{max(values):{form}})"


if __name__ == "__main__":
    raise SystemExit(main())
