"""The figure of `tools.bench`: time against length, from reports just made or read again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from src.errors import UserError
from tools.bench_files import Report, check_file
from tools.bench_measure import BOTH, FORWARD
from tools.bench_report import names_of

STYLES = {
    "loglinear": ("#c1121f", "-", "o", "log-linear (ours)"),
    "linear": ("#1d3557", "-", "s", "linear (ours)"),
    "loglinear_torch": ("#c1121f", ":", "p", "log-linear, PyTorch operators"),
    "linear_torch": ("#1d3557", ":", "h", "linear, PyTorch operators"),
    "loglinear_compiled": ("#c1121f", "--", "X", "log-linear, PyTorch compiled"),
    "flash2": ("#6a994e", "-", "^", "FlashAttention-2"),
    "cudnn": ("#8338ec", "-", "D", "cuDNN attention"),
    "softmax": ("#6a994e", "--", "v", "softmax attention"),
    "fla_linear": ("#457b9d", "-.", "<", "linear (flash-linear-attention)"),
    "fla_loglinear": ("#f4845f", "-.", ">", "log-linear (flash-linear-attention)"),
    "mamba_ssm": ("#bc6c25", "-.", "P", "Mamba-2 (mamba-ssm)"),
}
"""Colour, line, marker (colours alone are lost in greyscale) and name in figures."""
FAMILY_TITLES = {"ssd": "Mamba-2's operators (scalar decay)", "delta_rule": "Gated DeltaNet's operators"}
VERSIONS = {"torch": "torch", "triton": "Triton", "commit": "commit"}
ENDINGS = (".png", ".pdf", ".svg")


def timed(reports: list[Report]) -> list[str]:
    """What figures show, in the order of their panels, as far as it was measured."""
    return [what for what in (BOTH, FORWARD) if any(row["what"] == what for one in reports for row in one["rows"])]


def figure(reports: list[Report], file: Path) -> None:
    """Time against length, both logarithmic: a row of panels for each report, forward + backward before forward."""
    import_figure()
    from matplotlib.figure import Figure

    reports = [report for report in reports if timed([report])]
    panels = timed(reports)
    if not panels:
        raise UserError("--figure: nothing was timed")
    canvas = Figure(figsize=(3.4 + 4.4 * len(panels), 4.2 * len(reports)), layout="constrained")
    rows = canvas.subfigures(len(reports), 1, squeeze=False, hspace=0.04)[:, 0]
    for row, report in zip(rows, reports, strict=True):
        draw_row(row, report, panels)
    try:
        canvas.savefig(file, dpi=150)
    except OSError as error:
        raise UserError(f"--figure {file}: {error.strerror}") from None


def draw_row(row: Any, report: Report, panels: list[str]) -> None:
    """The panels of one report; what they have in common stands once: title, y axis and, beside the curves, legend."""
    from matplotlib.ticker import LogLocator, NullLocator

    sizes, small = title_lines(report)
    row.suptitle(f"{FAMILY_TITLES.get(report['setup']['family'], report['setup']['family'])}\n{sizes}", fontsize=11)
    row = row.subfigures(1, 1)  # its title stands under that one, in a smaller type
    row.suptitle(small, fontsize=8, color="#555555")
    axes = row.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    numbers = [one for one in report["rows"] if one["what"] in panels]
    lengths = sorted({one["T"] for one in numbers})
    lines: dict[str, tuple[float, Any]] = {}
    for panel, what in zip(axes, panels, strict=True):
        for name in names_of(report):
            points = sorted(
                (one["T"], one["value"]) for one in numbers if (one["what"], one["candidate"]) == (what, name)
            )
            if not points:
                continue
            color, line, marker, shown = STYLES.get(name, ("#777777", "-", "d", name))
            style = {"color": color, "linestyle": line, "marker": marker, "markersize": 6, "markeredgecolor": "white"}
            style |= {"markeredgewidth": 0.6, "linewidth": 2.2 if name == "loglinear" else 1.5}
            (drawn,) = panel.plot(*zip(*points, strict=True), label=shown, **style)
            lines.setdefault(shown, (points[-1][1], drawn))
        panel.set(xlabel="tokens", xscale="log", yscale="log")
        panel.set_title(what, fontsize=10)
        panel.set_xticks(lengths, [f"{T:,}" for T in lengths], **slanted(lengths))
        if len(lengths) == 1:
            panel.set_xlim(lengths[0] / 2, lengths[0] * 2)
        panel.xaxis.set_minor_locator(NullLocator())
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    values = [one["value"] for one in numbers]
    axes[0].set_ylabel("ms")
    # Over less than three decades, powers of ten alone would leave an axis with one number or none.
    axes[0].yaxis.set_major_locator(LogLocator(subs=(1,) if max(values) / min(values) > 1000 else (1, 2, 5)))
    axes[0].yaxis.set_major_formatter(lambda value, place: f"{value:,.10g}")
    axes[0].yaxis.set_minor_locator(NullLocator())
    ordered = sorted(lines.values(), key=lambda pair: -pair[0])  # as the curves lie at the longest length
    row.legend(handles=[line for _, line in ordered], loc="outside right center", frameon=False, fontsize=9)


def slanted(lengths: list[int]) -> dict[str, Any]:
    """How ticks of lengths are written: where two are near each other, at an angle."""
    wide = math.log(lengths[-1] / lengths[0]) / 8 if len(lengths) > 1 else 0
    near = any(math.log(b / a) < wide for a, b in zip(lengths, lengths[1:], strict=False))
    return {"rotation": 40, "ha": "right", "fontsize": 8} if near else {"fontsize": 8.5}


def title_lines(report: Report) -> tuple[str, str]:
    """The sizes in words; in small type, where and with what they were measured."""
    setup, where = report["setup"], report["machine"]

    def count(number: int, thing: str) -> str:
        return f"{number} {thing}{'' if number == 1 else 's'}"

    sizes = [f"batch {setup['batch']}", count(setup["heads"], "head"), count(setup["groups"], "q/k group")]
    sizes += [f"K = {setup['key_dim']}", f"V = {setup['value_dim']}", setup["dtype"]]
    if attention := setup.get("attention"):
        sizes += ["softmax: " + " heads of ".join(map(str, attention))]
    small = [where["card"], *(f"{shown} {where[key]}" for key, shown in VERSIONS.items() if key in where)]
    small += [count(where["threads"], "thread")] if "threads" in where else []
    return ", ".join(sizes), ", ".join(small)


def import_figure() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError:
        raise UserError("--figure needs matplotlib: pip install matplotlib") from None


def check_figure(file: Path) -> None:
    import_figure()
    if file.suffix.lower() not in ENDINGS:
        raise UserError(f"--figure {file}: what kind of file? (allowed endings: {', '.join(ENDINGS)})")
    check_file("--figure", file)
