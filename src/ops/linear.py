"""The four recurrent operators as users call them: checks, then the backend."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.autograd import forward_ad

from src.ops.checks import check_recurrent, check_state, check_state_tensor
from src.ops.chunked import chunked
from src.ops.state import LinearState, LogLinearState

HAS_TRITON = find_spec("triton") is not None
"""Asked once: ``torch.compile`` cannot trace the question (torch 2.11)."""


def ssd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float = 1.0,
    initial_state: LinearState | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, LinearState | None]:
    """Linear attention with a scalar decay (Mamba-2): ``S_t = exp(g_t) S_{t-1} + k_t v_t^T``, ``o_t = q_t^T S_t``.

    A Mamba-2 mixer passes ``q = C``, ``k = B``, ``v = x dt`` and ``g = A dt``. Contract: ``src/ops/__init__.py``.
    """
    return _run(q, k, v, g, None, None, scale, initial_state, return_state, cu_seqlens, backend)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float = 1.0,
    initial_state: LinearState | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, LinearState | None]:
    """``S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T``, ``o_t = q_t^T S_t``.

    Each write first takes away what the memory holds at that key: all of it where ``beta |k|^2`` is 1, and more than
    there is where it is above. From 2 on a memory may grow without bound; past what fp32 holds it is inf or NaN, with
    either backend and without an error, since to look would be to wait for the device. Contract:
    ``src/ops/__init__.py``.
    """
    _given(beta=beta)
    return _run(q, k, v, g, beta, None, scale, initial_state, return_state, cu_seqlens, backend)


def loglinear_ssd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    level_scales: Tensor,
    *,
    scale: float = 1.0,
    initial_state: LogLinearState | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, LogLinearState | None]:
    """Log-linear Mamba-2: :func:`ssd` with one state a Fenwick level, ``o_t = sum_l lambda_{t,l} q_t^T S_{t,l}``.

    Contract: ``src/ops/__init__.py``. O(T log T) time; the state of a sequence is O(log T) matrices.
    """
    _given(level_scales=level_scales)
    return _run(q, k, v, g, None, level_scales, scale, initial_state, return_state, cu_seqlens, backend)


def loglinear_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    level_scales: Tensor,
    *,
    scale: float = 1.0,
    initial_state: LogLinearState | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, LogLinearState | None]:
    """Log-linear Gated DeltaNet: :func:`gated_delta_rule` with one state a Fenwick level.

    Contract: ``src/ops/__init__.py``. O(T log T) time; the state of a sequence is O(log T) matrices.
    """
    _given(beta=beta, level_scales=level_scales)
    return _run(q, k, v, g, beta, level_scales, scale, initial_state, return_state, cu_seqlens, backend)


def _given(**tensors: Tensor | None) -> None:
    """Without them it would be another operator."""
    for name, x in tensors.items():
        if x is None:
            raise ValueError(f"{name} must be a tensor, got None")


def _run(q, k, v, g, beta, level_scales, scale, initial_state, return_state, cu_seqlens, backend):
    check_recurrent(q, k, v, g, beta, level_scales, cu_seqlens, backend)
    H, V = v.shape[2:]
    documents = v.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    kind = LinearState if level_scales is None else LogLinearState
    check_state(initial_state, kind, documents, v)
    if isinstance(initial_state, LinearState):
        check_state_tensor("memory", initial_state.memory, (H, q.shape[-1], V))
    elif initial_state is not None:
        check_state_tensor("levels", initial_state.levels, (H, q.shape[-1], V))
        check_state_tensor("k", initial_state.k, tuple(q.shape[2:]))
        if (initial_state.beta is None) != (beta is None):
            raise ValueError("initial_state must come from the same operator, got one of the other family")
    missing = _without_kernels(v)
    if backend == "triton" and missing:
        raise ValueError(f"backend='triton' {missing}; use 'torch' or 'auto'")
    call = {
        "scale": float(scale),
        "initial_state": initial_state,
        "return_state": return_state,
        "cu_seqlens": cu_seqlens,
    }
    # Autocast would turn the fp32 products inside into bf16 ones.
    with torch.autocast(v.device.type, enabled=False):
        if backend == "triton" or (backend == "auto" and v.is_cuda and not missing):
            from src.ops.kernels.call import run  # here, because it imports Triton

            return run(q, k, v, g, beta, level_scales, **call)
        return chunked(q, k, v, g, beta, level_scales, **call)


def _without_kernels(v: Tensor) -> str:
    """Why a call cannot go to Triton; empty if it can."""
    if v.dtype == torch.float64:
        return "computes in fp32: it takes float32 and bfloat16, got float64"
    if forward_ad._current_level >= 0:
        return "has no forward-mode derivatives"
    if not HAS_TRITON:
        return "needs the package triton"
    if v.is_cuda:
        return ""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs a CUDA device (or TRITON_INTERPRET=1, to interpret kernels slowly in float32), got {v.device}"
    if v.dtype != torch.float32:
        return "interprets float32 only (the interpreter's bfloat16 products are wrong), got bfloat16"
    return ""
