"""Time the operators against each other and against what else there is: `python -m tools.bench ssd` or `delta_rule`.

Results come before times: whoever is timed has just equalled the T x T form in fp64, with all gradients, at a random
short length, and at every length that is timed the log-linear form of ours with all scales 1 equals the linear one.
The PyTorch form of ours, which "auto" takes in fp64, also equals it to 1e-10 there; the kernels, in fp32 and bf16, are
held to the first comparison. Candidates take turns in one process, so a busy machine disturbs all of them alike.
On a CUDA device the median of about 0.3 s of calls counts, on a CPU the best of the rounds.

The exit status is 0; 1 if something was wrong, or if a candidate that --only names or a length did not run; 2 if the
command was wrong; 130 if it was interrupted. What --json was given is written after each length.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from src.errors import UserError
from src.ops.checks import check_recurrent
from tools import bench_figure, bench_files, bench_latency, bench_report
from tools.bench_files import DECODE, FIRST_STEP
from tools.bench_measure import BOTH, FORWARD, MEMORY, Measurement, Wrong, check_all, note, out_of_memory
from tools.bench_peers import ALIASES, Candidate, Ours, candidates, choose, one_line
from tools.bench_shapes import FAMILIES, SHAPES, Setup, draw

EPILOG = """shapes (batch, heads, groups, K, V, softmax peers' heads x dim; lengths on a CUDA device):
{shapes}

{candidates}

examples:
  python -m tools.bench ssd                                        on a CPU: about a minute
  python -m tools.bench ssd --shape paper --memory --json ssd.json --figure ssd.png
  python -m tools.bench ssd --shape small --only loglinear loglinear_torch loglinear_compiled
  python -m tools.bench ssd --decode --no-time                     one token at a time, behind short and long texts
  python -m tools.bench delta_rule --shape paper_delta --lengths 4096 16384 --only loglinear linear cudnn
  python -m tools.bench ssd --from-json a.json b.json --figure both.png
"""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def build_parser() -> Parser:
    shapes = [
        f"  {name:<12}{s.batch:>3}{s.heads:>4}{s.groups:>4}{s.key_dim:>5}{s.value_dim:>5}"
        + f"{'{}x{}'.format(*s.attention or (s.heads, s.value_dim)):>8}   {' '.join(map(str, s.lengths))}"
        for name, s in SHAPES.items()
    ]
    names = []
    for family in FAMILIES:
        names += [f"candidates of {family}:", *(f"  {x.name:<20}{x.about}" for x in candidates(family).values()), ""]
    parser = Parser(
        prog="python -m tools.bench",
        description=__doc__,
        epilog=EPILOG.format(shapes="\n".join(shapes), candidates="\n".join(names).rstrip()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("family", choices=FAMILIES, nargs="?", help="the linear operator and its log-linear variant")
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--shape", choices=SHAPES, help="default: cpu on a CPU; on CUDA paper (ssd), delta (delta_rule)")
    sizes.add_argument("--lengths", type=positive, nargs="+", metavar="T", help="tokens; default: the shape's")
    for name, text in (("batch", "B"), ("heads", "H"), ("groups", "G, query/key groups; divides the heads")):
        sizes.add_argument(f"--{name}", type=positive, metavar="N", help=text + " (instead of the shape's)")
    sizes.add_argument("--key-dim", type=positive, metavar="K", help="of a head")
    sizes.add_argument("--value-dim", type=positive, metavar="V", help="of a head")
    sizes.add_argument(
        "--attention",
        type=positive,
        nargs=2,
        metavar=("H", "DIM"),
        help="heads of softmax peers and their dim; default: the shape's, or --heads of --value-dim if one is given",
    )
    sizes.add_argument("--dtype", choices=["float32", "bfloat16"], help="of q, k, v; default: bfloat16 on CUDA")
    sizes.add_argument("--device", help=f"default: {default_device()}")
    what = parser.add_argument_group("what is measured")
    what.add_argument("--only", nargs="+", metavar="NAME", help="these candidates; default: all that can run here")
    what.add_argument(
        "--backward", action=argparse.BooleanOptionalAction, help="forward + backward too; default: on a CUDA device"
    )
    what.add_argument(
        "--no-time", action="store_true", help="leave the times out: the checks and what is asked for below"
    )
    what.add_argument("--memory", action="store_true", help="peak extra CUDA memory of forward + backward")
    what.add_argument(
        "--decode",
        type=positive,
        nargs="*",
        metavar="T",
        help="one token at a time behind T tokens (default: 4095 4096 131071 131072), ours only",
    )
    what.add_argument(
        "--first-step",
        action="store_true",
        help="seconds until a fresh process without compiled kernels has its first result, and has trained one step",
    )
    what.add_argument("--rounds", type=positive, metavar="N", help="turns of the candidates; default: 7, on CUDA 5")
    out = parser.add_argument_group("output")
    out.add_argument("--json", type=Path, metavar="FILE", help="write everything here")
    out.add_argument("--figure", type=Path, metavar="PNG", help="draw time against length, both logarithmic; PDF, SVG")
    out.add_argument(
        "--from-json",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measure nothing: table and, with --figure, figure of saved runs",
    )
    parser.add_argument("--once", help=argparse.SUPPRESS)  # the fresh process of --first-step
    return parser


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, got {text!r}")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    try:
        parser = build_parser()
        options = parser.parse_args(argv)
        check_output(options, parser)
        if options.from_json:
            reports, status = saved(options), 0
        else:
            setup, lengths = resolve(options)
            if options.once:
                bench_latency.once(candidates(setup.family, setup.attention)[options.once], setup, lengths[0])
                return 0
            report, status = run(options, setup, lengths)
            reports = [report]
        print("\n\n".join(map(bench_report.table, reports)))
        if options.figure:
            bench_figure.figure(reports, options.figure)
            print(f"figure: {options.figure}")
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except Wrong as error:
        sys.stderr.write(f"error: {error}; nothing was timed\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except Exception as error:
        if not out_of_memory(error):
            raise
        sys.stderr.write("error: out of memory before anything was timed; fewer heads or smaller head dims need less\n")
        return 1
    return status


def check_output(options: argparse.Namespace, parser: Parser) -> None:
    """What could not be written, or would be ignored, is said before minutes of measuring. Raises UserError."""
    if options.from_json:
        shown = ("family", "figure", "from_json")
        ignored = [k for k, x in vars(options).items() if k not in shown and x != parser.get_default(k)]
        if ignored:
            names = ", ".join("--" + name.replace("_", "-") for name in ignored)
            raise UserError(f"--from-json measures nothing, {names} would be ignored (allowed: --figure, same family)")
    bench_files.check_file("--json", options.json)
    if options.figure:
        bench_figure.check_figure(options.figure)
        if options.no_time:
            raise UserError("--figure draws times, --no-time takes none: give one of the two")


def saved(options: argparse.Namespace) -> list[bench_files.Report]:
    """The reports of --from-json. Raises UserError."""
    reports = bench_files.read(options.from_json)
    for report in reports:
        if options.family not in (None, found := report["setup"]["family"]):
            raise UserError(f"family {options.family}: the files hold another one (allowed: {found}, or none)")
    if options.figure and not bench_figure.timed(reports):
        raise UserError("--figure: nothing was timed in these files")
    return reports


def resolve(options: argparse.Namespace) -> tuple[Setup, list[int]]:
    """The sizes that the options mean. Raises UserError."""
    if options.family is None:
        raise UserError(f"family: which one? (allowed: {', '.join(FAMILIES)})")
    asked_device = options.device or default_device()
    try:
        device = torch.device(asked_device)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda") or (
        device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
    ):
        there = ", ".join(["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))])
        raise UserError(f"--device {asked_device}: is not here (allowed: {there})")
    cuda = device.type == "cuda"
    for flag, asked in (("--memory", options.memory), ("--first-step", options.first_step)):
        if asked and not cuda:
            raise UserError(f"{flag} needs a CUDA device (--device is {asked_device})")
    if cuda and device.index is not None:
        torch.cuda.set_device(device)
    name = options.shape or ("cpu" if not cuda else "paper" if options.family == "ssd" else "delta")
    shape = SHAPES[name]
    sizes = {key: getattr(options, key) or getattr(shape, key) for key in ("batch", "heads", "key_dim", "value_dim")}
    groups = options.groups or min(shape.groups, sizes["heads"])
    if options.heads and not options.groups and shape.groups == shape.heads:
        groups = options.heads
    if sizes["heads"] % groups:
        raise UserError(f"--groups {groups}: must divide --heads {sizes['heads']}")
    dtype = options.dtype or ("bfloat16" if cuda else "float32")
    changed = any(getattr(options, key) for key in ("batch", "heads", "groups", "key_dim", "value_dim", "attention"))
    shown = "own sizes" if changed else name
    attention = None if options.heads or options.value_dim else shape.attention
    attention = tuple(options.attention) if options.attention else attention
    setup = Setup(options.family, shown, groups=groups, dtype=dtype, device=asked_device, attention=attention, **sizes)
    lengths = sorted(set(options.lengths or (T for T in shape.lengths if cuda or name == "cpu" or T <= 4096)))
    check_memory(setup, {"--lengths": max(lengths), "--decode": max(options.decode or [1])})
    try:
        one = {**vars(setup), "batch": 1, "device": "cpu"}
        token = draw(Setup(**one), 1)
        check_recurrent(*(token.get(key) for key in ("q", "k", "v", "g", "beta", "level_scales")), None, "auto")
    except ValueError as error:
        raise UserError(f"--key-dim, --value-dim: {error}") from None
    return setup, lengths


def check_memory(setup: Setup, longest: dict[str, int]) -> None:
    """Lengths whose inputs alone are larger than the memory: a CPU's allocator may promise it, and the process dies."""
    if setup.cuda:
        there = torch.cuda.mem_get_info(setup.device)[1]
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for option, T in longest.items():
        try:
            needed = sum(x.nbytes for x in draw(replace(setup, device="meta"), T).values())
        except Exception as error:
            if not out_of_memory(error):
                raise
            needed = sys.maxsize
        if needed > there:
            sizes = f"the inputs take {needed / 2**30:,.0f} GiB, there are {there / 2**30:,.0f}"
            raise UserError(f"{option} {T}: out of memory: {sizes}")


def pick(options: argparse.Namespace, setup: Setup) -> tuple[list[Candidate], dict[str, str]]:
    known = [*candidates(setup.family), *ALIASES]
    for name in options.only or []:
        if name not in known:
            raise UserError(f"--only {name}: no such candidate (allowed: {', '.join(known)})")
    chosen, left_out = choose(setup, options.only)
    if not chosen:
        raise UserError("--only: none of them can run here: " + "; ".join(f"{k}: {v}" for k, v in left_out.items()))
    return chosen, left_out


def run(options: argparse.Namespace, setup: Setup, lengths: list[int]) -> tuple[dict[str, Any], int]:
    """The report, and the exit status: 1 if one of ours raised, or who or what was asked for did not run."""
    chosen, left_out = pick(options, setup)
    asked = [*(one.name for one in chosen), *left_out] if options.only else []
    for name in left_out if options.only else ():
        note(f"left out: {name}: {left_out[name]}")
    whats = [] if options.no_time else [FORWARD]
    if options.backward or (options.backward is None and setup.cuda):
        whats += [] if options.no_time else [BOTH]
    whats += [MEMORY] if options.memory else []
    report = {"title": str(setup), "statistic": "median" if setup.cuda else "best of the rounds"}
    report |= {"setup": vars(setup), "machine": bench_report.machine(setup), "command": sys.argv[1:]}
    report |= {"candidates": {one.name: one.about for one in chosen}, "left_out": left_out}
    report |= {"lengths": lengths if whats else [], "measures": list(whats)}
    report["measures"] += [DECODE] if options.decode is not None else []
    report["measures"] += [FIRST_STEP] if options.first_step else []
    report |= {"rows": [], "decode": [], "first_step": []}

    report["errors"] = check_all(chosen, setup, random.randint(257, 400), lengths if whats else [], left_out)
    decoders = [one for one in chosen if isinstance(one, Ours) and one.eager]
    if options.decode is not None:
        for candidate in decoders:
            bench_latency.check_decode(candidate, setup)
    broken = False
    try:
        for T in lengths if whats else []:
            try:
                measurement = Measurement(chosen, setup, T, options.rounds or (5 if setup.cuda else 7))
            except Exception as error:
                if not out_of_memory(error):
                    raise
                note(f"all candidates at {T:,}: left out: out of memory")
                left_out[f"all candidates at {T:,}"] = "out of memory"
                broken = True
                continue
            for what in whats:
                report["rows"] += measurement.memory() if what == MEMORY else measurement.times(what)
                bench_files.write(report, options.json)
            left_out |= {f"{name} at {T:,}": reason for name, reason in measurement.failed.items()}
            broken |= measurement.broken
            del measurement
        if options.decode is not None:
            report["decode"] = bench_latency.decode(decoders, setup, options.decode or bench_latency.POSITIONS)
            bench_files.write(report, options.json)
        if options.first_step:
            report["first_step"] = bench_latency.first_steps(chosen, setup, lengths[0])
    except (UserError, Wrong):
        raise
    except Exception as error:  # what is measured by now is shown, whatever came
        if out_of_memory(error):
            note(f"error: out of memory: {one_line(error)}")
        else:
            traceback.print_exc()
        broken = True
    report["machine"] = bench_report.machine(setup)  # compilers may have chosen another assembler by now
    bench_files.write(report, options.json)
    ran = {row["candidate"] for row in report["rows"]} if whats else {one.name for one in chosen}
    for name in asked:
        if name not in ran:
            reasons = [reason for key, reason in left_out.items() if key == name or key.startswith(f"{name} at ")]
            note(f"error: --only {name}: did not run: {'; '.join(dict.fromkeys(reasons)) or 'see above'}")
            broken = True
    return report, int(broken)


if __name__ == "__main__":
    sys.exit(main())
