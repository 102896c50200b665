r"""One token of ``gated_delta_rule`` and ``loglinear_gated_delta_rule``: one kernel launch, for CUDA graphs.

As ``decode.py``, which see for what programs, clocks and buffers are; here transitions are matrices.

Linear: ``S <- exp(g) (I - beta k k^T) S + beta k v^T``, ``o = scale q^T S``.

Log-linear, at position ``t`` with ``r = t mod 64`` and ``c = t div 64``, ``G_i`` the running sum of ``g`` inside the
chunk (buffer entries ``0..r-1``, then the new token) and ``S_j`` the levels of the state. The query goes back through
the chunk and loses what each key takes from it, ``y = scale q`` at first::

    for s = r, ..., 0:      P_s = beta_s (k_s . y)      y <- y - P_s k_s

    o = sum_{s<=r} lambda_{bit_length(r ^ s)} exp(G_r - G_s) P_s v_s  +  exp(G_r) y^T sum_{bit j of c} lambda_{7+j} S_j

Each step waits for a sum over K. Two keys are taken a step, since what they have in common needs no waiting; and all
the buffer is read once for that, side by side, so that the steps find it in the cache.

The 64th token of a chunk folds it, with ``T = (I + strictly_lower(diag(beta) k k^T))^{-1} diag(beta)`` of its keys: a
binary increment of ``c`` with ``z`` trailing ones, then the chunk's transition, for each level that is live then::

    S_z <- sum_{j<z} S_j      S_j <- 0 for j < z
    S_j <- exp(G_63) S_j + k^T T (W - exp(G_63) k S_j)      W = diag(exp(G_63 - G)) v for j = z, 0 for the others
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, library

from src.ops.kernels.decode import (
    CHUNK,
    COLUMNS,
    launch_step,
    program,
    returned,
    scales_of,
    sum_of_levels,
    writable,
)
from src.ops.kernels.tiles import decay, product, unit_inverse
from src.ops.state import LinearState, LogLinearState

KEYS = tl.constexpr(64)
"""Of K, at once when a chunk is folded: more would not fit where K is 256."""
PRECISION = tl.constexpr("tf32x3")
"""Of products: what is solved is kept in fp32 whatever the inputs are."""
LEAST = 128
"""Of ``BK``: gives a program four warps, without which the fold's 64 x 64 squares would not fit into registers."""


@triton.jit(do_not_specialize=["q_row", "k_row", "v_row", "g_row", "beta_row", "scale"])
def _linear(
    q,
    k,
    v,
    g,
    beta,
    memory,
    positions,
    o,
    q_row,
    k_row,
    v_row,
    g_row,
    beta_row,
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
    beta_t = tl.load(beta + n * beta_row + h).to(tl.float32)

    S = decay(g_t) * S
    write = beta_t * (v_t - tl.sum(k_t[:, None] * S, 0))
    S += k_t[:, None] * write[None, :]
    o_t = scale * tl.sum(q_t[:, None] * S, 0)
    tl.store(o + (n * H + h) * V + columns, o_t)
    tl.debug_barrier()
    tl.store(place, S, mask=(rows < K)[:, None])
    if (h == 0) & (block == 0):
        tl.store(positions + n, tl.load(positions + n) + 1)


@triton.jit(do_not_specialize=["N", "J", "L", "q_row", "k_row", "v_row", "g_row", "beta_row", "l_row", "scale"])
def _loglinear(
    q,
    k,
    v,
    g,
    beta,
    level_scales,
    levels,
    k_buffer,
    v_buffer,
    g_buffer,
    beta_buffer,
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
    beta_row,
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
    k += n * k_row + group * K
    k_t = tl.load(k + rows, mask=rows < K, other=0)
    v_t = tl.load(v + n * v_row + h * V + columns)
    g_t = tl.load(g + n * g_row + h)
    beta_t = tl.load(beta + n * beta_row + h)
    level_scales += n * l_row + h * L
    r, c = (t % CHUNK).to(tl.int32), t // CHUNK
    k_buffer += (n * (CHUNK - 1) * G + group) * K
    v_buffer += (n * (CHUNK - 1) * H + h) * V
    g_buffer += n * (CHUNK - 1) * H + h
    beta_buffer += n * (CHUNK - 1) * H + h

    # The buffer: loads first, so that they travel together.
    i, pair = tl.arange(0, CHUNK), tl.arange(0, CHUNK // 2)
    k_place = k_buffer + pair[:, None] * (2 * G * K) + rows[None, :]
    inside = (rows < K)[None, :]
    k_even = tl.load(k_place, mask=(2 * pair < r)[:, None] & inside, other=0)
    k_odd = tl.load(k_place + G * K, mask=(2 * pair + 1 < r)[:, None] & inside, other=0)
    v_i = tl.load(v_buffer + i[:, None] * (H * V) + columns[None, :], mask=(i < r)[:, None], other=0)
    g_i = tl.load(g_buffer + i * H, mask=i < r, other=0).to(tl.float32)
    g_next = tl.load(g_buffer + (i + 1) * H, mask=i + 1 < r, other=0).to(tl.float32)
    weight = scales_of(level_scales, i, r, L)
    own_weight = tl.load(level_scales).to(tl.float32)

    # The levels, summed before the query reads them: it does so last, and their loads need not wait for that.
    first_row = levels + (n * H + h) * (K * V) + columns[None, :]
    place = first_row + rows[:, None] * V
    S = sum_of_levels(place, (rows < K)[:, None], level_scales, c, J, L, N, H, K, V, BK)

    # Back through the chunk, the new token first. Every warp has a copy of y, and sums without asking the others: there
    # are so many that a copy's threads, with the 16 bytes of keys that each loads, are within one.
    g_new, beta_new = g_t.to(tl.float32), beta_t.to(tl.float32)
    P_t = beta_new * tl.sum(q_t * k_t.to(tl.float32))
    COPIES: tl.constexpr = BK // (16 if k_t.dtype == tl.bfloat16 else 32)
    y = tl.reshape(q_t - P_t * k_t.to(tl.float32), [BK // 128, 1, 128])
    y = tl.broadcast_to(y, [BK // 128, COPIES, 128])
    common = tl.sum(k_even.to(tl.float32) * k_odd.to(tl.float32), 1)
    common = tl.reshape(tl.broadcast_to(common[None, :], [BK // 32, 32]), [BK // 128, 1, 128])
    common = tl.broadcast_to(common, [BK // 128, COPIES, 128])
    column = tl.arange(0, BK // 128)[:, None, None] * 128 + tl.arange(0, 128)[None, None, :]
    column += tl.arange(0, COPIES)[None, :, None] * 0
    P = tl.zeros([BK // 128, COPIES, 128], tl.float32)  # P_s in column s
    pairs = (r + 1) // 2
    for passed in range(0, pairs):
        s = 2 * (pairs - 1 - passed)
        second = s + 1 < r
        k_0 = tl.load(k_buffer + s * (G * K) + column, mask=column < K, other=0).to(tl.float32)
        k_1 = tl.load(k_buffer + (s + 1) * (G * K) + column, mask=(column < K) & second, other=0).to(tl.float32)
        beta_0 = tl.load(beta_buffer + s * H).to(tl.float32)
        beta_1 = tl.load(beta_buffer + (s + 1) * H, mask=second, other=0).to(tl.float32)
        both = _sums(tl.where(2 * column == s, common, 0.0))
        P_1 = beta_1 * _sums(k_1 * y)
        P_0 = beta_0 * (_sums(k_0 * y) - both * P_1)
        y -= P_1 * k_1 + P_0 * k_0
        P = tl.where(column == s, P_0, tl.where(column == s + 1, P_1, P))
    y_t = tl.reshape(tl.sum(y, 1), [BK]) / COPIES  # of equal numbers, a power of two of them: exact
    weight *= tl.sum(tl.reshape(tl.sum(P, 1), [BK // CHUNK, CHUNK]), 0) / COPIES

    # G_r - G_i, summed from i + 1 on: a difference of two running sums would cancel.
    weight *= decay(tl.cumsum(tl.where(i + 1 == r, g_new, g_next), reverse=True))
    total = decay(tl.sum(g_i) + g_new)
    o_t = total * tl.sum(y_t[:, None] * S, 0) + tl.sum(weight[:, None] * v_i.to(tl.float32), 0)
    o_t += own_weight * P_t * v_t.to(tl.float32)
    # Behind the last position that there is room for, the farthest tokens are lost: say so.
    o_t = tl.where((c >> J) != 0, float("nan"), o_t)
    tl.store(o + (n * H + h) * V + columns, o_t)

    tl.debug_barrier()
    if r < CHUNK - 1:
        # Other programs read this row's earlier places only, and the new token from the arguments.
        tl.store(v_buffer + r * (H * V) + columns, v_t)
        if block == 0:
            tl.store(g_buffer + r * H, g_t)
            tl.store(beta_buffer + r * H, beta_t)
            if h % (H // G) == 0:
                tl.store(k_buffer + r * (G * K) + rows, k_t, mask=rows < K)
    else:
        _carry(place, (rows < K)[:, None], c, J, N, H, K, V, BK)
        there = i < CHUNK - 1  # the last token of the chunk is not in the buffer
        values = tl.load(v_buffer + i[:, None] * (H * V) + columns[None, :], mask=there[:, None], other=0)
        values = tl.where(there[:, None], values.to(tl.float32), v_t.to(tl.float32)[None, :])
        beta_i = tl.load(beta_buffer + i * H, mask=there, other=0).to(tl.float32)
        beta_i = tl.where(there, beta_i, beta_new)
        T = _corrections(k_buffer, k, beta_i, G, K)
        g_next = tl.load(g_buffer + (i + 1) * H, mask=i + 1 < CHUNK - 1, other=0).to(tl.float32)
        g_next = tl.where(i + 1 == CHUNK - 1, g_new, g_next)
        W = product(T, decay(tl.cumsum(g_next, reverse=True))[:, None] * values, PRECISION)
        for j in range(0, J):
            if (((c + 1) >> j) & 1) != 0:
                own = ((c + 1) & ((1 << j) - 1)) == 0  # the lowest: where the chunk went
                offset = (c * 0 + j) * N * H * (K * V)  # c: 64 bits
                _transition(first_row + offset, k_buffer, k, T, tl.where(own, W, 0.0), total, G, K, V)

    tl.store(clock, t + 1)
    if (h == 0) & (block == 0):
        tl.store(positions + n, t + 1)


@triton.jit
def _sums(x):
    """Over the features ``[BK / 128, copies, 128]`` of each copy."""
    return tl.sum(tl.sum(x, 2), 0)[None, :, None]


@triton.jit
def _corrections(k_buffer, k_t, beta, G: tl.constexpr, K: tl.constexpr):
    """``T`` of a whole chunk."""
    squares = tl.zeros([CHUNK, CHUNK], tl.float32)
    for part in range(0, K, KEYS):
        k_i = _keys(k_buffer, k_t, part, G, K)
        squares += product(k_i, tl.trans(k_i), PRECISION)
    i = tl.arange(0, CHUNK)
    N = tl.where(i[:, None] > i[None, :], beta[:, None] * squares, 0.0)
    return unit_inverse(N, 6, PRECISION) * beta[None, :]


@triton.jit
def _keys(k_buffer, k_t, part, G: tl.constexpr, K: tl.constexpr):
    """A whole chunk's keys ``[64, 64]`` from feature ``part`` on; the last is not in the buffer."""
    i, rows = tl.arange(0, CHUNK), part + tl.arange(0, KEYS)
    there = (i < CHUNK - 1)[:, None]
    k_i = tl.load(k_buffer + i[:, None] * (G * K) + rows[None, :], mask=there & (rows < K)[None, :], other=0)
    last = tl.load(k_t + rows, mask=rows < K, other=0).to(tl.float32)
    return tl.where(there, k_i.to(tl.float32), last[None, :])


@triton.jit
def _carry(place, inside, c, J, N, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr):
    """``S_z <- sum_{j<z} S_j`` and ``S_j <- 0``, with ``z`` the trailing ones of ``c``."""
    S = tl.zeros([BK, COLUMNS], tl.float32)
    for j in range(0, J):
        if ((c + 1) & ((1 << j) - 1)) == 0:  # all lower bits of c are ones
            offset = (c * 0 + j) * N * H * (K * V)
            if ((c >> j) & 1) != 0:
                S += tl.load(place + offset, mask=inside, other=0).to(tl.float32)
                tl.debug_barrier()
                tl.store(place + offset, tl.zeros([BK, COLUMNS], tl.float32), mask=inside)
            else:
                tl.store(place + offset, S, mask=inside)
    tl.debug_barrier()  # before others of the program's threads read that


@triton.jit
def _transition(place, k_buffer, k_t, T, W, total, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """``S <- total S + k^T (W - total T k S)`` of the level whose first row is at ``place``."""
    rows = tl.arange(0, KEYS)
    seen = tl.zeros([CHUNK, COLUMNS], tl.float32)
    for part in range(0, K, KEYS):
        S = tl.load(place + (part + rows)[:, None] * V, mask=(part + rows < K)[:, None], other=0).to(tl.float32)
        seen += product(_keys(k_buffer, k_t, part, G, K), S, PRECISION)
    W -= total * product(T, seen, PRECISION)
    for part in range(0, K, KEYS):
        S = tl.load(place + (part + rows)[:, None] * V, mask=(part + rows < K)[:, None], other=0).to(tl.float32)
        S = total * S + product(tl.trans(_keys(k_buffer, k_t, part, G, K)), W, PRECISION)
        tl.debug_barrier()
        tl.store(place + (part + rows)[:, None] * V, S, mask=(part + rows < K)[:, None])


def step_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    level_scales: Tensor | None,
    state: LinearState | LogLinearState,
    scale: float,
) -> tuple[Tensor, LinearState | LogLinearState]:
    """One token of ``gated_delta_rule`` (``level_scales`` None, a LinearState) or of the log-linear form.

    As :func:`src.ops.kernels.decode.step`, with write strengths ``beta [N, 1, H]``: ``q, k [N, 1, G, K]``,
    ``v [N, 1, H, V]`` in fp32 or bf16, ``g [N, 1, H]``, ``level_scales [N, 1, H, L]``; gives ``o [N, 1, H, V]`` in v's
    dtype and the state after the token, the same object where it may be overwritten.
    """
    new = writable(state, k=k, v=v, g=g, beta=beta)
    if isinstance(new, LinearState):
        o = gated_delta_rule_step_(q, k, v, g, beta, new.memory, new.positions, scale)
    else:
        held = (new.levels, new.k, new.v, new.g, new.beta, new.positions, new.clocks)
        o = loglinear_gated_delta_rule_step_(q, k, v, g, beta, level_scales, *held, scale)
    return o, returned(new, state)


@library.custom_op("loglinear::gated_delta_rule_step_", mutates_args=("memory", "positions"))
def gated_delta_rule_step_(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, memory: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """:func:`step_delta` on the tensors of a linear state, which it overwrites."""
    return launch_step(_linear, (q, k, v, g, beta), (memory, positions), (), scale)


@library.custom_op(
    "loglinear::loglinear_gated_delta_rule_step_",
    mutates_args=("levels", "k_buffer", "v_buffer", "g_buffer", "beta_buffer", "positions", "clocks"),
)
def loglinear_gated_delta_rule_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    level_scales: Tensor,
    levels: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    g_buffer: Tensor,
    beta_buffer: Tensor,
    positions: Tensor,
    clocks: Tensor,
    scale: float,
) -> Tensor:
    """:func:`step_delta` on the tensors of a log-linear state, which it overwrites."""
    inputs = (q, k, v, g, beta, level_scales)
    state = (levels, k_buffer, v_buffer, g_buffer, beta_buffer, positions, clocks)
    sizes = (v.shape[0], levels.shape[0], level_scales.shape[-1])
    return launch_step(_loglinear, inputs, state, sizes, scale, LEAST)


@gated_delta_rule_step_.register_fake
def _(q, k, v, g, beta, memory, positions, scale):
    return v.new_empty(v.shape)


@loglinear_gated_delta_rule_step_.register_fake
def _(
    q,
    k,
    v,
    g,
    beta,
    level_scales,
    levels,
    k_buffer,
    v_buffer,
    g_buffer,
    beta_buffer,
    positions,
    clocks,
    scale,
):
    return v.new_empty(v.shape)
