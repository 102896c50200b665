"""Before kernels are trusted on a machine: one small problem against fp64, for each kind of call, once a process.

Compilers have returned wrong gradients without a word (``docs/kernels.md`` has the list). Kernels are checked where
and as they are used: same device, dtype, head dims, packing. It takes a few milliseconds, compilation aside, which
the call itself would need anyway.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable

import torch
import triton
from torch import Tensor

from src.ops.checks import KernelError
from src.ops.kernels.launch import INTERPRETED
from src.ops.reference import parallel

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Relative errors above are wrong, not rounded: sound kernels stay ten times below."""

_checked: set[tuple] = set()


def ensure(kind: tuple, run: Callable[[], dict[str, float]], dtype: torch.dtype) -> None:
    """Raise :class:`KernelError` unless ``run``'s errors are in bounds; once for each ``kind`` of call."""
    if INTERPRETED or kind in _checked or torch.cuda.is_current_stream_capturing():
        return
    _checked.add(kind)  # before it runs, since it makes such a call itself
    errors = run()
    worst = max(errors, key=lambda name: -1.0 if errors[name] <= BOUNDS[dtype] else errors[name])
    if not errors[worst] <= BOUNDS[dtype]:
        _checked.discard(kind)
        raise KernelError(
            f"wrong {worst} (relative error {errors[worst]:.1e}) from kernels compiled by {compiler()} for "
            f"{torch.cuda.get_device_name()}: choose backend='torch' (mixer.backend=torch), or point "
            "TRITON_PTXAS_PATH to a newer ptxas, or install another Triton"
        )


def compiler() -> str:
    """Triton and the ptxas that it calls, with their versions."""
    given = os.environ.get("TRITON_PTXAS_PATH")
    path = given or shutil.which("ptxas", path=os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin"))
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
        version = said.split("release")[-1].split(",")[-1].split()[0].lstrip("V")
    except (OSError, TypeError, IndexError, subprocess.CalledProcessError):
        version = "of unknown version"
    return f"Triton {triton.__version__} with ptxas {version}" + (" (TRITON_PTXAS_PATH)" if given else "")


def problem(T: int, K: int, V: int, L: int | None, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Arguments ``q, k, v, g`` (and ``scales``) of two heads, the same in every process."""
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, T, 1, K, generator=draw) for _ in range(2))
    v = torch.randn(1, T, 2, V, generator=draw)
    g = -0.1 * torch.rand(1, T, 2, generator=draw)
    made = {"q": q.to(dtype), "k": (k / K**0.5).to(dtype), "v": v.to(dtype), "g": g}
    if L is not None:
        made["scales"] = torch.rand(1, T, 2, L, generator=draw)
    return {name: x.to(device) for name, x in made.items()}


def errors_of(run: Callable, given: dict[str, Tensor], cu_seqlens: Tensor | None, gradients: bool) -> dict[str, float]:
    """Relative errors of ``run(q, k, v, g, scales, cu_seqlens)`` against fp64, output and gradients."""
    with torch.enable_grad():
        tensors = {name: x.detach().requires_grad_(gradients) for name, x in given.items()}
        exact = {name: x.detach().double().requires_grad_(gradients) for name, x in given.items()}
        o = run(*(tensors.get(name) for name in ("q", "k", "v", "g", "scales")), cu_seqlens)
        scales = {"level_scales": exact["scales"]} if "scales" in exact else {}
        rest = {name: x for name, x in exact.items() if name != "scales"}
        reference = parallel(**rest, **scales, cu_seqlens=cu_seqlens)
        errors = {"output": _error(o, reference)}
        if gradients:
            weight = torch.cos(torch.arange(o.numel(), device=o.device)).view_as(o).to(o.dtype)
            got = torch.autograd.grad(o, list(tensors.values()), weight)
            expected = torch.autograd.grad(reference, list(exact.values()), weight.double())
            for name, a, b in zip(tensors, got, expected, strict=True):
                errors[f"gradient of {'level_scales' if name == 'scales' else name}"] = _error(a, b)
    return {name: float(x) for name, x in errors.items()}


def _error(x: Tensor, reference: Tensor) -> Tensor:
    return (x.detach().double() - reference.detach()).norm() / reference.detach().norm()
