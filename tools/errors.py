"""Check every kernel configuration against fp64 on this GPU: ``python -m tools.errors``.

A configuration is what kernels are compiled for: operator, dtype, block sizes (head dims padded to powers of two),
rows or packed documents. Each is run on fresh random inputs, output and all gradients are compared with the T x T
form in fp64, and the table says the relative error ``||x - ref|| / ||ref||`` of each. The exit status is 1 if any is
above the bound: 1e-2 in bf16, 1e-5 in fp32. Processes compile side by side. `--operator`, `--dtype`: a part of them.
"""

from __future__ import annotations

import argparse
import csv
import io
import multiprocessing
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from src.errors import UserError
from src.files import write_text
from tools.bench import Parser, positive
from tools.bench_files import check_file

OPERATORS = ("ssd", "loglinear_ssd")
BOUNDS = {"bfloat16": 1e-2, "float32": 1e-5}
COLUMNS = ("output", "q", "k", "v", "g", "level_scales")
KEY_DIMS = (16, 32, 64, 128, 256)
VALUE_DIMS = (16, 32, 64)
"""Blocks have 32 or 64 values, filled or not; what is larger takes several."""
SEVERAL = ((64, 128), (128, 128), (256, 128))
OTHERS = ((48, 80), (80, 48), (112, 208), (192, 384), (256, 512))
"""Head dims between the powers of two, and the largest."""


@dataclass(frozen=True)
class Case:
    operator: str
    dtype: str
    K: int
    V: int
    packed: bool
    T: int = 1400
    """More than ten tiles of 128: trees of several levels, with a tile and a part of one left over."""


def cases() -> list[Case]:
    dims = [*OTHERS, *SEVERAL, *[(K, V) for K in KEY_DIMS for V in VALUE_DIMS]]
    return [
        Case(operator, dtype, K, V, packed)
        for operator in reversed(OPERATORS)
        for dtype in BOUNDS
        for K, V in sorted(dims, reverse=True)  # what takes longest to compile first
        for packed in (False, True)
        if not packed or (K, V) not in OTHERS
    ]


def errors(case: Case, seed: int, device: str = "cuda") -> dict[str, float]:
    """Relative errors of output and gradients; documents of 0, 1 and 15 tokens among the packed ones.

    Head h decays by up to `0.2 * 10**-h` a token. In the fastest head nothing reaches the next tile but one; in the
    slowest the first token still reaches the last, through every level of the tree, and so does the gradient. The last
    of the packed documents is long enough (more than nine tiles of 128) for a tree of its own.
    """
    from src import ops
    from src.ops.reference import parallel

    torch.manual_seed(seed)
    H, G, T, dtype = 4, 2, case.T, getattr(torch, case.dtype)
    given = {
        "q": torch.randn(1, T, G, case.K).to(dtype),
        "k": torch.nn.functional.normalize(torch.randn(1, T, G, case.K), dim=-1).to(dtype),
        "v": torch.randn(1, T, H, case.V).to(dtype),
        "g": -0.2 * 10.0 ** -torch.arange(H) * torch.rand(1, T, H),
    }
    if case.operator == "loglinear_ssd":
        given["level_scales"] = torch.rand(1, T, H, ops.num_levels(T))
    given = {name: x.to(device).requires_grad_() for name, x in given.items()}
    exact = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    cu_seqlens = torch.tensor([0, 0, 1, 16, 16, 150, T], device=device) if case.packed else None
    o, _ = getattr(ops, case.operator)(**given, cu_seqlens=cu_seqlens, backend="triton")
    reference = parallel(**exact, cu_seqlens=cu_seqlens)
    weight = torch.randn_like(o)
    got = torch.autograd.grad(o, list(given.values()), weight)
    expected = torch.autograd.grad(reference, list(exact.values()), weight.double())
    pairs = {"output": (o, reference), **{n: (a, b) for n, a, b in zip(given, got, expected, strict=True)}}
    return {
        name: float((a.detach().double() - b.detach()).norm() / b.detach().norm()) for name, (a, b) in pairs.items()
    }


def attempt(work: tuple[Case, int]) -> tuple[Case, dict[str, float] | str]:
    try:
        return work[0], errors(*work)
    except Exception as error:  # one configuration that fails must not hide the others
        return work[0], f"{type(error).__name__}: {error}".splitlines()[0]


def save(rows: list[dict], path: Path) -> None:
    """All rows so far, in order: what a long run has found is never lost."""
    table = io.StringIO()
    writer = csv.DictWriter(table, ["operator", "dtype", "K", "V", "packed", "T", *COLUMNS], lineterminator="\n")
    writer.writeheader()
    writer.writerows(sorted(rows, key=lambda row: tuple(row[n] for n in ("operator", "dtype", "packed", "K", "V"))))
    try:
        write_text(path.resolve(), table.getvalue())
    except OSError as error:
        raise UserError(f"--csv {path}: {error.strerror}") from None


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m tools.errors", description=__doc__, allow_abbrev=False)
    parser.add_argument("--operator", choices=OPERATORS, help="this one; default: both")
    parser.add_argument("--dtype", choices=BOUNDS, help="this one; default: both")
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
    todo = [one for one in cases() if options.operator in (None, one.operator) and options.dtype in (None, one.dtype)]
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
    print(f"{'operator':<15}{'dtype':<10}{'configurations':>15}" + "".join(f"{name:>14}" for name in COLUMNS))
    for operator in OPERATORS:
        for dtype in BOUNDS:
            mine = [row for row in rows if row["operator"] == operator and row["dtype"] == dtype]
            if not mine:
                continue
            largest = [max((float(row[n]) for row in mine if n in row), default=None) for n in COLUMNS]
            shown = "".join(f"{'' if x is None else f'{x:.1e}':>14}" for x in largest)
            print(f"{operator:<15}{dtype:<10}{len(mine):>15}{shown}")
    print(f"largest error of each; seed {seed}, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
