"""Launch a kernel without looking up its specialisation each time.

``kernel[grid](**arguments)`` binds, classifies and hashes some fifty arguments on every call: more time than most
of our kernels take on short sequences. What a compiled kernel depends on is known here: constants, and which
tensors there are, of which dtype, at which alignment (no integer is specialised, see ``states.VARYING``).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, on CPU tensors: ``TRITON_INTERPRET=1`` when Triton was imported."""

_compiled: dict[tuple, triton.compiler.CompiledKernel] = {}
_constants: dict[int, tuple[str, ...]] = {}


def launch(kernel, programs: int, arguments: dict, *, warps: int, stages: int, registers: int | None = None) -> None:
    """Run ``programs`` programs of a kernel; of ``arguments``, constants too, it takes those that it names.

    ``registers`` bounds those of a thread, so that more programs run at a time.
    """
    ordered = [arguments[name] for name in kernel.arg_names]
    if INTERPRETED:
        kernel[(programs,)](*ordered)
        return
    names = _constants.get(id(kernel))
    if names is None:
        names = _constants[id(kernel)] = tuple(p.name for p in kernel.params if p.is_constexpr)
    kinds = []
    for i, x in enumerate(ordered):
        if isinstance(x, Tensor):
            address = x.data_ptr()
            kinds.append((x.dtype, address % 16))
            ordered[i] = address  # the launcher asks the driver about a tensor, but takes an address as it is
        else:
            kinds.append(x is None)
    key = (id(kernel), torch.cuda.current_device(), *[arguments[name] for name in names], *kinds)
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[(programs, 1, 1)](*ordered)
        return
    options = {} if registers is None else {"maxnreg": registers}
    ordered = [arguments[name] for name in kernel.arg_names]
    _compiled[key] = kernel[(programs,)](*ordered, num_warps=warps, num_stages=stages, **options)
