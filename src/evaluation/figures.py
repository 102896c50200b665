"""Plain figures without a display: `Figure` of Matplotlib itself, none of pyplot's global state."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import PercentFormatter

RANGE = 0.02  # least height of an axis of losses, in nats
PAGE = 13  # inches: maps side by side
LEAST = 3.6  # inches: of the narrowest figure


def curves(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    x: str,
    y: str,
    title: str,
    trained_length: int | None = None,
    errors: Mapping[str, Sequence[float]] | None = None,
) -> Figure:
    """Lines over a logarithmic axis of tokens, with bands of ± `errors`, standard ones; dashed where training ended."""
    figure = Figure(figsize=(6.4, 4))
    axes = figure.subplots()
    for name, (places, values) in series.items():
        axes.plot(places, values, label=name, marker="o", markersize=4)
        if errors is not None:
            low, high = np.subtract(values, errors[name]), np.add(values, errors[name])
            seen = not np.isnan(errors[name]).all()  # of a single window there is none
            axes.fill_between(places, low, high, alpha=0.2, linewidth=0, label="± 1 standard error" if seen else None)
    axes.set_xscale("log", base=2)
    axes.ticklabel_format(axis="y", useOffset=False)
    low, high = axes.get_ylim()
    if high - low < RANGE:  # noise is not to look like a trend
        axes.set_ylim((low + high - RANGE) / 2, (low + high + RANGE) / 2)
    axes.xaxis.set_major_formatter(lambda value, _: tokens_label(value))
    if trained_length is not None:
        axes.axvline(trained_length, color="grey", linestyle="--", linewidth=1)
        ends = axes.get_xlim()
        if ends[0] < trained_length < ends[1]:
            place = {"xycoords": ("data", "axes fraction"), "xytext": (3, -4), "textcoords": "offset points"}
            axes.annotate("trained", (trained_length, 1), va="top", color="grey", fontsize=8, **place)
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.grid(alpha=0.3)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(fontsize=8)
    return figure


def heat_map(cells: np.ndarray, **options: Any) -> Figure:
    """One map of `heat_maps`, whose options it takes."""
    return heat_maps({"": cells}, **options)


def heat_maps(
    maps: Mapping[str, np.ndarray],
    *,
    columns: Sequence[object],
    rows: Sequence[object],
    x: str,
    y: str,
    title: str,
    share: str,
    trained_columns: int | None = None,
    trained_rows: int | None = None,
) -> Figure:
    """Maps side by side, each under its name, of the same rows and columns: `[rows, columns]` shares from 0 to 1.

    Cells are coloured, with their number; the colour bar says what they are a `share` of. NaN stays empty. A line
    behind the trained columns or rows, unless these are all or none; a note below says what is drawn of the two.
    """
    width, height = 0.6 + 0.75 * len(columns), 0.6 + 0.36 * len(rows)
    across = min(len(maps), max(1, int(PAGE / width)))
    down = -(-len(maps) // across)
    size = (max(LEAST, 1.2 + width * across), 1.2 + height * down)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    for axes, (name, cells) in zip(grid.flat, maps.items(), strict=False):
        image = axes.imshow(cells, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axes.set_xticks(range(len(columns)), [_label(c) for c in columns])
        axes.set_yticks(range(len(rows)), [_label(r) for r in rows])
        for (i, j), value in np.ndenumerate(cells):
            if not np.isnan(value):
                colour = "white" if value < 0.15 or value > 0.85 else "black"  # the ends of the scale are dark
                axes.text(j, i, f"{value:.0%}", ha="center", va="center", fontsize=8, color=colour)
        for draw_line, trained, of in ((axes.axvline, trained_columns, columns), (axes.axhline, trained_rows, rows)):
            if trained is not None and 0 < trained < len(of):
                draw_line(trained - 0.5, color="black", linestyle="--", linewidth=1.5)
        axes.set_title(name, fontsize=9)
    for axes in grid.flat[len(maps) :]:
        axes.remove()
    for axes in grid.flat[max(0, len(maps) - across) : len(maps)]:
        axes.tick_params(labelbottom=True)  # also above a place that has no map
    notes = ["(dashed: the trained length)"] if grid[0, 0].lines else []
    if any(np.isnan(cells).any() for cells in maps.values()):
        notes.append("(empty: not measured)")
    figure.supxlabel(_wrapped("\n".join([x, *notes]), size[0], 10), fontsize=10)
    figure.supylabel(y, fontsize=10)
    figure.suptitle(_wrapped(title, size[0], 11), fontsize=11)
    figure.colorbar(image, ax=grid.ravel().tolist()[: len(maps)], label=share, format=PercentFormatter(1))
    return figure


def sample(split: str, examples: Iterable[int]) -> str:
    """What the cells of a map were measured on: the split, and how many examples each has."""
    least, most = min(examples), max(examples)
    count = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    return f"{split}, {count} {'example' if most == 1 else 'examples'} a cell"


def _wrapped(text: str, inches: float, points: float) -> str:
    """The text in lines that are no wider than a figure of so many inches, by the font's own widths."""
    font, most = FontProperties(size=points), 0.97 * inches * 72  # what is drawn is rounded to pixels

    def fits(line: str) -> bool:
        return text_to_path.get_text_width_height_descent(line, font, ismath=False)[0] <= most

    wrapped = []
    for line in text.splitlines():
        width = max(1, min(len(line), int(most / (0.3 * points))))  # a narrow character on average
        while width > 1 and not all(map(fits, textwrap.wrap(line, width))):
            width -= 1
        wrapped.append(textwrap.fill(line, width))
    return "\n".join(wrapped)


def _label(value: object) -> str:
    return tokens_label(value) if isinstance(value, int) else str(value)


def tokens_label(value: float) -> str:
    """4096 as 4K, 1536 as 1536."""
    number = int(value)
    return f"{number // 1024}K" if number >= 1024 and number % 1024 == 0 else str(number)
