"""How `tools.bench` checks a candidate and then takes its time and memory."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable

import torch
from torch import Tensor

from tools.bench_peers import Candidate, Ours, one_line
from tools.bench_shapes import Setup, Tensors, draw

BOUNDS = {"bfloat16": 1e-2, "float32": 1e-4}
"""Relative error that ours may have; nothing is timed above it."""
PEER_BOUND = 5e-2
"""For the code of others: enough to see that it computes the same function."""
EXACT = 1e-10

TARGET_MS = 300
"""On a CUDA device, about so long is each candidate timed at each length."""
LEAST, MOST = 5, 1000
"""Samples of that time."""

FORWARD, BOTH, MEMORY = "forward", "forward + backward", "peak extra MiB"


class Wrong(Exception):
    """A result of ours is not what it must be."""


def note(text: str) -> None:
    """Progress, beside the table that goes to stdout."""
    print(text, file=sys.stderr, flush=True)


def out_of_memory(error: BaseException) -> bool:
    """CUDA has a class for it; on a CPU, and where a size is beyond 64 bits, only the text tells."""
    signs = ("can't allocate memory", "calculation overflowed", "Overflow when unpacking")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in str(error) for sign in signs)


def leaves(inputs: Tensors) -> Tensors:
    return {name: x.detach().requires_grad_() for name, x in inputs.items()}


def relative_error(x: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of what is expected; piece by piece, since fp64 is large."""
    wrong = total = torch.zeros((), dtype=torch.float64, device=x.device)
    for a, b in zip(x.detach().split(4096, 1), expected.detach().split(4096, 1), strict=True):
        wrong = wrong + (a.double() - b.double()).square().sum()
        total = total + b.double().square().sum()
    return float((wrong / total).sqrt())


def require(errors: dict[str, float], bound: float, what: str) -> None:
    name = max(errors, key=lambda key: math.inf if math.isnan(errors[key]) else errors[key])
    if not errors[name] <= bound:
        raise Wrong(f"{what} is wrong: relative error of {name} {errors[name]:.1e} > {bound:.0e}")


def check(candidate: Candidate, setup: Setup, T: int, lengths: list[int]) -> dict[str, float]:
    """Errors of the output and of every gradient against the reference in fp64, at a short length."""
    setup, T = candidate.check_at(setup, T, lengths)
    inputs = leaves(candidate.inputs(draw(setup, T)))
    exact = leaves({name: x.double() for name, x in inputs.items()})
    o, expected = candidate(inputs), candidate.reference(exact)
    do = torch.randn_like(o)
    errors = {"o": relative_error(o, expected)}
    try:
        gradients = torch.autograd.grad(o, list(inputs.values()), do)
    except Exception as error:  # some refuse a card or a compiler that they know to be wrong
        if candidate.ours or out_of_memory(error):
            raise
        candidate.forward_only = one_line(error)
    else:
        expected_gradients = torch.autograd.grad(expected, list(exact.values()), do.double())
        for name, x, y in zip(inputs, gradients, expected_gradients, strict=True):
            errors[f"d{name}"] = relative_error(x, y)
    bound = BOUNDS[setup.dtype] if candidate.ours else PEER_BOUND
    require(errors, bound, f"{candidate.name} in {setup.dtype} at T={T}")
    if candidate.eager:
        with torch.no_grad():
            require({"o": relative_error(candidate(exact), expected)}, EXACT, f"{candidate.name} in fp64 at T={T}")
    return errors


@torch.no_grad()
def check_ones(candidate: Candidate, setup: Setup, T: int) -> None:
    """Log-linear with all scales 1 is linear, at any length."""
    if not isinstance(candidate, Ours) or not candidate.eager or not candidate.loglinear:
        return
    linear = Ours(candidate.name.removeprefix("log"), setup.family, candidate.backend)
    tokens = draw(setup, T)
    tokens["level_scales"].fill_(1)
    error = relative_error(candidate(candidate.inputs(tokens)), linear(linear.inputs(tokens)))
    require({"o": error}, BOUNDS[setup.dtype], f"{candidate.name} with scales of 1 at T={T}")


def check_all(
    chosen: list[Candidate], setup: Setup, T: int, lengths: list[int], left_out: dict[str, str]
) -> dict[str, dict[str, float]]:
    """Errors by candidate. Peers that are wrong or raise go to `left_out` and out of `chosen`; ours raise. Of a peer
    that raises in its backward pass, that alone is left out."""
    errors = {}
    for candidate in list(chosen):
        try:
            errors[candidate.name] = check(candidate, setup, T, lengths)
        except Exception as error:
            if candidate.eager or (candidate.ours and isinstance(error, Wrong)):
                raise
            left_out[candidate.name] = str(error) if isinstance(error, Wrong) else one_line(error)
            chosen.remove(candidate)
            note(f"left out: {candidate.name}: {left_out[candidate.name]}")
            continue
        if candidate.forward_only:
            left_out[f"{candidate.name} backward"] = candidate.forward_only
            note(f"left out: {candidate.name} backward: {candidate.forward_only}")
        worst = max(errors[candidate.name], key=errors[candidate.name].__getitem__)
        note(f"checked {candidate.name}: largest relative error {errors[candidate.name][worst]:.1e} ({worst})")
    for length in lengths:
        for candidate in chosen:
            try:
                check_ones(candidate, setup, length)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                note(f"{candidate.name} at {length:,}: not compared with linear, out of memory")
    return errors


Row = dict[str, object]


class Measurement:
    """All candidates at one length, in turns; what fails is left out at that length and said."""

    def __init__(self, chosen: list[Candidate], setup: Setup, T: int, rounds: int) -> None:
        self.setup, self.T, self.rounds = setup, T, rounds
        self.failed: dict[str, str] = {}
        self.broken = False
        """One of ours raised something else than that memory ran out."""
        if setup.cuda:
            torch.cuda.empty_cache()
        tokens = draw(setup, T)
        self.candidates = {candidate.name: candidate for candidate in chosen}
        self.inputs = {name: leaves(candidate.inputs(tokens)) for name, candidate in self.candidates.items()}
        values = {name: candidate.values(self.inputs[name]) for name, candidate in self.candidates.items()}
        shared = {v.shape: torch.randn_like(v) for v in values.values()}
        self.do = {name: shared[v.shape] for name, v in values.items()}

    def run(self, name: str, what: str) -> None:
        inputs = self.inputs[name]
        if what == FORWARD:
            with torch.no_grad():
                self.candidates[name](inputs)
        else:
            torch.autograd.grad(self.candidates[name](inputs), list(inputs.values()), self.do[name])

    def attempt(self, name: str, what: str, measure: Callable[[Callable[[], None]], object]) -> object | None:
        """`measure(run)`, or None and a line that says why not."""
        if name in self.failed or (what != FORWARD and self.candidates[name].forward_only):
            return None
        try:
            return measure(lambda: self.run(name, what))
        except Exception as error:
            memory = out_of_memory(error)
            if self.candidates[name].ours and not memory:
                self.broken = True
                traceback.print_exc()
            self.failed[name] = "out of memory" if memory else one_line(error)
            note(f"{what} at {self.T:,}: {name} left out: {self.failed[name]}")
        if self.setup.cuda:
            with contextlib.suppress(RuntimeError):  # after a kernel's illegal access every call fails
                torch.cuda.empty_cache()
        return None

    def times(self, what: str) -> list[Row]:
        """Milliseconds: on a CUDA device the median, on a CPU the best of the rounds, which noise disturbs least."""
        counts = {}
        for name in self.candidates:
            estimate = self.attempt(name, what, warm_up if self.setup.cuda else clock)
            if estimate is not None:
                counts[name] = self.rounds
                if self.setup.cuda:
                    counts[name] = min(MOST, max(LEAST, math.ceil(TARGET_MS / estimate)))
        samples: dict[str, list[float]] = {name: [] for name in counts}
        for turn in range(self.rounds):
            for name, count in counts.items():
                share = count * (turn + 1) // self.rounds - count * turn // self.rounds
                if self.setup.cuda and share:
                    samples[name] += self.attempt(name, what, lambda run, n=share: burst(run, n)) or []
                elif share:
                    samples[name].append(self.attempt(name, what, clock) or math.inf)
        rows = []
        for name, found in samples.items():
            if name in self.failed:
                continue
            found.sort()
            ms = statistics.median(found) if self.setup.cuda else found[0]
            rows.append(self.row(what, name, value=ms, min=found[0], max=found[-1], samples=len(found)))
            note(f"{what} at {self.T:,}: {name} {ms:.4g} ms ({found[0]:.4g}..{found[-1]:.4g}, {len(found)} times)")
        return rows

    def memory(self) -> list[Row]:
        """Peak CUDA memory of forward + backward above what was there before, gradients included."""
        rows = []
        for name in self.candidates:
            peak = self.attempt(name, BOTH, peak_memory)
            if peak is not None:
                rows.append(self.row(MEMORY, name, value=peak))
                note(f"{MEMORY} at {self.T:,}: {name} {peak:,.1f}")
        return rows

    def row(self, what: str, name: str, **numbers: float) -> Row:
        return {"what": what, "T": self.T, "candidate": name, **numbers}


def clock(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def burst(run: Callable[[], None], count: int) -> list[float]:
    """Milliseconds of each of `count` calls, one right after the other: no wait between them on the host."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * count)]
    for mark in marks:
        mark.record()  # events are made when they are first recorded: not while time is taken
    torch.cuda.synchronize()
    for i in range(count):
        marks[2 * i].record()
        run()
        marks[2 * i + 1].record()
    torch.cuda.synchronize()
    return [marks[2 * i].elapsed_time(marks[2 * i + 1]) for i in range(count)]


def warm_up(run: Callable[[], None]) -> float:
    """Compile, choose configurations, fill the allocator; then an estimate of the milliseconds."""
    burst(run, 1)
    ms = burst(run, 1)[0]
    return min(burst(run, 5)) if ms < 100 else ms


def peak_memory(run: Callable[[], None]) -> float:
    """MiB."""
    run()  # buffers that stay, such as cuBLAS's, are there from now on
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
