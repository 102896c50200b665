"""``python -m tests.ops.compile_all bfloat16 128 64 decay delta step``: every kernel that such calls take, of scalar
decay, of the delta rule (``all_delta``: by every kind of call) and of one token, compiled for a Hopper GPU.

Needs no GPU. Prints one line of JSON a kernel: its name, and the bytes of shared memory that a program asks for.
"""

import itertools
import json
import sys
from collections.abc import Iterator

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from src.ops.kernels import decode, decode_delta, passes, ssd
from src.ops.kernels.delta import ops as delta_ops
from src.ops.kernels.delta import passes as delta_passes
from src.ops.kernels.delta.ops import delta_backward, delta_forward
from src.ops.state import LinearState, LogLinearState

NAMES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32"}
HEADS = 4
LENGTH, SHORT = 300, 60


def launches(dtype: torch.dtype, K: int, V: int, *, delta: bool, all_calls: bool) -> Iterator[tuple]:
    """What operators of a kind launch, forward and backward; nothing is run.

    Both operators, over rows, packed documents, documents that continue. Of the delta rule, whose tiles are others with
    states, only the log-linear one over the last two; with ``all_calls`` also few tokens, and states that only come in
    or only go out.
    """
    found: list[tuple] = []
    for module in (passes, delta_passes):
        module.launch = lambda kernel, programs, arguments, **options: found.append((kernel, arguments, options))
    for module in (ssd, delta_ops):
        module._trust = lambda *_, **__: None
    rows, packed, continued = (1, False, False), (2, False, False), (2, True, True)
    calls = [(LENGTH, L, *call) for L in (None, 9) for call in (rows, packed, continued)]
    if delta and not all_calls:
        calls = [(LENGTH, 9, *packed), (LENGTH, 9, *continued)]
    elif delta:
        calls += [(SHORT, L, *call) for L in (None, 9) for call in (rows, packed)]
        calls += [(LENGTH, L, N, False, True) for L in (None, 9) for N in (1, 2)]
        calls += [(LENGTH, L, 2, True, False) for L in (None, 9)]
        calls += [(LENGTH, None, 1, True, goes_out) for goes_out in (False, True)]
    for call in calls:
        if delta:
            one_call(delta_forward, delta_backward, dtype, K, V, True, *call)
        else:
            one_call(ssd.ssd_forward, ssd.ssd_backward, dtype, K, V, False, *call)
    yield from found


def one_call(
    forward, backward, dtype: torch.dtype, K: int, V: int, delta: bool,
    T: int, L: int | None, N: int, comes_in: bool, goes_out: bool,
) -> None:  # fmt: skip
    """So many tokens, level scales and documents (one: a row); states may come in or go out."""
    q = torch.zeros(1, T, 2, K, dtype=dtype)
    v, g = torch.zeros(1, T, HEADS, V, dtype=dtype), torch.zeros(1, T, HEADS)
    scales = None if L is None else torch.zeros(1, T, HEADS, L)
    documents = None if N == 1 else ssd.documents_of(torch.tensor([0, T // 3, T]))
    roots = torch.zeros(*([] if L is None else [3]), N, HEADS, K, V) if comes_in else None
    rest = (q, q, v, g, *([g] if delta else []), scales, documents, roots, 1.0, 4 if comes_in and N > 1 else 0)
    _, states = forward._init_fn(*rest, (0 if L is None else 5) if goes_out else -1)
    backward._init_fn(v, torch.zeros_like(states) if goes_out else None, *rest)


class Recorder:
    """In the place of a kernel: what it would have been launched with, and nothing is run."""

    def __init__(self, kernel, found: list[tuple]) -> None:
        self.kernel, self.found = kernel, found

    def __getitem__(self, programs: tuple[int, ...]):
        def record(*arguments, num_warps: int, num_stages: int, **constants) -> None:
            named = {**dict(zip(self.kernel.arg_names, arguments, strict=False)), **constants}
            self.found.append((self.kernel, named, {"warps": num_warps, "stages": num_stages}))

        return record


def steps(dtype: torch.dtype, K: int, V: int) -> Iterator[tuple]:
    """What one token launches, of all four operators."""
    found: list[tuple] = []
    for module in (decode, decode_delta):
        module._linear, module._loglinear = Recorder(module._linear, found), Recorder(module._loglinear, found)
    q, v, g = torch.zeros(2, 1, 2, K, dtype=dtype), torch.zeros(2, 1, HEADS, V, dtype=dtype), torch.zeros(2, 1, HEADS)
    raw = [x.repeat(1, 63, *[1] * (x.ndim - 2)) for x in (q, v, g, g)]
    positions, matrices = torch.zeros(2, dtype=torch.int64), torch.zeros(2, HEADS, K, V)
    for beta in (None, g):
        linear = LinearState(positions, matrices).for_decoding(1)
        levels = torch.stack([matrices] * 3)
        loglinear = LogLinearState(positions, levels, *raw[:3], None if beta is None else raw[3], 0).for_decoding(1)
        for scales, state in ((None, linear), (torch.zeros(2, 1, HEADS, 9), loglinear)):
            if beta is None:
                decode.step(q, q, v, g, scales, state, 1.0)
            else:
                decode_delta.step_delta(q, q, v, g, beta, scales, state, 1.0)
    yield from found


def compiled(kernel, arguments: dict, options: dict):
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = NAMES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    names = {"warps": "num_warps", "stages": "num_stages", "registers": "maxnreg"}
    chosen = {names[name]: value for name, value in options.items() if value is not None}
    key = f"{kernel.fn.__module__}.{kernel.__name__}", json.dumps([signature, constants], default=str)
    source = ASTSource(kernel, signature, constants, attributes)
    return key, chosen, lambda: triton.compile(source, target=GPUTarget("cuda", 90, 32), options=chosen)


def main() -> None:
    dtype, K, V = getattr(torch, sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    kinds = {
        "decay": lambda: launches(dtype, K, V, delta=False, all_calls=True),
        "delta": lambda: launches(dtype, K, V, delta=True, all_calls=False),
        "all_delta": lambda: launches(dtype, K, V, delta=True, all_calls=True),
        "step": lambda: steps(dtype, K, V),
    }
    seen: dict[tuple, dict] = {}
    for launch in itertools.chain.from_iterable(kinds[name]() for name in sys.argv[4:]):
        key, chosen, make = compiled(*launch)
        if key not in seen:
            print(json.dumps([key[0].removeprefix("src.ops.kernels."), make().metadata.shared]), flush=True)
        # A call finds what was compiled first for its constants: ``launch.py``.
        assert seen.setdefault(key, chosen) == chosen, (key[0], chosen, seen[key])


if __name__ == "__main__":
    main()
