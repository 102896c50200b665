"""Launch a kernel without looking up its specialisation each time.

``kernel[grid](**arguments)`` binds, classifies and hashes some fifty arguments on every call: more time than most
of our kernels take on short sequences. What a compiled kernel depends on is known here: constants, and which
tensors there are, of which dtype, at which alignment (no integer is specialised, see ``states.VARYING``).
"""

from __future__ import annotations

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


def launch(kernel, programs: int, arguments: dict, *, warps: int, stages: int, registers: int | None = None) -> None:
    """Run ``programs`` programs of a kernel; of ``arguments``, constants too, it takes those that it names.

    ``registers`` bounds those of a thread, so that more programs run at a time. How a kernel is compiled must follow
    from its constants: another choice of warps, stages or registers for the same ones finds what was compiled first.
    """
    if INTERPRETED:
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
        compiled[(programs, 1, 1)](*ordered)
        return
    options = {} if registers is None else {"maxnreg": registers}
    _compiled[key] = kernel[(programs,)](*names.all(arguments), num_warps=warps, num_stages=stages, **options)
