"""What `tools.bench` says: the machine, and tables of what was measured on it."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tools.bench_files import Report, incomplete
from tools.bench_measure import BOTH, FORWARD, MEMORY
from tools.bench_peers import candidates
from tools.bench_shapes import Setup, auto_takes

AGAINST = ("linear", "cudnn")
"""Candidates that the ratio columns divide by, where they ran."""


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
    """Candidates that have a number, in the order of the tables."""
    found, known = {row["candidate"] for row in report["rows"]}, candidates("ssd")
    return [name for name in known if name in found] + sorted(found - set(known))


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
