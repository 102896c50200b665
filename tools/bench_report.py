"""What `tools.bench` shows: the machine, tables, a figure, and the JSON files that both can be drawn from again."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from src.errors import UserError
from src.files import write_text
from tools.bench_measure import BOTH, FORWARD, MEMORY
from tools.bench_peers import Setup, auto_takes

Report = dict[str, Any]
AGAINST = ("linear", "cudnn")
"""Candidates that the ratio columns divide by, where they ran."""
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
ENDINGS = (".png", ".pdf", ".svg")
DECODE, FIRST_STEP = "one token", "first step"
"""What a report may have been asked for beside the measures of its rows."""


def machine(setup: Setup) -> dict[str, Any]:
    """Hardware and versions, the assembler that Triton really uses among them."""
    found: dict[str, Any] = {"card": device_name(setup), "torch": torch.__version__}
    if setup.cuda:
        found |= {"triton": package_version("triton"), "CUDA": torch.version.cuda, "ptxas": ptxas()}
    else:
        found["threads"] = torch.get_num_threads()
    found["auto"] = auto_takes(setup)
    if commit := git_commit():
        found["commit"] = commit
    return found


def device_name(setup: Setup) -> str:
    if setup.cuda:
        return torch.cuda.get_device_name()
    cpu = Path("/proc/cpuinfo")
    for line in cpu.read_text().splitlines() if cpu.exists() else []:
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor() or setup.device


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def ptxas() -> str:
    """Version and, where TRITON_PTXAS_PATH chose it, place of the assembler. Torch may set that variable itself."""
    blackwell = torch.cuda.get_device_capability()[0] >= 10
    try:
        from triton import knobs

        tool = knobs.nvidia.ptxas_blackwell if blackwell else knobs.nvidia.ptxas
        chosen = os.environ.get("TRITON_PTXAS_BLACKWELL_PATH" if blackwell else "TRITON_PTXAS_PATH")
        return f"{tool.version} ({tool.path})" if chosen == tool.path else str(tool.version)
    except Exception:  # another version of Triton keeps it elsewhere; a benchmark does not fail for that
        return "unknown"


def git_commit() -> str | None:
    def git(*arguments: str) -> str:
        folder = str(Path(__file__).parents[1])
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=10", "HEAD") + (" (modified)" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def three(x: float) -> str:
    """Three significant digits, without an exponent at the sizes that occur."""
    x = float(f"{x:.3g}")
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:#.3g}"


def grid(head: list[str], body: list[list[str]]) -> str:
    """Aligned columns, the first one to the left."""
    widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
    lines = [
        f"{row[0]:<{widths[0]}}" + "".join(f"  {x:>{w}}" for x, w in zip(row[1:], widths[1:], strict=True))
        for row in [head, *body]
    ]
    return "\n".join(line.rstrip() for line in lines)


def names_of(report: Report) -> list[str]:
    """Candidates that have a number, in the order of :data:`STYLES`."""
    found = {row["candidate"] for row in report["rows"]}
    return [name for name in STYLES if name in found] + sorted(found - set(STYLES))


def table(report: Report) -> str:
    """One report: times and memory, then decoding, first steps and who was left out."""
    title = report["title"] + (f": ms, {report['statistic']}" if report["rows"] else "")
    parts = [title, *(part + "\n" for part in (times(report), decoding(report)) if part)]
    for row in report["first_step"]:
        at = f" at T={row['T']:,}" if "T" in row else ""
        end = "its end" if "T" not in row else "the end of forward + backward"
        known = f"{three(row['seconds'])} s from the start of the process to {end}" if "seconds" in row else "unknown"
        seconds = row.get("failed") or known
        parts.append(f"first step of {row['what']}{at}: {seconds}\n    {row['command']}")
    reasons: dict[str, list[str]] = {}
    for name, reason in report["left_out"].items():
        reasons.setdefault(reason.replace(f"--only {name} ", "--only "), []).append(name)
    parts += [f"left out: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    if missing := incomplete(report):
        parts.append(f"incomplete: {missing}")
    shown = {"card": "", "auto": "backend='auto' took "}
    facts = [f"{shown.get(key, f'{key} ')}{name}" for key, name in report["machine"].items()]
    return "\n".join([*parts, ", ".join(facts)])


def times(report: Report) -> str:
    rows = report["rows"]
    if not rows:
        return ""
    names = names_of(report)
    ours = next((name for name in names if name.startswith("loglinear")), None)
    against = [name for name in AGAINST if name in names and ours]
    cells = {(row["what"], row["T"], row["candidate"]): row for row in rows}
    head = ["", "T", *names, *(f"{ours}/{name}" for name in against), *(["growth"] if ours else []), "spread"]
    body = []
    for what in (FORWARD, BOTH, MEMORY):
        before = None
        for T in sorted({row["T"] for row in rows if row["what"] == what}):
            here = {name: cells[what, T, name] for name in names if (what, T, name) in cells}
            line = [what, f"{T:,}", *(three(here[name]["value"]) if name in here else "-" for name in names)]
            value = here[ours]["value"] if ours in here else None
            line += [f"{value / here[name]['value']:.2f}" if value and name in here else "-" for name in against]
            if ours:
                line.append(f"{value / before:.2f}" if value and before else "")
            spreads = [(row["max"] - row["min"]) / row["value"] for row in here.values() if "max" in row]
            body.append([*line, f"{100 * max(spreads):.0f} %" if spreads else ""])
            before = value
    legend = "spread: largest minus smallest, the widest of the row"
    if ours:
        legend = f"growth: {ours} over the same at the length above; {legend}"
    return f"{grid(head, body)}\n{legend}"


def decoding(report: Report) -> str:
    rows = report["decode"]
    if not rows:
        return ""
    positions = list(dict.fromkeys(row["position"] for row in rows))
    half = len(positions) // 2 if len(positions) % 2 == 0 else 1
    times_at = {(row["candidate"], row["position"]): row for row in rows}
    body = []
    for row in rows:
        position = row["position"]
        base = times_at.get((row["candidate"], positions[positions.index(position) % half]), row)
        graph = f"{three(row['graph_ms'])}" if row["graph_ms"] else "-"
        pair = row["ms"] / base["ms"], (row["graph_ms"] or 0) / (base["graph_ms"] or 1)
        ratio = "" if base is row else f"{pair[0]:.2f}" + (f", graph {pair[1]:.2f}" if row["graph_ms"] else "")
        against = "" if base is row else f"{base['position']:,}"
        body.append(
            [row["candidate"], f"{position:,}", three(row["ms"]), graph, f"{row['state_bytes']:,}", ratio, against]
        )
    head = ["one token", "behind", "ms", "CUDA graph, ms", "state, bytes", "ratio", "to behind"]
    failed = dict.fromkeys(row["graph_failed"] for row in rows if row.get("graph_failed"))
    return "\n".join([grid(head, body), *(f"no CUDA graph: {reason}" for reason in failed)])


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
    small = [where["card"], *(f"{shown} {where[key]}" for key, shown in VERSIONS.items() if key in where)]
    small += [count(where["threads"], "thread")] if "threads" in where else []
    return ", ".join(sizes), ", ".join(small)


VERSIONS = {"torch": "torch", "triton": "Triton", "commit": "commit"}


def import_figure() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError:
        raise UserError("--figure needs matplotlib: pip install matplotlib") from None


def check_file(option: str, file: Path | None) -> None:
    """A place where nothing can be written is said before minutes of measuring."""
    if file is None:
        return
    folder = file.resolve().parent
    if not folder.is_dir():
        raise UserError(f"{option} {file}: there is no folder {folder}")
    if file.is_dir():
        raise UserError(f"{option} {file}: is a folder, not a file")
    if file.exists() and not file.is_file():  # a device, which a file put in its place would destroy
        raise UserError(f"{option} {file}: is not a regular file")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"{option} {file}: cannot write in {folder}: {error.strerror}") from None


def check_figure(file: Path) -> None:
    import_figure()
    if file.suffix.lower() not in ENDINGS:
        raise UserError(f"--figure {file}: what kind of file? (allowed endings: {', '.join(ENDINGS)})")
    check_file("--figure", file)


def write(report: Report, file: Path | None) -> None:
    if file is None:
        return
    try:
        write_text(file.resolve(), json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"--json {file}: {error.strerror}") from None


def read(files: list[Path]) -> list[Report]:
    """Saved reports; those of one setup and card become one, a later file's number in place of an earlier one's."""
    merged: dict[tuple[str, str], Report] = {}
    for file in files:
        try:
            report = json.loads(file.read_text())
        except OSError as error:
            raise UserError(f"--from-json {file}: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise UserError(f"--from-json {file}: is not what --json of this command writes: no JSON") from None
        if problem := mismatch(report, REPORT):
            raise UserError(f"--from-json {file}: is not what --json of this command writes: {problem}")
        report["asked"] = asked(report)
        one = merged.setdefault((report["title"], report["machine"]["card"]), report)
        if one is report:
            continue
        for part, names in zip(("rows", "decode", "first_step"), KEYS, strict=True):
            rows = {tuple(row.get(name) for name in names): row for row in [*one[part], *report[part]]}
            one[part] = list(rows.values())
        one["asked"] += report["asked"]
        ran = set(names_of(one))
        one["left_out"] = {k: v for k, v in {**one["left_out"], **report["left_out"]}.items() if k not in ran}
    return list(merged.values())


def asked(report: Report) -> list[tuple[str, int | None]]:
    """What was to be measured, and at which length. Old files do not say; merged ones have it as `asked`."""
    if "asked" in report:
        return report["asked"]
    measures = report.get("measures", [])
    pairs: list[tuple[str, int | None]] = [(what, None) for what in measures if what in (DECODE, FIRST_STEP)]
    return pairs + [(w, T) for w in measures if w not in (DECODE, FIRST_STEP) for T in report.get("lengths", [])]


def incomplete(report: Report) -> str:
    """What was asked for and has no number, as of a run that was cut short."""
    there = {(row["what"], row["T"]) for row in report["rows"]}
    there |= {(DECODE, None)} if report["decode"] else set()
    there |= {(FIRST_STEP, None)} if report["first_step"] else set()
    missing: dict[str, list[str]] = {}
    for what, T in sorted(set(asked(report)) - there, key=lambda pair: (pair[0], pair[1] or 0)):
        missing.setdefault(what, []).extend([] if T is None else [f"{T:,}"])
    return "; ".join(f"{what} at {', '.join(at)}" if at else what for what, at in missing.items())


@dataclass(frozen=True)
class May:
    """A key that may be missing."""

    kind: Any


POSITIVE = "a number above 0"
ROW = {"what": str, "T": int, "candidate": str, "value": POSITIVE, "min": May(POSITIVE), "max": May(POSITIVE)}
DECODE_ROW = {"candidate": str, "position": int, "ms": POSITIVE, "state_bytes": int}
DECODE_ROW |= {"graph_ms": (POSITIVE, None), "graph_failed": May(str)}
REPORT = {
    "title": str,
    "statistic": str,
    "setup": {"family": str, "dtype": str, **dict.fromkeys(("batch", "heads", "groups", "key_dim", "value_dim"), int)},
    "machine": {"card": str},
    "left_out": {str: str},
    "rows": [ROW],
    "decode": [DECODE_ROW],
    "first_step": [{"what": str, "command": str, "T": May(int), "seconds": May(POSITIVE), "failed": May(str)}],
    "lengths": May([int]),
    "measures": May([str]),
}
"""What a file must hold for what reads it here; what else it holds does no harm."""
WORDS = {str: "a text", int: "a whole number", dict: "named values", list: "a list", None: "nothing"}


def mismatch(value: Any, kind: Any, at: str = "") -> str | None:
    """The first place at which a value out of a file is not of this kind, in words; None if there is none."""
    if isinstance(kind, May):
        kind = kind.kind
    if isinstance(kind, tuple):
        return mismatch(value, kind[0], at) if value is not None else None
    if isinstance(kind, dict | list):
        if not isinstance(value, type(kind)):
            return f"{at or 'the file'} must be {WORDS[type(kind)]}"
        pairs: list[tuple[str, Any, Any]] = []
        if isinstance(kind, list):
            pairs = [(f"{at}[{i}]", x, kind[0]) for i, x in enumerate(value)]
        elif str in kind:
            pairs = [(f"{at}.{key}", x, kind[str]) for key, x in value.items()]
        else:
            for key, inner in kind.items():
                if key in value:
                    pairs.append((f"{at}.{key}".lstrip("."), value[key], inner))
                elif not isinstance(inner, May):
                    return f"{at or 'it'} has no {key!r}"
        return next((found for place, x, inner in pairs if (found := mismatch(x, inner, place))), None)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = number and 0 < value < math.inf if kind == POSITIVE else isinstance(value, kind) and (number or kind is str)
    return None if fits else f"{at} must be {WORDS.get(kind, kind)}"


KEYS = ("what", "T", "candidate"), ("candidate", "position"), ("what", "T")
"""What tells rows of times, of decoding and of first steps apart."""
