r"""What queries read, and the gradients of reading.

    o_t  =  sum_{s in t's chunk} lambda_{t, level(t,s)} exp(G_t - G_s) P_ts v_s
          + lambda_t exp(G_t) sum_{s in the chunk before, of the same tile} Y_ts exp(-G_s) v_s
          + sum_j lambda_{t,j} exp(G_t) q~_t^T S_j

with ``P`` of chunks, ``Y`` and ``q~`` of tiles (``solve.py``), and ``S_j`` as the tile sees them (``chain.py``).
"""

import triton
import triton.language as tl

from src.ops.kernels.between import through
from src.ops.kernels.delta.chain import first_slot, popcount
from src.ops.kernels.delta.solve import chunk_at, tile_at, token_rows
from src.ops.kernels.states import VARYING
from src.ops.kernels.tiles import bit_of, decay, level_weights, product


@triton.jit(do_not_specialize=[*VARYING, "slots"])
def output(
    v, qs, attention, crossing, cums, columns, seen, seen_first, o,
    documents, first, N, T, tiles_a_row, tiles, tokens, heads, head0, H, L, slots,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr,
    BITS: tl.constexpr, PACKED: tl.constexpr, LOGLINEAR: tl.constexpr, MORE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a chunk, head and block of values."""
    C: tl.constexpr = 1 << BITS
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    part = pid % NV
    local_head, chunk, n, start, length, before, A, tile0, begin = chunk_at(
        pid // NV, heads, documents, first, N, T, tiles_a_row, P, BITS, PACKED
    )
    if begin >= length:
        return
    head = head0 + local_head
    line = local_head.to(tl.int64)
    rv = part * BV + tl.arange(0, BV)
    row = tl.arange(0, C)
    valid = row < length - begin
    base = start + begin
    at = line * tokens + base
    value = token_rows(v + (base * H + head) * V, row, valid, H * V, rv, V)
    P_ts = tl.load(attention + at * C + row[:, None] * C + row[None, :], mask=valid[:, None], other=0.0)
    G = tl.load(cums + at + row, mask=valid, other=0.0)
    weight = decay(G[:, None] - G[None, :])
    if LOGLINEAR:
        lams = columns + line * L * tokens + base
        weight *= level_weights(lams, tokens, row, valid, L, BITS)
    acc = product((P_ts * weight).to(value.dtype), value, PRECISION)
    if P == 1:
        if chunk & 1 == 1:
            whole_row = row < C
            Y = tl.load(crossing + (line * tiles + (chunk >> 1)) * (C * C) + row[:, None] * C + row[None, :])
            edge = tl.load(cums + at - 1)
            value = token_rows(v + ((base - C) * H + head) * V, row, whole_row, H * V, rv, V)
            value = (value * decay(edge - tl.load(cums + at - C + row))[:, None]).to(value.dtype)
            strength = decay(G - edge)
            if LOGLINEAR:
                index = tl.minimum(BITS + 1, L - 1).to(tl.int64)
                strength *= tl.load(lams + index * tokens + row, mask=valid, other=0.0).to(tl.float32)
            acc += strength[:, None] * product(Y, value, PRECISION)
    if MORE:
        rk = tl.arange(0, BK)
        reader = token_rows(qs + at * K, row, valid, K, rk, K)
        inner = (rk[:, None] < K) & (rv[None, :] < V)
        strength = tl.exp(G)
        slot = first_slot(A, tile0, n, before, seen_first, tiles_a_row, PACKED, LOGLINEAR)
        source = seen + (line * slots + slot) * (K * V) + rk[:, None] * V + rv[None, :]
        rest = A
        for _ in range(popcount(A) if LOGLINEAR else 1):
            weights = strength
            if LOGLINEAR:
                index = tl.minimum(BITS + P + 1 + bit_of(rest & -rest), L - 1).to(tl.int64)
                weights = strength * tl.load(lams + index * tokens + row, mask=valid, other=0.0).to(tl.float32)
                rest = rest & (rest - 1)
            S = tl.load(source, mask=inner, other=0.0)
            acc += weights[:, None] * product(reader, S, PRECISION)
            source += K * V
    to = o + (base * H + head) * V
    tl.store(
        to + row[:, None] * (H * V) + rv[None, :],
        acc.to(o.dtype.element_ty),
        mask=valid[:, None] & (rv[None, :] < V),
    )


@triton.jit(do_not_specialize=[*VARYING, "slots"])
def rows(
    do, qs, cums, columns, seen, seen_first, dqs, dcolumns, row_gates,
    documents, first, N, T, tiles_a_row, tiles, tokens, heads, head0, H, L, slots,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr,
    PACKED: tl.constexpr, LOGLINEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a chunk and head: what its queries read from states.

    With ``X_j = do S_j^T``: ``dq~ = sum_j lambda_j exp(G) X_j`` into ``dqs [heads, tokens, K]``, and ``dlambda_j =
    exp(G) <q~, X_j>`` into ``dcolumns [heads, L + 2, tokens]``, levels that share the last scale into line ``L``;
    ``row_gates [heads, tokens]``: ``sum_j lambda_j dlambda_j``.
    """
    C: tl.constexpr = 1 << BITS
    local_head, chunk, n, start, length, before, A, tile0, begin = chunk_at(
        tl.program_id(0), heads, documents, first, N, T, tiles_a_row, P, BITS, PACKED
    )
    if begin >= length:
        return
    line = local_head.to(tl.int64)
    rk = tl.arange(0, BK)
    row = tl.arange(0, C)
    valid = row < length - begin
    base = start + begin
    at = line * tokens + base
    reader = token_rows(qs + at * K, row, valid, K, rk, K)
    grads = do + (base * H + head0 + local_head) * V
    grad = token_rows(grads, row, valid, H * V, tl.arange(0, BV), V)
    strength = tl.exp(tl.load(cums + at + row, mask=valid, other=0.0))
    if LOGLINEAR:
        lams = columns + line * L * tokens + base
        dlams = dcolumns + line * (L + 2) * tokens + base
    acc = tl.zeros([C, BK], tl.float32)
    gates = tl.zeros([C], tl.float32)
    shared = tl.zeros([C], tl.float32)
    slot = first_slot(A, tile0, n, before, seen_first, tiles_a_row, PACKED, LOGLINEAR)
    source = seen + (line * slots + slot) * (K * V)
    rest = A
    for _ in range(popcount(A) if LOGLINEAR else 1):
        X = through(source, grads, grad, row, valid, H, C, K, V, BK, BV, PRECISION)
        weight = strength
        dlam = weight * tl.sum(reader * X, 1)
        if LOGLINEAR:
            index = BITS + P + 1 + bit_of(rest & -rest)
            lam = tl.load(lams + tl.minimum(index, L - 1).to(tl.int64) * tokens + row, mask=valid, other=0.0)
            if index < L - 1:
                tl.store(dlams + index.to(tl.int64) * tokens + row, dlam, mask=valid)
            else:
                shared += dlam
            weight *= lam.to(tl.float32)
            dlam *= lam.to(tl.float32)
            rest = rest & (rest - 1)
        gates += dlam
        acc += weight[:, None] * X
        source += K * V
    tl.store(row_gates + at + row, gates, mask=valid)
    if LOGLINEAR:
        tl.store(dlams + L.to(tl.int64) * tokens + row, shared, mask=valid)
    inner = valid[:, None] & (rk[None, :] < K)
    tl.store(dqs + at * K + row[:, None] * K + rk[None, :], acc.to(dqs.dtype.element_ty), mask=inner)


@triton.jit(do_not_specialize=[*VARYING, "slots"])
def reads_back(
    do, qs, cums, columns, after, seen_first,
    documents, first, N, T, tiles_a_row, tiles, tokens, heads, head0, H, L, slots,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
    BITS: tl.constexpr, PACKED: tl.constexpr, LOGLINEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a tile, head and block of values: what it reads of each state that it sees, ``E_j = sum_t
    lambda_{t,j} exp(G_t) q~_t do_t^T``, into the slots of ``after``."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    rv = pid % NV * BV + tl.arange(0, BV)
    local_head = (pid // NV) % heads
    tile = pid // (NV * heads)
    n, start, length, before, A, tile0, begin = tile_at(tile, documents, first, N, T, tiles_a_row, P, PACKED)
    if begin >= length:
        return
    line = local_head.to(tl.int64)
    rk = tl.arange(0, BK)
    row = tl.arange(0, R)
    valid = row < length - begin
    base = start + begin
    at = line * tokens + base
    reader = token_rows(qs + at * K, row, valid, K, rk, K)
    grad = token_rows(do + (base * H + head0 + local_head) * V, row, valid, H * V, rv, V)
    strength = tl.exp(tl.load(cums + at + row, mask=valid, other=0.0))
    if LOGLINEAR:
        lams = columns + line * L * tokens + base
    inner = (rk[:, None] < K) & (rv[None, :] < V)
    slot = first_slot(A, tile0, n, before, seen_first, tiles_a_row, PACKED, LOGLINEAR)
    place = after + (line * slots + slot) * (K * V) + rk[:, None] * V + rv[None, :]
    rest = A
    for _ in range(popcount(A) if LOGLINEAR else 1):
        weights = strength
        if LOGLINEAR:
            index = tl.minimum(BITS + P + 1 + bit_of(rest & -rest), L - 1).to(tl.int64)
            weights = strength * tl.load(lams + index * tokens + row, mask=valid, other=0.0).to(tl.float32)
            rest = rest & (rest - 1)
        E = product(tl.trans(reader), (grad * weights[:, None]).to(reader.dtype), PRECISION)
        tl.store(place, E.to(after.dtype.element_ty), mask=inner)
        place += K * V
