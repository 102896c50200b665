"""What `tools.long_context` shows of evaluations: tables as Markdown, and a figure."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from src.evaluation.figures import tokens_label

ORDER = ("softmax", "mamba2", "loglinear_mamba2", "gated_deltanet", "loglinear_gdn")
COLOURS = dict(zip(ORDER, ("black", "tab:orange", "tab:red", "tab:cyan", "tab:blue"), strict=True))
LINEAR = {"loglinear_mamba2": "mamba2", "loglinear_gdn": "gated_deltanet"}
"""The mixer that each log-linear one is without its levels."""
OTHERS = ("tab:green", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:grey")  # of further mixers, in turn
COLUMNS = 3  # of panels
NOISY = 256  # a loss at earlier positions is the mean of few tokens: what levels gain there is not drawn

Results = list[dict[str, Any]]
# x -> seed -> value, by (mixer, task, what)
Curve = dict[float, dict[int, float]]
Values = dict[tuple[str, str, str], Curve]


def points(found: Results) -> Iterator[tuple[str, str, str, float, int, float]]:
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


def depths(found: Results) -> Iterator[tuple[str, str, str, float, int, float]]:
    """As `points`, for needles depth by depth, from 0 (the beginning) to 1: found/single_1/depth=0.25, say."""
    for result in found:
        for row in result.get("cells", ()) if result["task"] == "niah" else ():
            for what in ("found", "exact"):
                name = f"{what}/{row['task']}/depth={row['depth']:g}"
                yield result["mixer"], "niah", name, row["length"], result["seed"], float(row[what])


def gather(found: Results) -> Values:
    values: Values = defaultdict(lambda: defaultdict(dict))
    for mixer, task, what, x, seed, value in points(found):
        values[mixer, task, what][x][seed] = value
    return values


def gain(values: Values, mixer: str, task: str) -> Curve:
    """The loss of a log-linear mixer minus its linear one's, x -> seed -> nats a token, of the seeds that both have."""
    own, linear = (values.get((name, task, "loss"), {}) for name in (mixer, LINEAR.get(mixer, "")))
    differences = {x: {s: v - linear[x][s] for s, v in own[x].items() if s in linear[x]} for x in own if x in linear}
    return {x: by for x, by in differences.items() if by}


# ---- tables


def tables(found: Results) -> str:
    """Perplexity by length; needles; and what levels gained over the linear mixer, seed by seed."""
    values = gather(found)
    parts = [_losses(found, values), _needles(found, values), _gains(values)]
    return "\n\n".join(part for part in parts if part)


def _losses(found: Results, values: Values) -> str:
    """Every mixer, with its sizes; bits per byte at the first length that all have."""
    lengths = _places(values, "perplexity")
    texts = common_lengths(found, "bits_per_byte")
    head = ["mixer", "seeds", "parameters", "fp32 state within the trained length, bytes"]
    head += [f"perplexity at {tokens_label(n)}" for n in lengths]
    head += [f"bits per byte at {tokens_label(n)}" for n in texts[:1]]
    rows = []
    for mixer in mixers(found):
        own = [result for result in found if result["mixer"] == mixer]
        seeds = sorted({result["seed"] for result in own})
        cells = [f"`{mixer}`", ", ".join(map(str, seeds)) + (" (one)" if len(seeds) == 1 else "")]
        # A mixer's runs for another task may have another vocabulary.
        for key in ("parameters", "peak_state_bytes"):
            cells.append(" / ".join(f"{n:,}" for n in sorted({result[key] for result in own})))
        cells += [spread(values, mixer, "perplexity", "perplexity", n, ".2f") for n in lengths]
        cells += [spread(values, mixer, "perplexity", "bits_per_byte", n, ".4f") for n in texts[:1]]
        rows.append(cells)
    return markdown(head, rows)


def _needles(found: Results, values: Values) -> str:
    tasks, lengths = needle_tasks(values), _places(values, "niah")
    head = ["needles found", *(f"{task} at {tokens_label(n)}" for task in tasks for n in lengths)]
    rows = [
        [f"`{m}`", *(spread(values, m, "niah", f"found/{task}", n, ".1%") for task in tasks for n in lengths)]
        for m in mixers(found)
        if any(result["mixer"] == m and result["task"] == "niah" for result in found)
    ]
    return markdown(head, rows)


def _gains(values: Values) -> str:
    rows = {m: gain(values, m, "perplexity") for m in LINEAR}
    lengths = sorted({x for by in rows.values() for x in by})
    head = ["loss, nats a token: log-linear minus linear", "seed", *(f"at {tokens_label(n)}" for n in lengths)]
    lines = []
    for mixer, by in rows.items():
        for seed in sorted({s for at in by.values() for s in at}):
            numbers = [by.get(n, {}).get(seed) for n in lengths]
            texts = ["–" if d is None else f"{d:+.4f}" if np.isfinite(d) else "not finite" for d in numbers]
            lines.append([f"`{mixer}` − `{LINEAR[mixer]}`", str(seed), *texts])
    return markdown(head, lines)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, or nothing where it has no rows."""
    lines = [" | ".join(head), " | ".join(["---"] * len(head)), *map(" | ".join, rows)]
    return "\n".join(f"| {line} |" for line in lines) if rows else ""


def common_lengths(found: Results, what: str) -> list[int]:
    """The row lengths at which every run's perplexity evaluation has that number."""
    runs = [result["lengths"] for result in found if result["task"] == "perplexity"]
    lengths = [{row["length"] for row in rows if what in row} for rows in runs]
    return sorted(set.intersection(*lengths)) if lengths else []


def spread(values: Values, mixer: str, task: str, what: str, x: float, form: str) -> str:
    """The mean, and from the smallest to the largest of several seeds."""
    numbers = list(values.get((mixer, task, what), {}).get(x, {}).values())
    if not numbers:
        return "–"
    if not np.isfinite(numbers).all():
        return "not finite"
    mean = format(float(np.mean(numbers)), form)
    return mean if len(numbers) == 1 else f"{mean} ({min(numbers):{form}}–{max(numbers):{form}})"


# ---- the figure


class Panel(NamedTuple):
    x: str
    y: str
    task: str
    what: str


def draw(found: Results) -> Figure:
    """Loss by position, what levels gain there, loss by row length and needles by length, whichever there are."""
    values, names = gather(found), mixers(found)
    panels = [
        Panel("position, tokens", "loss, nats a token", "positions", "loss"),
        Panel(f"position (from {NOISY}), tokens", "log-linear minus linear, nats a token", "positions", "gain"),
        Panel("tokens a row", "perplexity", "perplexity", "perplexity"),
        *(Panel("length, tokens", f"needles found, {t}", "niah", f"found/{t}") for t in needle_tasks(values)),
    ]
    curves = {panel: shown for panel in panels if (shown := _curves(values, names, panel))}
    others = [name for name in names if name not in COLOURS]
    colours = COLOURS | {name: OTHERS[i % len(OTHERS)] for i, name in enumerate(others)}
    rows, columns = -(-len(curves) // COLUMNS), min(COLUMNS, len(curves))
    figure = Figure(figsize=(5.2 * columns, 4 * rows), layout="constrained")
    for place, (panel, shown) in enumerate(curves.items(), 1):
        trained = {result["trained_length"] for result in found if result["task"] == panel.task}
        _panel(figure.add_subplot(rows, columns, place), panel, shown, colours, trained)
    handles = {
        label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    ncols = min(len(handles), 2 * columns)
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=ncols, frameon=False)
    legend = "thick: the mean over the seeds; thin: each seed; dashed: the trained length"
    figure.supxlabel(legend, fontsize=9)
    return figure


def _curves(values: Values, names: Sequence[str], panel: Panel) -> dict[str, Curve]:
    """The mixers that have something to show there."""
    task, what = panel.task, panel.what
    if what != "gain":
        by = {m: values.get((m, task, what), {}) for m in names}
    else:
        gains = {m: gain(values, m, task) for m in names}
        # The noise of the first ones would flatten the rest.
        first = NOISY if any(x >= NOISY for curve in gains.values() for x in curve) else 0
        by = {m: {x: at for x, at in curve.items() if x >= first} for m, curve in gains.items()}
    return {mixer: curve for mixer, curve in by.items() if curve}


def _panel(axes: Axes, panel: Panel, shown: dict[str, Curve], colours: dict[str, str], trained: set[int]) -> None:
    for mixer, curve in shown.items():
        _curve(axes, mixer, curve, colours[mixer], None if panel.task == "positions" else "o")
    for length in trained:
        axes.axvline(length, color="grey", linestyle="--", linewidth=1)
    if panel.what == "gain":
        axes.axhline(0, color="grey", linewidth=1)
    if panel.task == "niah":
        axes.set_ylim(-0.03, 1.03)
    if panel.task == "perplexity":
        _zoom(axes, shown)
    axes.ticklabel_format(useOffset=False)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: tokens_label(value))
    axes.set(xlabel=panel.x, ylabel=panel.y)
    axes.grid(alpha=0.3)


def _curve(axes: Axes, mixer: str, curve: Curve, colour: str, marker: str | None) -> None:
    places = sorted(curve)
    seeds = sorted({seed for by in curve.values() for seed in by})
    for seed in seeds if len(seeds) > 1 else ():
        own = [x for x in places if seed in curve[x]]
        axes.plot(own, [curve[x][seed] for x in own], color=colour, alpha=0.5, linewidth=0.7)
    means = [float(np.mean(list(curve[x].values()))) for x in places]
    label = mixer if len(seeds) > 1 else f"{mixer} (one seed)"
    axes.plot(places, means, label=label, color=colour, marker=marker, markersize=4)


def _zoom(axes: Axes, curves: dict[str, Curve]) -> None:
    """Show what most mixers lie in, and say of one far above them what it has."""
    ranges = {}
    for mixer, curve in curves.items():
        if values := [v for by in curve.values() for v in by.values() if np.isfinite(v)]:
            ranges[mixer] = min(values), max(values)
    if not ranges:
        return
    middle = np.median([high for _, high in ranges.values()])
    near = {mixer: ends for mixer, ends in ranges.items() if ends[0] <= 1.2 * middle}
    far = [f"{mixer}: {low:.0f} to {high:.0f}" for mixer, (low, high) in ranges.items() if mixer not in near]
    if not far:
        return
    low, high = min(low for low, _ in near.values()), max(high for _, high in near.values())
    margin = 0.15 * (high - low) or 0.05 * high
    axes.set_ylim(low - margin, high + 2 * margin)
    axes.text(0.98, 0.98, "far above: " + ", ".join(far), transform=axes.transAxes, ha="right", va="top", fontsize=8)


def needle_tasks(values: Values) -> list[str]:
    return sorted({what.partition("/")[2] for _, task, what in values if task == "niah" and what.startswith("found/")})


def mixers(found: Results) -> list[str]:
    """Those of the comparison in its order, each linear one before its log-linear variant, and then all others."""
    names = {result["mixer"] for result in found}
    return [*(name for name in ORDER if name in names), *sorted(names - set(ORDER))]


def _places(values: Values, task: str) -> list[float]:
    return sorted({x for (_, own, _), by in values.items() if own == task for x in by})


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
