"""Time the operators against each other and against what else there is: `python -m tools.bench ssd` or `delta_rule`.

Results come before times: whoever is timed has just equalled the T x T form in fp64, with all gradients, at a random
short length; ours also equal it to 1e-10 in fp64, and at every length that is timed the log-linear form with all
scales 1 equals the linear one. Candidates take turns in one process, so a busy machine disturbs all of them alike.
On a CUDA device the median of about 0.3 s of calls counts, on a CPU the best of the rounds.
"""

from __future__ import annotations

import argparse
import random
import sys
import traceback
from pathlib import Path
from typing import NoReturn

import torch

from src.errors import UserError
from src.ops.checks import check_recurrent
from tools import bench_latency, bench_report
from tools.bench_measure import BOTH, FORWARD, MEMORY, Measurement, Wrong, check_all
from tools.bench_peers import ALIASES, FAMILIES, SHAPES, Candidate, Ours, Setup, candidates, choose, draw

EPILOG = """shapes (batch, heads, groups, K, V; lengths on a CUDA device):
{shapes}

candidates of ssd:
{candidates}

examples:
  python -m tools.bench ssd                                        on a CPU: about a minute
  python -m tools.bench ssd --shape paper --memory --json ssd.json --figure ssd.png
  python -m tools.bench ssd --shape small --only loglinear loglinear_torch loglinear_compiled
  python -m tools.bench ssd --decode --no-time                     one token at a time, behind short and long texts
  python -m tools.bench ssd --from-json a.json b.json --figure both.png
"""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def build_parser() -> Parser:
    shapes = "\n".join(
        f"  {name:<9}{s.batch:>3}{s.heads:>4}{s.groups:>4}{s.key_dim:>5}{s.value_dim:>5}   "
        + " ".join(map(str, s.lengths))
        for name, s in SHAPES.items()
    )
    names = "\n".join(f"  {name:<20}{one.about}" for name, one in candidates("ssd").items())
    parser = Parser(
        prog="python -m tools.bench",
        description=__doc__,
        epilog=EPILOG.format(shapes=shapes, candidates=names),
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
    sizes.add_argument("--value-dim", type=positive, metavar="V", help="of a head; of softmax peers all of it")
    sizes.add_argument("--dtype", choices=["float32", "bfloat16"], help="of q, k, v; default: bfloat16 on CUDA")
    sizes.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
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
    out.add_argument("--figure", type=Path, metavar="PNG", help="draw time against length, both logarithmic")
    out.add_argument(
        "--from-json", type=Path, nargs="+", metavar="FILE", help="measure nothing: table and figure of saved runs"
    )
    parser.add_argument("--once", help=argparse.SUPPRESS)  # the fresh process of --first-step
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, got {text!r}")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    try:
        options = build_parser().parse_args(argv)
        bench_report.check_file("--json", options.json)
        bench_report.check_file("--figure", options.figure)
        if options.figure:
            bench_report.import_figure()
        if options.from_json:
            reports, status = bench_report.read(options.from_json), 0
        else:
            setup, lengths = resolve(options)
            if options.once:
                bench_latency.once(candidates(setup.family)[options.once], setup, lengths[0])
                return 0
            report, status = run(options, setup, lengths)
            reports = [report]
        print("\n\n".join(map(bench_report.table, reports)))
        if options.figure:
            bench_report.figure(reports, options.figure)
            print(f"figure: {options.figure}")
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except Wrong as error:
        sys.stderr.write(f"error: {error}; nothing was timed\n")
        return 1
    return status


def resolve(options: argparse.Namespace) -> tuple[Setup, list[int]]:
    """The sizes that the options mean. Raises UserError."""
    if options.family is None:
        raise UserError(f"family: which one? (allowed: {', '.join(FAMILIES)})")
    try:
        device = torch.device(options.device)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda") or (
        device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
    ):
        there = ", ".join(["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))])
        raise UserError(f"--device {options.device}: is not here (allowed: {there})")
    cuda = device.type == "cuda"
    for flag, asked in (("--memory", options.memory), ("--first-step", options.first_step)):
        if asked and not cuda:
            raise UserError(f"{flag} needs a CUDA device (--device is {options.device})")
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
    changed = any(getattr(options, key) for key in ("batch", "heads", "groups", "key_dim", "value_dim"))
    shown = "own sizes" if changed else name
    setup = Setup(options.family, shown, groups=groups, dtype=dtype, device=options.device, **sizes)
    try:
        one = {**vars(setup), "batch": 1, "device": "cpu"}
        token = draw(Setup(**one), 1)
        check_recurrent(*(token.get(key) for key in ("q", "k", "v", "g", "beta", "level_scales")), None, "auto")
    except ValueError as error:
        raise UserError(f"--key-dim, --value-dim: {error}") from None
    lengths = sorted(set(options.lengths or (T for T in shape.lengths if cuda or name == "cpu" or T <= 4096)))
    return setup, lengths


def pick(options: argparse.Namespace, setup: Setup) -> tuple[list[Candidate], dict[str, str]]:
    known = [*candidates(setup.family), *ALIASES]
    for name in options.only or []:
        if name not in known:
            raise UserError(f"--only {name}: no such candidate (allowed: {', '.join(known)})")
    chosen, left_out = choose(setup, options.only)
    if not chosen:
        raise UserError("--only: none of them can run here: " + "; ".join(f"{k}: {v}" for k, v in left_out.items()))
    return chosen, left_out


def run(options: argparse.Namespace, setup: Setup, lengths: list[int]) -> tuple[dict, int]:
    """The report, and the exit status: 1 if one of ours raised."""
    chosen, left_out = pick(options, setup)
    report = {"title": str(setup), "statistic": "median" if setup.cuda else "best of the rounds"}
    report |= {"setup": vars(setup), "machine": bench_report.machine(setup), "command": sys.argv[1:]}
    report |= {"candidates": {one.name: one.about for one in chosen}, "left_out": left_out}
    report |= {"rows": [], "decode": [], "first_step": []}
    whats = [] if options.no_time else [FORWARD]
    if options.backward or (options.backward is None and setup.cuda):
        whats += [] if options.no_time else [BOTH]
    whats += [MEMORY] if options.memory else []

    report["errors"] = check_all(chosen, setup, random.randint(257, 400), lengths if whats else [], left_out)
    decoders = [one for one in chosen if isinstance(one, Ours) and one.eager]
    if options.decode is not None:
        for candidate in decoders:
            bench_latency.check_decode(candidate, setup)
    broken = False
    try:
        for T in lengths if whats else []:
            measurement = Measurement(chosen, setup, T, options.rounds or (5 if setup.cuda else 7))
            for what in whats:
                report["rows"] += measurement.memory() if what == MEMORY else measurement.times(what)
                bench_report.write(report, options.json)
            left_out |= {f"{name} at {T:,}": reason for name, reason in measurement.failed.items()}
            broken |= measurement.broken
            del measurement
        if options.decode is not None:
            report["decode"] = bench_latency.decode(decoders, setup, options.decode or bench_latency.POSITIONS)
            bench_report.write(report, options.json)
        if options.first_step:
            report["first_step"] = bench_latency.first_steps(chosen, setup, lengths[0])
    except (UserError, Wrong):
        raise
    except Exception:  # what is measured by now is shown, whatever came
        traceback.print_exc()
        broken = True
    report["machine"] = bench_report.machine(setup)  # compilers may have chosen another assembler by now
    bench_report.write(report, options.json)
    return report, int(broken)


if __name__ == "__main__":
    sys.exit(main())
