"""Check every kernel configuration against fp64 on GPUs: ``python -m tools.errors``.

A configuration is what kernels are compiled for: operator, dtype, block sizes (head dims padded to powers of two),
rows or packed documents. Each is run on fresh random inputs, output and all gradients are compared with the T x T
form in fp64, and the table says the relative error ``||x - ref|| / ||ref||`` of each, over four draws together. Some
sizes are also run in two calls, the second from the first one's state, and on inputs that break careless arithmetic
(tools/errors_cases.py says which, and the one place where an error counts against something else than the reference's
norm). The exit status is 1 if any is above the bound: 1e-2 in bf16, 1e-5 in fp32. Processes compile side by side, and
share out all visible GPUs. `--operator`, `--dtype`, `--kind`: a part of them.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import multiprocessing
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from src.errors import UserError
from src.files import write_text
from tools.bench import Parser, positive
from tools.bench_files import check_file
from tools.bench_report import grid
from tools.errors_cases import BOUNDS, COLUMNS, DRAWS, KINDS, OPERATORS, Case, cases, errors

PARTS = ("operator", "dtype", "kind")
"""By what a part of the cases can be chosen, and the table is summed."""


def attempt(work: tuple[Case, int]) -> tuple[Case, dict[str, float] | str]:
    number = multiprocessing.current_process().name.rpartition("-")[2]  # among the processes of the pool
    if number.isdigit() and torch.cuda.is_available():
        torch.cuda.set_device(int(number) % torch.cuda.device_count())
    try:
        return work[0], errors(*work, draws=DRAWS)
    except Exception as error:  # one configuration that fails must not hide the others
        return work[0], f"{type(error).__name__}: {error}".splitlines()[0]


def place(row: dict) -> tuple:
    """Where it stands in the file."""
    return row["operator"], row["dtype"], KINDS.index(row["kind"]), row["K"], row["V"]


def save(rows: list[dict], path: Path) -> None:
    """All rows so far, in order: what a long run has found is never lost."""
    text = io.StringIO()
    writer = csv.DictWriter(text, ["operator", "dtype", "K", "V", "kind", "T", *COLUMNS], lineterminator="\n")
    writer.writeheader()
    writer.writerows(sorted(rows, key=place))
    try:
        write_text(path.resolve(), text.getvalue())
    except OSError as error:
        raise UserError(f"--csv {path}: {error.strerror}") from None


def table(rows: list[dict]) -> str:
    """The largest error of each tensor, by operator, dtype and kind; columns that nobody here has are left out."""
    columns = [name for name in COLUMNS if any(name in row for row in rows)]
    body = []
    for part in itertools.product(OPERATORS, BOUNDS, KINDS):
        mine = [row for row in rows if tuple(row[name] for name in PARTS) == part]
        largest = [max((float(row[n]) for row in mine if n in row), default=None) for n in columns]
        if mine:
            body.append([*part, str(len(mine)), *("" if x is None else f"{x:.1e}" for x in largest)])
    return grid([*PARTS, "cases", *columns], body)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m tools.errors", description=__doc__, allow_abbrev=False)
    parser.add_argument("--operator", choices=OPERATORS, help="this one; default: all four")
    parser.add_argument("--dtype", choices=BOUNDS, help="this one; default: both")
    parser.add_argument("--kind", choices=KINDS, help="this one; default: all")
    parser.add_argument("--csv", type=Path, default=None, metavar="FILE", help="write the table here")
    parser.add_argument(
        "--processes",
        type=positive,
        default=max(1, (os.cpu_count() or 2) - 2),
        metavar="N",
        help="that compile side by side; default: %(default)s",
    )
    parser.add_argument("--seed", type=int, default=None, help="of the inputs; default: a fresh one")
    try:
        options = parser.parse_args(argv)
        check_file("--csv", options.csv)
        if not torch.cuda.is_available():
            raise UserError("needs a CUDA device (pytest tests/ops interprets the kernels on a CPU)")
        return check(options)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def check(options: argparse.Namespace) -> int:
    seed = int.from_bytes(os.urandom(3), "little") if options.seed is None else options.seed
    todo = [one for one in cases() if all(getattr(options, x) in (None, getattr(one, x)) for x in PARTS)]
    if not todo:
        raise UserError(f"--kind {options.kind}: is no case of --operator {options.operator}")
    rows, wrong = [], []
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=8) as pool:
        for case, result in pool.imap_unordered(attempt, [(case, seed) for case in todo]):
            found = result if isinstance(result, dict) else {}
            row = {**asdict(case), **{name: f"{found[name]:.1e}" for name in found}}
            if not found or not all(x <= BOUNDS[case.dtype] for x in found.values()):
                wrong.append(f"{case}: {result}")
            rows.append(row)
            if options.csv:
                save(rows, options.csv)
            print(f"\r{len(rows)} of {len(todo)} configurations", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(table(rows))
    print(f"largest error of each; seed {seed}, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
