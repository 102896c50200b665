"""Before kernels are trusted on a machine: one small problem against fp64, for each kind of call, once a process.

Compilers have returned wrong gradients without a word (``docs/kernels.md`` has the list). Kernels are checked where
and as they are used: same device, dtype, head dims, packing. It takes a few milliseconds, compilation aside, which
the call itself would need anyway and which is done here for all kernels side by side.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Callable

import torch
import triton
from torch import Tensor

from src.ops.checks import KernelError
from src.ops.chunks import document_of
from src.ops.fenwick import level_matrix
from src.ops.kernels.launch import INTERPRETED, compiling_ahead, is_compiling_ahead

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Relative errors above are wrong, not rounded: sound kernels stay several times below."""

_checked: set[tuple] = set()


def ensure(kind: tuple, run: Callable[[], dict[str, float]], dtype: torch.dtype) -> None:
    """Raise :class:`KernelError` unless ``run``'s errors are in bounds; once for each ``kind`` of call."""
    if INTERPRETED or kind in _checked or torch.cuda.is_current_stream_capturing():
        return
    if is_compiling_ahead():  # nothing is computed that could be checked
        return
    _checked.add(kind)  # before it runs, since it makes such a call itself
    try:
        errors = run()
    except BaseException:
        _checked.discard(kind)
        raise
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    if not errors[worst] <= BOUNDS[dtype]:
        _checked.discard(kind)
        raise KernelError(
            f"wrong {worst} (relative error {errors[worst]:.1e}) from kernels compiled by {compiler()} for "
            f"{torch.cuda.get_device_name()}: choose backend='torch' (mixer.backend=torch), or point "
            f"{_assembler()[1]} to a newer ptxas, or install another Triton"
        )


def compiler() -> str:
    """Triton and the ptxas that it calls, with their versions."""
    name, variable = _assembler()
    given = os.environ.get(variable)
    path = given or shutil.which(name, path=os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin"))
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
        version = said.split("release")[-1].split(",")[-1].split()[0].lstrip("V")
    except (OSError, TypeError, IndexError, subprocess.CalledProcessError):
        version = "of unknown version"
    return f"Triton {triton.__version__} with ptxas {version}" + (f" ({variable})" if given else "")


def _assembler() -> tuple[str, str]:
    """What Triton calls for the current device, and the variable that puts another in its place."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10:
        return "ptxas-blackwell", "TRITON_PTXAS_BLACKWELL_PATH"
    return "ptxas", "TRITON_PTXAS_PATH"


def problem(
    T: int, K: int, V: int, L: int | None, dtype: torch.dtype, device: torch.device,
    *, delta: bool = False, groups: int = 1, **dtypes: torch.dtype,
) -> dict[str, Tensor]:  # fmt: skip
    """Arguments ``q, k, v, g`` (``beta``, with delta, and ``scales``) of two heads in one q/k group or two, the same in
    every process; ``dtypes`` by name, where they are not fp32.

    One forgets within tens of tokens; in the other the first token reaches the last, so that a wrong tree shows.
    """
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, T, groups, K, generator=draw) for _ in range(2))
    v = torch.randn(1, T, 2, V, generator=draw)
    g = -torch.tensor([0.1, 0.003]) * torch.rand(1, T, 2, generator=draw)
    made = {"q": q.to(dtype), "k": (k / K**0.5).to(dtype), "v": v.to(dtype), "g": g}
    if delta:
        made["k"] = torch.nn.functional.normalize(k, dim=-1).to(dtype)
        made["beta"] = torch.rand(1, T, 2, generator=draw)
    if L is not None:
        made["scales"] = torch.rand(1, T, 2, L, generator=draw)
    return {name: x.to(device, dtypes.get(name)) for name, x in made.items()}


def exact(given: dict[str, Tensor], do: Tensor, cu_seqlens: Tensor | None) -> dict[str, Tensor]:
    """Output and gradients of a :func:`problem` in fp64, ``A = P * D * M`` as a whole square; ``P = q k^T``, and for
    the delta rule ``tril(q k^T) U diag(beta)`` with ``U = (I + strictly_lower(diag(beta) k k^T))^-1``.

    By hand: a check may run inside a backward pass, where autograd cannot be asked.
    """
    q, k, v, g, do = (x[0].double().transpose(0, 1) for x in (*(given[n] for n in ("q", "k", "v", "g")), do))
    T, device = v.shape[1], v.device
    token = torch.arange(T, device=device)
    lower = token[:, None] >= token
    start = torch.zeros(T, dtype=torch.int64, device=device)
    if cu_seqlens is not None:
        owner = document_of(token, cu_seqlens.long())
        lower &= owner[:, None] == owner
        start = cu_seqlens.long()[owner]
    G = g.cumsum(-1)
    D = torch.where(lower, (G[:, :, None] - G[:, None, :]).masked_fill(~lower, 0).exp(), 0)
    P = Z = torch.where(lower, q @ k.mT, 0)
    if "beta" in given:
        beta = given["beta"][0].double().T
        gram = torch.where(lower, k @ k.mT, 0).tril(-1)
        eye = torch.eye(T, dtype=torch.float64, device=device).expand(len(beta), T, T)
        U = torch.linalg.solve_triangular(beta[..., None] * gram, eye, upper=False, unitriangular=True)
        P = Z @ (U * beta[:, None])
    level = level_matrix(T, device) if cu_seqlens is None else _levels(token - start)
    M = torch.ones_like(D)
    if "scales" in given:
        scales = given["scales"][0].double().transpose(0, 1)
        level = level.clamp(max=scales.shape[-1] - 1).expand_as(D)
        M = scales.gather(-1, level)
    A = P * D * M
    dA = do @ v.mT
    dP = dZ = torch.where(lower, dA * D * M, 0)
    W = (dA * A).tril(-1)
    made = {"output": A @ v, "v": A.mT @ do}
    dk = 0
    if "beta" in given:
        dZ = torch.where(lower, dP @ (U * beta[:, None]).mT, 0)
        dT = Z.mT @ dP
        dN = -torch.where(lower, U.mT @ (dT * beta[:, None]) @ U.mT, 0).tril(-1)
        made["beta"] = (dT * U).sum(-2) + (dN * gram).sum(-1)
        dk = (beta[..., None] * dN) @ k + (beta[..., None] * dN).mT @ k
    made |= {"q": dZ @ k, "k": dZ.mT @ q + dk}
    for name in ("q", "k"):  # of heads that share one
        made[name] = made[name].unflatten(0, (len(q), -1)).sum(1)
    made["g"] = (W.sum(-1) - W.sum(-2)).flip(-1).cumsum(-1).flip(-1)
    if "scales" in given:
        made["scales"] = torch.zeros_like(scales).scatter_add_(-1, level, dA * P * D)
    return {name: x.transpose(0, 1)[None] for name, x in made.items()}


def _levels(position: Tensor) -> Tensor:
    """``bit_length(t XOR s)`` of all pairs."""
    differ = position[:, None] ^ position
    return (differ[..., None] >= 2 ** torch.arange(20, device=position.device)).sum(-1)


def errors(
    given: dict[str, Tensor], cu_seqlens: Tensor | None, forward: Callable, backward: Callable | None
) -> dict[str, float]:
    """Relative errors against fp64 of ``forward(given)`` and, if there is one, ``backward(do, given)``."""
    with torch.cuda.device_of(given["v"]), compiling_ahead():  # kernels are loaded for the current device
        o = forward(given)
        if backward is not None:
            backward(torch.zeros_like(o), given)
    o = forward(given)
    do = torch.cos(torch.arange(o.numel(), device=o.device)).view_as(o).to(o.dtype)
    reference = exact(given, do, cu_seqlens)
    made = {"output": o, **({} if backward is None else backward(do, given))}
    found = {}
    for name, x in made.items():
        error = (x.double() - reference[name]).norm() / reference[name].norm()
        found[name if name == "output" else f"gradient of {'level_scales' if name == 'scales' else name}"] = error
    return {name: float(x) for name, x in found.items()}
