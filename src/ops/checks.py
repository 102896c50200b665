"""Argument checks that all operators share: ``ValueError`` names the argument, what was expected, what came.

Checks of values that live on a GPU would synchronise, so ``cu_seqlens`` is read on the CPU only; kernels that
take it trust the loader that made it.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float64)
BACKENDS = ("auto", "torch", "triton")


class KernelError(RuntimeError):
    """Compiled kernels give wrong values on this machine; the message says which compiler, and what to do."""


def check_shape(name: str, x: Tensor, axes: str, **sizes: int | None) -> None:
    """``x`` has the axes named by ``axes`` (such as "B T H"), with the sizes given for some of them."""
    names = axes.split()
    expected = [sizes.get(axis) for axis in names]
    fits = x.ndim == len(names) and all(want in (None, have) for want, have in zip(expected, x.shape, strict=False))
    if not fits:
        wanted = ", ".join(
            axis if size is None else f"{axis}={size}" for axis, size in zip(names, expected, strict=True)
        )
        raise ValueError(f"{name} must have shape [{wanted}], got {list(x.shape)}")


def check_same(name: str, x: Tensor, other_name: str, other: Tensor, dtype: bool = True) -> None:
    """Same device, and same dtype unless ``dtype`` is False."""
    if x.device != other.device:
        raise ValueError(f"{name} must be on the device of {other_name}, {other.device}, got {x.device}")
    if dtype and x.dtype != other.dtype:
        raise ValueError(f"{name} must have the dtype of {other_name}, {other.dtype}, got {x.dtype}")


def check_float(name: str, x: Tensor) -> None:
    if x.dtype not in FLOATS:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in FLOATS)
        raise ValueError(f"{name} must be one of {allowed}, got {str(x.dtype).removeprefix('torch.')}")


def check_length(seq_len: int, cu_seqlens: Tensor | None) -> None:
    if seq_len < 1:
        raise ValueError(f"sequences must have at least one token, got T={seq_len}")


def check_cu_seqlens(cu_seqlens: Tensor | None, x: Tensor, name: str) -> None:
    """``x [1, T, …]`` is one packed row, cut at ``cu_seqlens`` from 0 to T, never falling."""
    if cu_seqlens is None:
        return
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(
            "cu_seqlens must be a vector of at least two int32 or int64, "
            f"got {str(cu_seqlens.dtype).removeprefix('torch.')} {list(cu_seqlens.shape)}"
        )
    if x.shape[0] != 1:
        raise ValueError(f"{name} must be one packed row (B=1) where cu_seqlens is given, got B={x.shape[0]}")
    if cu_seqlens.device != x.device:
        raise ValueError(f"cu_seqlens must be on the device of {name}, {x.device}, got {cu_seqlens.device}")
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != x.shape[1]:
        raise ValueError(
            f"cu_seqlens must go from 0 to T={x.shape[1]}, got {int(cu_seqlens[0])} … {int(cu_seqlens[-1])}"
        )
    if bool((cu_seqlens.diff() < 0).any()):
        raise ValueError(f"cu_seqlens must never fall, got {cu_seqlens.tolist()}")


def check_state(state: object, kind: type, documents: int, x: Tensor) -> None:
    """``state`` is of the right class, has this many rows, and is on the device of ``x``."""
    if state is None:
        return
    if not isinstance(state, kind):
        raise ValueError(f"initial_state must be a {kind.__name__}, got {type(state).__name__}")
    if len(state.positions) != documents:
        raise ValueError(f"initial_state must have {documents} rows or documents, got {len(state.positions)}")
    if state.positions.device != x.device:
        raise ValueError(f"initial_state must be on {x.device}, got {state.positions.device}")


def check_state_tensor(name: str, x: Tensor, tail: tuple[int, ...]) -> None:
    """The last axes of a tensor in a state."""
    if tuple(x.shape[-len(tail) :]) != tail:
        raise ValueError(f"initial_state.{name} must end in {list(tail)}, got {list(x.shape)}")


def check_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    level_scales: Tensor | None,
    cu_seqlens: Tensor | None,
    backend: str,
) -> None:
    """The arguments of the four recurrent operators."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    check_shape("v", v, "B T H V")
    check_float("v", v)
    B, T, H, V = v.shape
    if B < 1:
        raise ValueError("v must have at least one row, got B=0")
    check_shape("q", q, "B T G K", B=B, T=T)
    G, K = q.shape[2:]
    check_shape("k", k, "B T G K", B=B, T=T, G=G, K=K)
    check_same("q", q, "v", v)
    check_same("k", k, "v", v)
    if G < 1 or H % G:
        raise ValueError(f"q and k must have a number of groups G that divides the heads H={H} of v, got G={G}")
    if K % 16 or not 16 <= K <= 256:
        raise ValueError(f"q and k must have a head dim K that is a multiple of 16 up to 256, got K={K}")
    if V % 16 or not 16 <= V <= 512:
        raise ValueError(f"v must have a head dim V that is a multiple of 16 up to 512, got V={V}")
    for name, x in (("g", g), ("beta", beta)):
        if x is not None:
            check_shape(name, x, "B T H", B=B, T=T, H=H)
            check_float(name, x)
            check_same(name, x, "v", v, dtype=False)
    if level_scales is not None:
        check_shape("level_scales", level_scales, "B T H L", B=B, T=T, H=H)
        check_float("level_scales", level_scales)
        check_same("level_scales", level_scales, "v", v, dtype=False)
        if level_scales.shape[-1] < 1:
            raise ValueError("level_scales must have at least one level, got L=0")
    check_length(T, cu_seqlens)
    check_cu_seqlens(cu_seqlens, v, "v")
