"""Time the operators against each other: ``python -m tools.bench ssd`` or ``… delta_rule``.

Each length is checked before it is timed: the log-linear form with all scales 1 must equal the linear one, and
at a short length the chunked form must equal the T x T one in fp64. Peers run in turn inside the same process,
round after round, and the fastest round counts, so a busy machine disturbs all of them alike. What to look at
are the ratios.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from src import ops
from src.ops.reference import parallel

FAMILIES = {"ssd": ("ssd", "loglinear_ssd"), "delta_rule": ("gated_delta_rule", "loglinear_gated_delta_rule")}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__, allow_abbrev=False)
    parser.add_argument("family", choices=FAMILIES, help="which operators: the linear one and its log-linear variant")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384], metavar="T", help="tokens")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--groups", type=int, default=None, help="query/key groups; default: as many as heads")
    parser.add_argument("--key-dim", type=int, default=32, help="K")
    parser.add_argument("--value-dim", type=int, default=32, help="V")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of q, k and v")
    parser.add_argument("--backward", action="store_true", help="time forward + backward, too")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the numbers here")
    options = parser.parse_args()
    options.groups = options.groups or options.heads
    if options.heads % options.groups:
        parser.error(f"--groups {options.groups} must divide --heads {options.heads}")

    base, loglinear = FAMILIES[options.family]
    check_short(base, loglinear, options)
    rows = []
    for T in sorted(options.lengths):
        arguments = draw(T, options)
        check_ones(base, loglinear, arguments)
        runs = {"forward": lambda name, a=arguments: forward(name, a)}
        if options.backward:
            runs["forward + backward"] = lambda name, a=arguments: backward(name, a)
        for what, run in runs.items():
            ms = measure({name: (lambda n=name, r=run: r(n)) for name in (base, loglinear)}, options)
            rows.append({"T": T, "what": what, **ms, "ratio": ms[loglinear] / ms[base]})
            print(f"{what} at {T:,}: {ms[base]:.1f} ms, log-linear {ms[loglinear]:.1f} ms", file=sys.stderr)
    report = {"machine": device_name(options.device), "torch": torch.__version__, **vars(options), "rows": rows}
    print(table(rows, base, loglinear))
    print(f"{report['machine']}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, default=str) + "\n")
    return 0


def draw(T: int, options: argparse.Namespace, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Fresh random arguments: unit keys, a mean log decay of -0.05."""
    dtype = dtype or getattr(torch, options.dtype)
    gates = torch.promote_types(dtype, torch.float32)
    B, G, H, K, V = options.batch, options.groups, options.heads, options.key_dim, options.value_dim
    made = {
        "q": torch.randn(B, T, G, K).to(dtype),
        "k": torch.nn.functional.normalize(torch.randn(B, T, G, K), dim=-1).to(dtype),
        "v": torch.randn(B, T, H, V).to(dtype),
        "g": -0.1 * torch.rand(B, T, H).to(gates),
    }
    if options.family == "delta_rule":
        made["beta"] = torch.rand(B, T, H).to(gates)
    made["level_scales"] = torch.rand(B, T, H, ops.num_levels(T)).to(gates)
    return {name: x.to(options.device) for name, x in made.items()}


def call(name: str, arguments: dict[str, Tensor]) -> Tensor:
    if not name.startswith("loglinear"):
        arguments = {key: x for key, x in arguments.items() if key != "level_scales"}
    return getattr(ops, name)(**arguments)[0]


@torch.no_grad()
def forward(name: str, arguments: dict[str, Tensor]) -> None:
    call(name, arguments)


def backward(name: str, arguments: dict[str, Tensor]) -> None:
    leaves = {key: x.detach().requires_grad_() for key, x in arguments.items()}
    call(name, leaves).sum().backward()


@torch.no_grad()
def check_short(base: str, loglinear: str, options: argparse.Namespace) -> None:
    arguments = draw(333, options, torch.float64)
    arguments = {key: x.double() for key, x in arguments.items()}
    rest = {key: x for key, x in arguments.items() if key != "level_scales"}
    require(call(loglinear, arguments), parallel(**arguments), 1e-10, f"{loglinear} in fp64")
    require(call(base, rest), parallel(**rest), 1e-10, f"{base} in fp64")


@torch.no_grad()
def check_ones(base: str, loglinear: str, arguments: dict[str, Tensor]) -> None:
    ones = {**arguments, "level_scales": torch.ones_like(arguments["level_scales"])}
    bound = 1e-2 if arguments["v"].dtype == torch.bfloat16 else 1e-4
    require(call(loglinear, ones), call(base, arguments), bound, f"{loglinear} with scales of 1")


def require(x: Tensor, expected: Tensor, bound: float, what: str) -> None:
    error = float((x.double() - expected.double()).norm() / expected.double().norm())
    if not error <= bound:
        raise SystemExit(f"error: {what} is wrong: relative error {error:.1e} > {bound:.0e}; nothing was timed")


def measure(runs: dict[str, Callable[[], None]], options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds, the best of all rounds; the first round warms up and does not count."""
    best = dict.fromkeys(runs, float("inf"))
    for turn in range(options.rounds + 1):
        for name, run in runs.items():
            synchronize(options.device)
            start = time.perf_counter()
            run()
            synchronize(options.device)
            if turn:
                best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    return best


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def device_name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor() or device


def table(rows: list[dict], base: str, loglinear: str) -> str:
    """Growth is the time over that at the length before, in the same column."""
    lines = [f"{'':<20}{'T':>9}{base:>20}{loglinear:>30}{'ratio':>8}{'growth':>16}"]
    before: dict[str, dict] = {}
    for row in rows:
        last = before.get(row["what"])
        growth = f"{row[base] / last[base]:.2f} / {row[loglinear] / last[loglinear]:.2f}" if last else ""
        times = f"{row[base]:>17.1f} ms{row[loglinear]:>27.1f} ms{row['ratio']:>8.2f}"
        lines.append(f"{row['what']:<20}{row['T']:>9,}{times}{growth:>16}")
        before[row["what"]] = row
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
