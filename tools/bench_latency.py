"""What `tools.bench` measures besides throughput: one token at a time, and how long a first step takes."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from src import ops
from src.ops.reference import parallel
from src.ops.state import State
from tools.bench_measure import BOUNDS, burst, clock, leaves, note, relative_error, require
from tools.bench_peers import Candidate, Ours, one_line
from tools.bench_shapes import Setup, Tensors, draw

POSITIONS = [4095, 4096, 131071, 131072]
"""The worst place of a log-linear state (every level holds something) beside the best, early and late."""

AHEAD = 64
"""Tokens that a state is asked to have room for."""

STARTED = "BENCH_STARTED"
"""Environment: when the parent of a first step started it, in seconds since the epoch."""

TIMEOUT_S = 1800

Row = dict[str, object]


class Decoder:
    """One of ours behind a prefix, ready to take one token from there again and again."""

    def __init__(self, candidate: Ours, setup: Setup, prefix: Tensors) -> None:
        self.candidate, self.setup = candidate, setup
        _, self.state = candidate.run(candidate.inputs(prefix), return_state=True)

    def ready(self) -> State:
        """A state that stands behind the prefix and that nobody else sees."""
        return self.state.for_decoding(AHEAD)

    def step(self, token: Tensors, state: State) -> tuple[Tensor, State]:
        return self.candidate.run(self.candidate.inputs(token), initial_state=state, return_state=True)

    def eager(self, token: Tensors, count: int) -> list[float]:
        """Milliseconds of one call, launched from an idle host and device: what a reader of the text waits for."""
        samples = []
        for turn in range(count + 3):
            run = partial(self.step, token, self.ready())
            ms = burst(run, 1)[0] if self.setup.cuda else clock(run)
            if turn >= 3:
                samples.append(ms)
        return samples

    def graph(self, token: Tensors, count: int) -> list[float]:
        """The same, replayed from a CUDA graph. Raises where capture fails, or gives something else."""
        state = self.ready()
        tensors = [x for field in fields(state) if isinstance(x := getattr(state, field.name), Tensor)]
        saved = [x.clone() for x in tensors]

        def restore() -> None:
            for x, y in zip(tensors, saved, strict=True):
                x.copy_(y)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                _, after = self.step(token, state)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        restore()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o, _ = self.step(token, state)

        # Where calls move the state on in place, replays must go on from token to token as well.
        in_place = after.positions.data_ptr() == state.positions.data_ptr()
        restore()
        expected, after = self.step(token, self.ready())
        graph.replay()
        if in_place:
            expected, after = self.step(token, after)
            graph.replay()
        error = relative_error(o, expected)
        if not error <= BOUNDS[self.setup.dtype]:
            raise RuntimeError(f"the graph differs from calls by {error:.1e}")
        samples = []
        for _ in range(count):
            restore()
            samples += burst(graph.replay, 1)
        return samples


@torch.no_grad()
def check_decode(candidate: Ours, setup: Setup) -> None:
    """Tokens one by one across a chunk's border equal the whole sequence in fp64."""
    setup, T, prefix = replace(setup, batch=min(2, setup.batch)), 322, 319
    tokens = draw(setup, T)
    decoder = Decoder(candidate, setup, {name: x[:, :prefix] for name, x in tokens.items()})
    state, outputs = decoder.ready(), []
    for t in range(prefix, T):
        o, state = decoder.step({name: x[:, t : t + 1] for name, x in tokens.items()}, state)
        outputs.append(o)
    exact = parallel(**{name: x.double() for name, x in candidate.inputs(tokens).items()})
    error = relative_error(torch.cat(outputs, 1), exact[:, prefix:])
    require({"o": error}, BOUNDS[setup.dtype], f"{candidate.name} token by token behind {prefix} tokens")


@torch.no_grad()
def decode(chosen: list[Ours], setup: Setup, positions: list[int]) -> list[Row]:
    """Milliseconds of one token behind so many, and the bytes of the state that is read for it."""
    rows: list[Row] = []
    graphs: list[Callable[[], list[float]]] = []
    # As in a model: as many scales as its longest sequence needs, wherever it stands.
    levels = ops.num_levels(max(positions) + AHEAD)
    count, middle = (50, statistics.median) if setup.cuda else (10, min)
    for candidate in chosen:
        for position in positions:
            decoder = Decoder(candidate, setup, draw(setup, position, levels))
            token = draw(setup, 1, levels)
            ms = middle(decoder.eager(token, count))
            bytes_ = decoder.state.num_bytes
            rows.append({"candidate": candidate.name, "position": position, "state_bytes": bytes_, "ms": ms})
            graphs.append(partial(decoder.graph, token, count))
            note(f"decode: {candidate.name} behind {position:,}: {ms:.4g} ms")
    # Last, because a capture that fails can leave the device in disorder.
    for row, graph in zip(rows, graphs if setup.cuda else [None] * len(rows), strict=True):
        row["graph_ms"] = None
        if graph is None:
            continue
        stream = torch.cuda.current_stream()
        try:
            row["graph_ms"] = statistics.median(graph())
            note(f"decode: {row['candidate']} behind {row['position']:,}: {row['graph_ms']:.4g} ms from a CUDA graph")
        except Exception as error:
            row["graph_failed"] = one_line(error)
            note(f"decode: {row['candidate']} behind {row['position']:,}: no CUDA graph: {row['graph_failed']}")
            torch.cuda.set_stream(stream)
    return rows


def once(candidate: Candidate, setup: Setup, T: int) -> None:
    """In the fresh process: one forward + backward, then the seconds since the parent started it."""
    inputs = leaves(candidate.inputs(draw(setup, T)))
    o = candidate(inputs)
    torch.autograd.grad(o, list(inputs.values()), torch.randn_like(o))
    if setup.cuda:
        torch.cuda.synchronize()
    print(time.time() - float(os.environ.get(STARTED, time.time())))


def first_steps(chosen: list[Candidate], setup: Setup, T: int) -> list[Row]:
    """Seconds from the start of a process without compiled kernels to its first result."""
    sizes = {"batch": setup.batch, "heads": setup.heads, "groups": setup.groups}
    sizes |= {"key-dim": setup.key_dim, "value-dim": setup.value_dim, "lengths": T}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    options += ["--attention", *map(str, setup.attention)] if setup.attention else []
    options += ["--dtype", setup.dtype, "--device", setup.device]
    rows = []
    for candidate in chosen:
        if candidate.forward_only:
            continue
        command = ["-m", "tools.bench", setup.family, *options, "--once", candidate.name]
        rows.append({"what": candidate.name, "T": T, **fresh(command, printed=True)})
    mixer = "loglinear_mamba2" if setup.family == "ssd" else "loglinear_gdn"
    train = ["-m", "src.train", "experiment=mqar", f"mixer={mixer}", "trainer=debug", "trainer.max_steps=1"]
    if setup.cuda:
        train += ["trainer.accelerator=gpu", "trainer.precision=bf16-mixed"]
    return [*rows, {"what": f"training {mixer}", **fresh(train, printed=False)}]


def fresh(arguments: list[str], printed: bool) -> Row:
    """Run Python with empty compile caches. Seconds until its end, or those that it printed last."""
    shown = "python " + " ".join(arguments)
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        where = [] if printed else [f"run.dir={folder}/runs", "run.name=first_step"]
        environment = {**os.environ, **caches, STARTED: repr(time.time())}
        start = time.perf_counter()
        try:
            done = subprocess.run(
                [sys.executable, *arguments, *where],
                cwd=Path(__file__).parents[1],
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return {"command": shown, "failed": f"took more than {TIMEOUT_S} s"}
        seconds = time.perf_counter() - start
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        note(f"first step: {shown}: failed: {said[-1]}")
        return {"command": shown, "failed": said[-1]}
    if printed:
        seconds = float(done.stdout.split()[-1])
    note(f"first step: {shown}: {seconds:.1f} s")
    return {"command": shown, "seconds": seconds}
