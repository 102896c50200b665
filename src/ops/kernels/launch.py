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
_constants: dict[object, tuple[str, ...]] = {}


def launch(kernel, programs: int, arguments: dict, *, warps: int, stages: int) -> None:
    """Run ``programs`` programs of a kernel; of ``arguments``, constants too, it takes those that it names."""
    ordered = [arguments[name] for name in kernel.arg_names]
    if INTERPRETED:
        kernel[(programs,)](*ordered)
        return
    names = _constants.get(kernel)
    if names is None:
        names = _constants[kernel] = tuple(p.name for p in kernel.params if p.is_constexpr)
    key = (
        kernel,
        warps,
        stages,
        torch.cuda.current_device(),
        *[arguments[name] for name in names],
        *[(x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else x is None for x in ordered],
    )
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = kernel[(programs,)](*ordered, num_warps=warps, num_stages=stages)
        _compiled[key] = compiled
        return
    compiled[(programs, 1, 1)](*ordered)
