r"""One token of ``ssd`` and ``loglinear_ssd``: one kernel launch, for CUDA graphs.

Linear: ``S <- exp(g) S + k v^T``, ``o = scale q^T S``.

Log-linear, at position ``t`` with ``r = t mod 64`` and ``c = t div 64``, ``G_i`` the running sum of ``g`` inside
the chunk (buffer entries ``0..r-1``, then the new token) and ``S_j`` the levels of the state::

    o = scale ( lambda_0 (q.k) v  +  sum_{i<r} lambda_{bit_length(r ^ i)} exp(G_r - G_i) (q.k_i) v_i
                                  +  sum_{bit j of c} lambda_{7+j} exp(G_r) q^T S_j )

The token then goes to place ``r`` of the buffer. The 64th token of a chunk folds it instead, a binary increment
of ``c`` with ``z`` trailing ones::

    S_z <- sum_i exp(G_63 - G_i) k_i v_i^T + exp(G_63) sum_{j<z} S_j      S_j <- 0 for j < z
    S_j <- exp(G_63) S_j for the other live levels

A program has one row, one head and 16 of the ``V`` columns, and alone touches that part of the levels. Rows
may stand at different positions. Dead levels and places of the buffer that hold nothing are not read, so a token
costs what is live. Everything that is read at once is loaded at once (four levels; the whole buffer): at batch 1
a step is a handful of waits for memory, and each load that waits for the one before is another.

**Positions.** Nothing tells a program that the others have read their row's position, so none may advance it
under them: each keeps clocks of its own (``LogLinearState.clocks``), and the first one of a row writes ``positions``,
which no program reads. Threads of one program are another matter: a value may be held by several of them, so
there is a barrier between reading a place and writing it.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor, library

from src.ops.fenwick import CHUNK_BITS, CHUNK_LEVELS, CHUNK_SIZE
from src.ops.state import LinearState, LogLinearState

CHUNK = tl.constexpr(CHUNK_SIZE)
BITS = tl.constexpr(CHUNK_BITS)
LEVELS = tl.constexpr(CHUNK_LEVELS)
COLUMNS = tl.constexpr(16)
"""Of V, to a program and to a clock. Few, so that one sequence occupies the GPU; their rows are whole sectors."""
AT_ONCE = tl.constexpr(4)
"""Levels that are loaded at once."""
ANY = tl.constexpr(0b1111)
"""Bits of that many levels."""
FOLDED = tl.constexpr(4)
"""Tokens of the buffer that are multiplied at once when it is folded."""


@triton.jit
def program(heads: tl.constexpr, blocks: tl.constexpr):
    """Row, head and block of columns; on one axis, since the others end at 65,535."""
    pid = tl.program_id(0)
    return (pid // (heads * blocks)).to(tl.int64), pid // blocks % heads, pid % blocks


@triton.jit
def scales_of(level_scales, i, r, L):
    """Level scales at which token ``r`` of a chunk reads places ``i`` of the buffer; 0 where those hold nothing."""
    level = i * 0
    for bit in tl.static_range(BITS):
        level += ((r ^ i) >= (1 << bit)).to(tl.int32)
    return tl.load(level_scales + tl.minimum(level, L - 1), mask=i < r, other=0).to(tl.float32)


@triton.jit
def sum_of_levels(
    place, inside, level_scales, c, J, L, N, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr
):
    """``sum_{bit j of c} lambda_{7+j} S_j [BK, 16]``; ``place``: of level 0."""
    S = tl.zeros([BK, COLUMNS], tl.float32)
    for first in range(0, J, AT_ONCE):
        if ((c >> first) & ANY) != 0:
            j = first + tl.arange(0, AT_ONCE)
            live = (((c >> j) & 1) != 0) & (j < J)
            scale_j = tl.load(level_scales + tl.minimum(j + LEVELS, L - 1), mask=live, other=0).to(tl.float32)
            offset = j.to(tl.int64) * N * H * (K * V)
            S_j = tl.load(place[None] + offset[:, None, None], mask=inside[None] & live[:, None, None], other=0)
            S += tl.sum(scale_j[:, None, None] * S_j.to(tl.float32), 0)
    return S


@triton.jit(do_not_specialize=["q_row", "k_row", "v_row", "g_row", "scale"])
def _linear(
    q,
    k,
    v,
    g,
    memory,
    positions,
    o,
    q_row,
    k_row,
    v_row,
    g_row,
    scale,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
):
    n, h, block = program(H, V // COLUMNS)
    rows, columns = tl.arange(0, BK), block * COLUMNS + tl.arange(0, COLUMNS)
    place = memory + (n * H + h) * (K * V) + rows[:, None] * V + columns[None, :]
    S = tl.load(place, mask=(rows < K)[:, None], other=0).to(tl.float32)
    group = h // (H // G) * K
    q_t = tl.load(q + n * q_row + group + rows, mask=rows < K, other=0).to(tl.float32)
    k_t = tl.load(k + n * k_row + group + rows, mask=rows < K, other=0).to(tl.float32)
    v_t = tl.load(v + n * v_row + h * V + columns).to(tl.float32)
    g_t = tl.load(g + n * g_row + h).to(tl.float32)

    S = tl.exp(tl.minimum(g_t, 0.0)) * S + k_t[:, None] * v_t[None, :]
    o_t = scale * tl.sum(q_t[:, None] * S, 0)
    tl.store(o + (n * H + h) * V + columns, o_t)
    tl.debug_barrier()
    tl.store(place, S, mask=(rows < K)[:, None])
    if (h == 0) & (block == 0):
        tl.store(positions + n, tl.load(positions + n) + 1)


@triton.jit(do_not_specialize=["N", "J", "L", "q_row", "k_row", "v_row", "g_row", "l_row", "scale"])
def _loglinear(
    q,
    k,
    v,
    g,
    level_scales,
    levels,
    k_buffer,
    v_buffer,
    g_buffer,
    positions,
    clocks,
    o,
    N,
    J,
    L,
    q_row,
    k_row,
    v_row,
    g_row,
    l_row,
    scale,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
):
    n, h, block = program(H, V // COLUMNS)
    rows, columns = tl.arange(0, BK), block * COLUMNS + tl.arange(0, COLUMNS)
    group = h // (H // G)
    clock = clocks + tl.program_id(0)
    t = tl.load(clock)
    q_t = tl.load(q + n * q_row + group * K + rows, mask=rows < K, other=0).to(tl.float32) * scale
    k_t = tl.load(k + n * k_row + group * K + rows, mask=rows < K, other=0)
    v_t = tl.load(v + n * v_row + h * V + columns)
    g_t = tl.load(g + n * g_row + h)
    level_scales += n * l_row + h * L
    r, c = (t % CHUNK).to(tl.int32), t // CHUNK
    k_buffer += (n * (CHUNK - 1) * G + group) * K
    v_buffer += (n * (CHUNK - 1) * H + h) * V
    g_buffer += n * (CHUNK - 1) * H + h

    # The buffer: loads first, so that they travel together.
    i = tl.arange(0, CHUNK)
    k_i = tl.load(k_buffer + i[:, None] * (G * K) + rows[None, :], mask=(i < r)[:, None] & (rows < K), other=0)
    v_i = tl.load(v_buffer + i[:, None] * (H * V) + columns[None, :], mask=(i < r)[:, None], other=0)
    g_i = tl.load(g_buffer + i * H, mask=i < r, other=0).to(tl.float32)
    g_next = tl.load(g_buffer + (i + 1) * H, mask=i + 1 < r, other=0).to(tl.float32)
    weight = scales_of(level_scales, i, r, L)
    own_weight = tl.load(level_scales).to(tl.float32)

    # The levels, summed before q reads them.
    inside = (rows < K)[:, None]
    place = levels + (n * H + h) * (K * V) + rows[:, None] * V + columns[None, :]
    S = sum_of_levels(place, inside, level_scales, c, J, L, N, H, K, V, BK)

    # G_r - G_i, summed from i + 1 on: a difference of two running sums would cancel.
    g_new = g_t.to(tl.float32)
    decay = tl.exp(tl.minimum(tl.cumsum(tl.where(i + 1 == r, g_new, g_next), reverse=True), 0.0))
    weight *= decay * tl.sum(k_i.to(tl.float32) * q_t[None, :], 1)
    total = tl.exp(tl.minimum(tl.sum(g_i) + g_new, 0.0))
    o_t = total * tl.sum(q_t[:, None] * S, 0) + tl.sum(weight[:, None] * v_i.to(tl.float32), 0)
    o_t += own_weight * tl.sum(q_t * k_t.to(tl.float32)) * v_t.to(tl.float32)
    # Behind the last position that there is room for, the farthest tokens are lost: say so.
    o_t = tl.where((c >> J) != 0, float("nan"), o_t)
    tl.store(o + (n * H + h) * V + columns, o_t)

    tl.debug_barrier()
    if r < CHUNK - 1:
        # Other programs read this row's earlier places only, and the new token from the arguments.
        tl.store(v_buffer + r * (H * V) + columns, v_t)
        if block == 0:
            tl.store(g_buffer + r * H, g_t)
            if h % (H // G) == 0:
                tl.store(k_buffer + r * (G * K) + rows, k_t, mask=rows < K)
    else:
        S = _leaf(k_buffer, v_buffer, g_buffer, k_t, v_t, g_new, rows, columns, G, H, K, V)
        for j in range(0, J):
            carries = ((c + 1) & ((1 << j) - 1)) == 0  # all lower bits of c are ones: level j takes them in
            offset = (c * 0 + j) * N * H * (K * V)  # c: 64 bits
            if ((c >> j) & 1) != 0:
                old = total * tl.load(place + offset, mask=inside, other=0).to(tl.float32)
                S += tl.where(carries, old, 0.0)
                tl.debug_barrier()
                tl.store(place + offset, tl.where(carries, 0.0, old), mask=inside)
            elif carries:
                tl.store(place + offset, S, mask=inside)

    tl.store(clock, t + 1)
    if (h == 0) & (block == 0):
        tl.store(positions + n, t + 1)


@triton.jit
def _leaf(
    k_buffer,
    v_buffer,
    g_buffer,
    k_t,
    v_t,
    g_t,
    rows,
    columns,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """``sum_i exp(G_63 - G_i) k_i v_i^T`` over a whole chunk, whose last token is not in the buffer: last to first."""
    S = k_t.to(tl.float32)[:, None] * v_t.to(tl.float32)[None, :]
    since = g_t * 0
    for part in range(CHUNK // FOLDED):
        i = CHUNK - FOLDED - part * FOLDED + tl.arange(0, FOLDED)
        there = (i < CHUNK - 1)[:, None]
        k_i = tl.load(k_buffer + i[:, None] * (G * K) + rows[None, :], mask=there & (rows < K), other=0)
        v_i = tl.load(v_buffer + i[:, None] * (H * V) + columns[None, :], mask=there, other=0)
        g_next = tl.load(g_buffer + (i + 1) * H, mask=i + 1 < CHUNK - 1, other=0).to(tl.float32)
        g_next = tl.where(i + 1 == CHUNK - 1, g_t, g_next)
        decay = tl.exp(tl.minimum(since + tl.cumsum(g_next, reverse=True), 0.0))
        k_i = decay[:, None] * k_i.to(tl.float32)
        S += tl.sum(k_i[:, :, None] * v_i.to(tl.float32)[:, None, :], 0)
        since += tl.sum(g_next)
    return S


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    level_scales: Tensor | None,
    state: LinearState | LogLinearState,
    scale: float,
) -> tuple[Tensor, LinearState | LogLinearState]:
    """One token of ``ssd`` (``level_scales`` None, a LinearState) or ``loglinear_ssd`` (a LogLinearState).

    ``q, k [N, 1, G, K]``, ``v [N, 1, H, V]`` in fp32 or bf16, ``g [N, 1, H]``, ``level_scales [N, 1, H, L]``;
    gives ``o [N, 1, H, V]`` in v's dtype and the state after the token. Sums and memories in fp32; no autograd.
    A state that may be overwritten (``in_place``) is, and is returned; of another one a copy is made first.

    Shapes and devices are taken as checked. ValueError for fp64, and for tokens that a state that is overwritten
    would have to round.
    """
    new = writable(state, k=k, v=v, g=g)
    if isinstance(new, LinearState):
        o = ssd_step_(q, k, v, g, new.memory, new.positions, scale)
    else:
        held = (new.levels, new.k, new.v, new.g, new.positions, new.clocks)
        o = loglinear_ssd_step_(q, k, v, g, level_scales, *held, scale)
    return o, returned(new, state)


def writable(state: LinearState | LogLinearState, **tokens: Tensor) -> LinearState | LogLinearState:
    """What a step on ``state`` writes: the state itself or a copy; ``tokens``, by name, go to its buffers."""
    if tokens["v"].dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"v must be float32 or bfloat16 for the Triton backend, got {_name(tokens['v'].dtype)}")
    new = state if state.in_place else state.for_decoding(1)
    if isinstance(new, LinearState):
        return new
    for name, x in tokens.items():
        kept = getattr(new, name)
        if not state.in_place:
            setattr(new, name, kept.to(x.dtype))  # as the PyTorch operator does
        elif torch.promote_types(kept.dtype, x.dtype) != kept.dtype:
            # A buffer of another dtype in its place would be another buffer than the one that a graph captured.
            raise ValueError(f"{name} must be {_name(kept.dtype)} as in the initial_state, got {_name(x.dtype)}")
    return new


def returned(new: LinearState | LogLinearState, state: LinearState | LogLinearState) -> LinearState | LogLinearState:
    """What a step on ``state`` gives back, having written ``new``: a copy may not be overwritten."""
    if state.in_place:
        return new
    return replace(new, in_place=False, **({} if isinstance(new, LinearState) else {"clocks": None}))


@library.custom_op("loglinear::ssd_step_", mutates_args=("memory", "positions"))
def ssd_step_(q: Tensor, k: Tensor, v: Tensor, g: Tensor, memory: Tensor, positions: Tensor, scale: float) -> Tensor:
    """:func:`step` on the tensors of a linear state, which it overwrites."""
    return launch_step(_linear, (q, k, v, g), (memory, positions), (), scale)


@library.custom_op(
    "loglinear::loglinear_ssd_step_",
    mutates_args=("levels", "k_buffer", "v_buffer", "g_buffer", "positions", "clocks"),
)
def loglinear_ssd_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    level_scales: Tensor,
    levels: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    g_buffer: Tensor,
    positions: Tensor,
    clocks: Tensor,
    scale: float,
) -> Tensor:
    """:func:`step` on the tensors of a log-linear state, which it overwrites."""
    state = (levels, k_buffer, v_buffer, g_buffer, positions, clocks)
    sizes = (v.shape[0], levels.shape[0], level_scales.shape[-1])
    return launch_step(_loglinear, (q, k, v, g, level_scales), state, sizes, scale)


@ssd_step_.register_fake
def _(q, k, v, g, memory, positions, scale):
    return v.new_empty(v.shape)


@loglinear_ssd_step_.register_fake
def _(q, k, v, g, level_scales, levels, k_buffer, v_buffer, g_buffer, positions, clocks, scale):
    return v.new_empty(v.shape)


def launch_step(
    kernel,
    inputs: tuple[Tensor, ...],
    state: tuple[Tensor, ...],
    sizes: tuple[int, ...],
    scale: float,
    least: int = 16,
) -> Tensor:
    """Outputs of a kernel of this kind. ``inputs``: q, k, v and what else has one entry a row; ``least``: of ``BK``."""
    # Rows may lie apart, as in a part of a wider projection; what is inside a row may not.
    inputs = tuple(x if x[:1].is_contiguous() else x.contiguous() for x in inputs)
    if not all(x.is_contiguous() for x in state):
        raise ValueError("initial_state must have dense tensors, as those of for_decoding are")
    (N, _, H, V), (G, K) = inputs[2].shape, inputs[0].shape[2:]
    o = inputs[2].new_empty(N, 1, H, V)
    if not N:
        return o
    device = torch.cuda.device(o.device) if o.is_cuda else contextlib.nullcontext()
    BK = max(least, triton.next_power_of_2(K))
    warps = max(1, BK // 32)  # either large load then takes 64 registers of a thread at most
    with device:  # Triton launches on the current one
        kernel[(N * H * (V // COLUMNS.value),)](
            *inputs,
            *state,
            o,
            *sizes,
            *(x.stride(0) for x in inputs),
            float(scale),
            G=G,
            H=H,
            K=K,
            V=V,
            BK=BK,
            num_warps=warps,
            num_stages=1,  # what is read at once is written so
        )
    return o


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
