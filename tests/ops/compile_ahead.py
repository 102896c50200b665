"""``python -m tests.ops.compile_ahead``: a step compiled ahead for a Hopper GPU, and then run, by Triton itself.

Needs no GPU: Triton's driver is one that says it has one, and takes note of what is loaded and launched. Prints two
lines of JSON: kernels compiled, loaded (and in how many threads) and run while compiling ahead, and in the step itself.
"""

import json
import threading
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget

from src import ops
from src.ops import linear
from src.ops.kernels import check, launch

seen: dict[str, list[str]] = {"compiled": [], "loaded": [], "ran": []}
SHARED = 227 * 1024


class Launcher:
    def __init__(self, src, metadata) -> None:
        pass

    def __call__(self, *arguments) -> None:
        seen["ran"].append("")


def load(name: str, *_) -> tuple:
    seen["loaded"].append(threading.current_thread().name)
    return object(), object(), 0, 0, 1024  # module, function, registers, spills, threads that it may have


class Driver:
    launcher_cls = Launcher
    utils = SimpleNamespace(load_binary=load, get_device_properties=lambda device: {"max_shared_mem": SHARED})

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    triton.knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: seen["compiled"].append(fn.name)
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_current_stream_capturing = lambda: False
    linear._without_kernels = lambda v: ""
    check.ensure = lambda *_: None
    given = {name: torch.randn(1, 100, 2, 16).bfloat16().requires_grad_() for name in ("q", "k", "v")}
    given |= {name: torch.rand(1, 100, 2).neg().requires_grad_() for name in ("g", "beta")}

    def step() -> None:
        o, _ = ops.gated_delta_rule(**given, backend="triton")
        o.sum().backward()

    def taken() -> dict[str, int]:
        made = {name: len(x) for name, x in seen.items()} | {"threads": len(set(seen["loaded"]))}
        for x in seen.values():
            x.clear()
        return made

    with torch.autograd.set_multithreading_enabled(False):
        with launch.compiling_ahead():
            step()
        print(json.dumps(taken()))
        step()
    print(json.dumps(taken()))


if __name__ == "__main__":
    main()
