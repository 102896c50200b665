"""What `tools.bench` shows: the machine, tables, a figure, and the JSON files that both can be drawn from again."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from src.errors import UserError
from tools.bench_measure import BOTH, FORWARD, MEMORY
from tools.bench_peers import Setup

Report = dict[str, Any]
AGAINST = ("linear", "cudnn")
"""Candidates that the ratio columns divide by, where they ran."""
STYLES = {
    "loglinear": ("#c1121f", "-", "log-linear (ours)"),
    "linear": ("#1d3557", "-", "linear (ours)"),
    "loglinear_torch": ("#c1121f", ":", "log-linear, PyTorch operators"),
    "linear_torch": ("#1d3557", ":", "linear, PyTorch operators"),
    "loglinear_compiled": ("#c1121f", "--", "log-linear, PyTorch compiled"),
    "flash2": ("#6a994e", "-", "FlashAttention-2"),
    "cudnn": ("#8338ec", "-", "cuDNN attention"),
    "softmax": ("#6a994e", "--", "softmax attention"),
    "fla_linear": ("#457b9d", "-.", "linear (flash-linear-attention)"),
    "fla_loglinear": ("#f4845f", "-.", "log-linear (flash-linear-attention)"),
    "mamba_ssm": ("#bc6c25", "-.", "Mamba-2 (mamba-ssm)"),
}
"""Colour, line and name in figures."""


def machine(setup: Setup) -> dict[str, Any]:
    """Hardware and versions, the assembler that Triton really uses among them."""
    found: dict[str, Any] = {"card": device_name(setup), "torch": torch.__version__}
    if setup.cuda:
        found |= {"triton": package_version("triton"), "CUDA": torch.version.cuda, "ptxas": ptxas()}
    else:
        found["threads"] = torch.get_num_threads()
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
        seconds = row.get("failed") or f"{three(row['seconds'])} s from the start of the process to {end}"
        parts.append(f"first step of {row['what']}{at}: {seconds}\n    {row['command']}")
    reasons: dict[str, list[str]] = {}
    for name, reason in report["left_out"].items():
        reasons.setdefault(reason.replace(f"--only {name} ", "--only "), []).append(name)
    parts += [f"left out: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    facts = [name if key == "card" else f"{key} {name}" for key, name in report["machine"].items()]
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
        base = times_at[row["candidate"], positions[positions.index(position) % half]]
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


def figure(reports: list[Report], file: Path) -> None:
    """Time against length, both logarithmic: one panel for forward + backward, one for forward."""
    import_figure()
    from matplotlib.figure import Figure

    panels = [what for what in (BOTH, FORWARD) if any(row["what"] == what for one in reports for row in one["rows"])]
    if not panels:
        raise UserError("--figure: nothing was timed")
    canvas = Figure(figsize=(1 + 5.2 * len(panels), 4.6), layout="constrained")
    axes = canvas.subplots(1, len(panels), squeeze=False)[0]
    lengths = sorted({row["T"] for one in reports for row in one["rows"] if row["what"] in panels})
    for panel, what in zip(axes, panels, strict=True):
        for number, report in enumerate(reports):
            for name in names_of(report):
                points = sorted(
                    (row["T"], row["value"])
                    for row in report["rows"]
                    if row["what"] == what and row["candidate"] == name
                )
                color, line, shown = STYLES.get(name, ("#777777", "-", name))
                style = {"marker": "osD^v"[number % 5], "color": color, "linestyle": line, "markersize": 4}
                label = shown if len(reports) == 1 else f"{shown}, {report['title']}"
                if points:
                    panel.plot(
                        *zip(*points, strict=True), **style, linewidth=2 if name == "loglinear" else 1.3, label=label
                    )
        panel.set(title=what, xlabel="tokens", ylabel="ms", xscale="log", yscale="log")
        panel.set_xticks(lengths, [f"{T:,}" for T in lengths])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    titles = dict.fromkeys(f"{report['title']}\n{report['machine']['card']}" for report in reports)
    if len(titles) == 1:
        canvas.suptitle(next(iter(titles)), fontsize="medium")
    try:
        canvas.savefig(file, dpi=150)
    except (OSError, ValueError) as error:  # no such folder; an unknown ending
        raise UserError(f"--figure {file}: {str(error).splitlines()[0]}") from None


def import_figure() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError:
        raise UserError("--figure needs matplotlib: pip install matplotlib") from None


def check_file(option: str, file: Path | None) -> None:
    """A place where nothing can be written is said before minutes of measuring."""
    if file is not None and not file.absolute().parent.is_dir():
        raise UserError(f"{option} {file}: there is no folder {file.absolute().parent}")


def write(report: Report, file: Path | None) -> None:
    if file is None:
        return
    try:
        file.write_text(json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"--json {file}: {error.strerror}") from None


def read(files: list[Path]) -> list[Report]:
    """Saved reports; those of one setup and card become one, a later file's number in place of an earlier one's."""
    merged: dict[tuple[str, str], Report] = {}
    for file in files:
        try:
            report = json.loads(file.read_text())
            key = report["title"], report["machine"]["card"]
            lists = [report["rows"], report["decode"], report["first_step"]]
        except OSError as error:
            raise UserError(f"--from-json {file}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise UserError(f"--from-json {file}: is not what --json of this command writes") from None
        if key not in merged:
            merged[key] = report
            continue
        one = merged[key]
        for part, names, new in zip(("rows", "decode", "first_step"), KEYS, lists, strict=True):
            rows = {tuple(row.get(name) for name in names): row for row in [*one[part], *new]}
            one[part] = list(rows.values())
        ran = set(names_of(one))
        one["left_out"] = {k: v for k, v in {**one["left_out"], **report["left_out"]}.items() if k not in ran}
    return list(merged.values())


KEYS = ("what", "T", "candidate"), ("candidate", "position"), ("what", "T")
"""What tells rows of times, of decoding and of first steps apart."""
