"""Launch a kernel without looking up its specialisation each time, and compile many side by side.

``kernel[grid](**arguments)`` binds, classifies and hashes some fifty arguments on every call: more time than most
of our kernels take on short sequences. What a compiled kernel depends on is known here: constants, and which
tensors there are, of which dtype, at which alignment (no integer is specialised, see ``states.VARYING``).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from operator import itemgetter

import torch
import triton

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, on CPU tensors: ``TRITON_INTERPRET=1`` when Triton was imported."""


class _Names:
    """What a kernel names: all its arguments, its constants, and where its pointers stand among all."""

    def __init__(self, kernel, arguments: dict) -> None:
        names = kernel.arg_names
        constant = {p.name for p in kernel.params if p.is_constexpr}
        self.all = itemgetter(*names)
        self.constants = itemgetter(*[name for name in names if name in constant])
        self.pointers = [
            i for i, n in enumerate(names) if n not in constant and not isinstance(arguments[n], int | float)
        ]


_names: dict[int, _Names] = {}
_compiled: dict[tuple, triton.compiler.CompiledKernel] = {}
_ahead: ContextVar[list | None] = ContextVar("compiling_ahead", default=None)
_loading = threading.Lock()

THREADS = 8
"""That compile at most, side by side. Most of it happens outside Python and its lock."""


@contextlib.contextmanager
def compiling_ahead() -> Iterator[None]:
    """Inside, :func:`launch` runs nothing; what it was asked for is compiled when the block ends, and loaded onto the
    current device. Blocks inside such a block leave it to the outermost.

    A kernel takes a core for a second or two, and a training step has some twenty. One that does not compile says so
    when it is launched.
    """
    if is_compiling_ahead():
        yield
        return
    made: list = []
    before = _ahead.set(made)
    try:
        if INTERPRETED:
            yield
            return
        with ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0)))) as pool:
            try:
                with triton.AsyncCompileMode(pool, ignore_errors=True):
                    yield
            finally:  # Triton leaves its mode only after a wait that ended well: an interrupt would be the last of it
                triton.runtime._async_compile.active_mode.set(None)
            _load(made, pool)
    finally:
        _ahead.reset(before)


def is_compiling_ahead() -> bool:
    return _ahead.get() is not None


def _load(made: list, pool: ThreadPoolExecutor) -> None:
    """Kernels onto the device, with the launchers in C that some versions of Triton compile for them.

    Those are modules of one name, and of two that are loaded at a time one has got the other's function. So they are
    compiled side by side into Triton's cache on disk, what was loaded with that is forgotten, and those that count are
    loaded one by one.
    """
    finished = [kernel.result(ignore_errors=True) if hasattr(kernel, "result") else kernel for kernel in made]
    kernels = list({id(kernel): kernel for kernel in finished if kernel is not None}.values())

    def launcher(kernel) -> None:
        with contextlib.suppress(Exception):  # if it is one that matters, loading raises it
            triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)

    list(pool.map(launcher, kernels))
    with _loading:
        for kernel in kernels:
            _ = kernel.run


def launch(kernel, programs: int, arguments: dict, *, warps: int, stages: int, registers: int | None = None) -> None:
    """Run ``programs`` programs of a kernel; of ``arguments``, constants too, it takes those that it names.

    ``registers`` bounds those of a thread, so that more programs run at a time. How a kernel is compiled must follow
    from its constants: another choice of warps, stages or registers for the same ones finds what was compiled first.
    """
    ahead = _ahead.get()
    if INTERPRETED:
        if ahead is None:
            kernel[(programs,)](*[arguments[name] for name in kernel.arg_names])
        return
    number = id(kernel)
    names = _names.get(number)
    if names is None:
        names = _names[number] = _Names(kernel, arguments)
    ordered = list(names.all(arguments))
    kinds = []
    for i in names.pointers:
        x = ordered[i]
        if x is None:
            kinds.append(None)
            continue
        address = x.data_ptr()
        kinds.append(x.dtype if address % 16 == 0 else (x.dtype, "unaligned"))
        ordered[i] = address  # the launcher asks the driver about a tensor, but takes an address as it is
    key = (number, torch.cuda.current_device(), names.constants(arguments), *kinds)
    compiled = _compiled.get(key)
    if compiled is not None:
        if ahead is None:
            compiled[(programs, 1, 1)](*ordered)
        return
    options = {"num_warps": warps, "num_stages": stages} | ({} if registers is None else {"maxnreg": registers})
    if ahead is not None:
        ahead.append(kernel.warmup(*names.all(arguments), grid=(programs,), **options))
    else:
        with _loading:
            _compiled[key] = kernel[(programs,)](*names.all(arguments), **options)
