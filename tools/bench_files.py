"""The files of `tools.bench`: reports as JSON, written whole or not at all, checked and merged when read again."""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.errors import UserError
from src.files import write_text
from tools.bench_measure import BOTH

Report = dict[str, Any]
DECODE, FIRST_STEP = "one token", "first step"
"""What a report may have been asked for beside the measures of its rows."""


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
        ran = {row["candidate"] for row in one["rows"]}
        ran |= {f"{row['candidate']} backward" for row in one["rows"] if row["what"] == BOTH}
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
SETUP = {"family": str, "dtype": str, **dict.fromkeys(("batch", "heads", "groups", "key_dim", "value_dim"), int)}
SETUP |= {"attention": May(([int], None))}
REPORT = {
    "title": str,
    "statistic": str,
    "setup": SETUP,
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
