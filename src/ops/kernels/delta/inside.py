r"""The backward pass inside tiles: through the products of ``join`` and ``solve``.

``squares_back`` and ``across`` undo ``join``, with ``Y = q~_2 k~_1^T``, which attends from the second chunk to the
first, and ``X = k~_1 k_2^T``,

    dY = (do_2 v_1^T) * m - dq~_2' k_1^T ,     dX = -dk~_1' k~_2^T ,
    dq~_2 = dq~_2' + dY k~_1 ,     dk~_1 = dk~_1' + dX k_2 + dY^T q~_2 ,     dk~_2 = dk~_2' - X^T dk~_1' ,

and what is left goes to ``k_1`` and ``k_2``. ``attention_back`` makes ``(do v^T) * m``, ``m`` the mask of levels and
decays, and ``solve_back`` undoes ``solve``: with ``U = (I + N)^-1``, so that ``T = U diag(beta)``, and scores ``Z =
tril(scale q k^T)``,

    dP = (do v^T) * m - dq~ k^T ,     dT = Z^T dP + k dk~^T ,     dZ = tril(dP T^T) ,
    dN = -strictly_lower(U^T (dT diag(beta)) U^T) ,     dbeta_s = sum_u dT_us U_us + sum_t dN_st (k k^T)_st ,
    dq = scale (dq~ + dZ k) ,     dk = dZ^T (scale q) - P^T dq~ + T dk~ + (W + W^T) k ,   W = diag(beta) dN .

Products with a transposed square on the left are made transposed from tokens loaded that way: a transposed accumulator
as an operand has come back wrong from a compiler (``docs/kernels.md``).
"""

import triton
import triton.language as tl

from src.ops.kernels.delta.solve import chunk_at, exact_left, exact_right, tile_at, token_rows
from src.ops.kernels.states import VARYING
from src.ops.kernels.tiles import decay, level_weights, product
from src.ops.kernels.within import level_gradients


@triton.jit
def token_columns(x, row, valid, stride, column, WIDTH: tl.constexpr):
    """As ``token_rows``, transposed: ``[columns, rows]``."""
    return tl.load(
        x + row[None, :] * stride + column[:, None], mask=valid[None, :] & (column[:, None] < WIDTH), other=0.0
    )


@triton.jit(do_not_specialize=VARYING)
def squares_back(
    k, v, do, ks, crossing, cums, columns, dqs, dks, dcrossing, doverlap, dv, dcolumns, gates,
    documents, first, N, T, tiles_a_row, tiles, tokens, heads, head0, H, per_group, L,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, KB: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr,
    PACKED: tl.constexpr, LOGLINEAR: tl.constexpr, MORE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a tile of two chunks and head: ``dcrossing, doverlap [heads, tiles, C, C]``, dY and dX, from ``dqs,
    dks`` of tiles (with MORE; else there are none, and no dX). ``dv`` is added to, ``gates[2]`` and line ``L + 1`` of
    ``dcolumns`` as in ``within.pairs``."""
    C: tl.constexpr = 1 << BITS
    pid = tl.program_id(0)
    local_head = pid % heads
    tile = pid // heads
    n, start, length, before, A, tile0, begin = tile_at(tile, documents, first, N, T, tiles_a_row, P, PACKED)
    if begin >= length:
        return
    head = head0 + local_head
    groups = H // per_group
    line = local_head.to(tl.int64)
    dtype = ks.dtype.element_ty
    row = tl.arange(0, C)
    valid = row < length - begin
    later = row < length - begin - C
    base = start + begin
    at = line * tokens + base
    square = (line * tiles + tile) * (C * C) + row[:, None] * C + row[None, :]

    dY = tl.zeros([C, C], tl.float32)
    if MORE:
        keys = k + (base * groups + head // per_group) * K
        dX = tl.zeros([C, C], tl.float32)
        for first_k in range(0, K, KB):
            column = first_k + tl.arange(0, KB)
            dreader = token_rows(dqs + (at + C) * K, row, later, K, column, K)
            key = token_rows(keys, row, valid, groups * K, column, K)
            dY -= product(dreader, tl.trans(key), PRECISION)
            dwriter = token_rows(dks + at * K, row, valid, K, column, K)
            writer = token_rows(ks + (at + C) * K, row, later, K, column, K)
            dX -= product(dwriter, tl.trans(writer), PRECISION)
        tl.store(doverlap + square, dX.to(dtype))

    dP = tl.zeros([C, C], tl.float32)
    values, grads = v + (base * H + head) * V, do + ((base + C) * H + head) * V
    for first_v in range(0, V, BV):
        rv = first_v + tl.arange(0, BV)
        grad = token_rows(grads, row, later, H * V, rv, V)
        dP += product(grad, tl.trans(token_rows(values, row, valid, H * V, rv, V)), PRECISION)
    edge = tl.load(cums + at + C - 1, mask=length - begin >= C, other=0.0)
    outgoing = decay(edge - tl.load(cums + at + row, mask=valid, other=0.0))
    incoming = decay(tl.load(cums + at + C + row, mask=later, other=0.0) - edge)
    Y = tl.load(crossing + square)
    dP *= outgoing[None, :]
    row_gates = incoming * tl.sum(Y * dP, 1)
    kind = heads.to(tl.int64) * tokens
    if LOGLINEAR:
        index = tl.minimum(BITS + 1, L - 1).to(tl.int64)
        lam = tl.load(columns + (line * L + index) * tokens + base + C + row, mask=later, other=0.0).to(tl.float32)
        own_line = tl.where(BITS + 1 < L - 1, BITS + 1, L + 1).to(tl.int64)
        tl.store(dcolumns + (line * (L + 2) + own_line) * tokens + base + C + row, row_gates, mask=later)
        row_gates *= lam
        incoming *= lam
    dP *= incoming[:, None]
    tl.store(gates + 2 * kind + at + C + row, row_gates, mask=later)
    tl.store(gates + 2 * kind + at + row, -tl.sum(Y * dP, 0), mask=valid)
    tl.store(dcrossing + square, (dY + dP).to(dtype))

    for first_v in range(0, V, BV):
        rv = first_v + tl.arange(0, BV)
        grad = token_columns(grads, row, later, H * V, rv, V)
        back = product((grad * incoming[None, :]).to(dtype), Y, PRECISION) * outgoing[None, :]
        outputs = dv + (base * H + head) * V + row[None, :] * (H * V) + rv[:, None]
        inner = valid[None, :] & (rv < V)[:, None]
        if MORE:
            back += tl.load(outputs, mask=inner, other=0.0).to(tl.float32)
        else:
            rest = later[None, :] & (rv < V)[:, None]
            tl.store(outputs + C * H * V, tl.zeros([BV, C], dv.dtype.element_ty), mask=rest)
        tl.store(outputs, back.to(dv.dtype.element_ty), mask=inner)


@triton.jit(do_not_specialize=VARYING)
def across(
    k, chunks, crossing, overlap, dcrossing, doverlap, dqs, dks, dk_part,
    documents, first, N, T, tiles_a_row, tiles, tokens, heads, head0, H, per_group,
    K: tl.constexpr, KB: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr,
    PACKED: tl.constexpr, MORE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a tile of two chunks, head and block of K: ``dqs, dks`` of tiles become those of chunks, and
    ``dk_part [heads, tokens, K]`` is added to (with MORE; else there are none yet, and they are made)."""
    C: tl.constexpr = 1 << BITS
    NK: tl.constexpr = (K + KB - 1) // KB
    pid = tl.program_id(0)
    column = pid % NK * KB + tl.arange(0, KB)
    local_head = (pid // NK) % heads
    tile = pid // (NK * heads)
    n, start, length, before, A, tile0, begin = tile_at(tile, documents, first, N, T, tiles_a_row, P, PACKED)
    if begin >= length:
        return
    groups = H // per_group
    line = local_head.to(tl.int64)
    dtype = dqs.dtype.element_ty
    row = tl.arange(0, C)
    valid = row < length - begin
    later = row < length - begin - C
    base = start + begin
    own = (line * tokens + base) * K
    next_ = own + C * K
    square = (line * tiles + tile) * (C * C) + row[:, None] * C + row[None, :]
    there = row[:, None] * K + column[None, :]
    inner = valid[:, None] & (column < K)[None, :]
    inner_later = later[:, None] & (column < K)[None, :]

    dY = tl.load(dcrossing + square)
    writer = token_rows(chunks + own, row, valid, K, column, K)
    dreader = product(dY, writer, PRECISION)
    dwriter = tl.trans(product(token_columns(chunks + next_, row, later, K, column, K), dY, PRECISION))
    if MORE:
        dreader += token_rows(dqs + next_, row, later, K, column, K).to(tl.float32)
        Y = tl.load(crossing + square)
        dkey = token_rows(dk_part + own, row, valid, K, column, K).to(tl.float32)
        dkey -= tl.trans(product(token_columns(dqs + next_, row, later, K, column, K), Y, PRECISION))
        tl.debug_barrier()  # all have read what is overwritten
        tl.store(dk_part + own + there, dkey.to(dtype), mask=inner)
        tl.store(dqs + next_ + there, dreader.to(dtype), mask=inner_later)

        dX = tl.load(doverlap + square)
        dkey = token_rows(dk_part + next_, row, later, K, column, K).to(tl.float32)
        dkey += tl.trans(product(token_columns(chunks + own, row, valid, K, column, K), dX, PRECISION))
        keys = k + ((base + C) * groups + (head0 + local_head) // per_group) * K
        dwriter += product(dX, token_rows(keys, row, later, groups * K, column, K), PRECISION)
        dwriter += token_rows(dks + own, row, valid, K, column, K).to(tl.float32)
        X = tl.load(overlap + square)
        dwriter_next = token_rows(dks + next_, row, later, K, column, K).to(tl.float32)
        dwriter_next -= tl.trans(product(token_columns(dks + own, row, valid, K, column, K), X, PRECISION))
        tl.debug_barrier()
        tl.store(dk_part + next_ + there, dkey.to(dtype), mask=inner_later)
        tl.store(dks + own + there, dwriter.to(dtype), mask=inner)
        tl.store(dks + next_ + there, dwriter_next.to(dtype), mask=inner_later)
    else:
        zero = tl.zeros([C, KB], dtype)
        tl.store(dk_part + own + there, zero, mask=inner)
        tl.store(dk_part + next_ + there, zero, mask=inner_later)
        tl.store(dqs + own + there, zero, mask=inner)
        tl.store(dqs + next_ + there, dreader.to(dtype), mask=inner_later)
        tl.store(dks + own + there, dwriter.to(dtype), mask=inner)
        tl.store(dks + next_ + there, zero, mask=inner_later)


@triton.jit(do_not_specialize=VARYING)
def attention_back(
    v, do, cums, columns, attention, dattention, dv, dcolumns, gates,
    documents, first, N, T, tiles_a_row, tokens, heads, head0, H, L,
    V: tl.constexpr, BV: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr,
    PACKED: tl.constexpr, LOGLINEAR: tl.constexpr, OUTER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a chunk and head: what attends inside the chunk. ``dattention [heads, tokens, C]``: ``(do v^T) * m``;
    ``dv`` is added to (with OUTER: something reaches the chunk from outside); ``dcolumns`` and ``gates`` as in
    ``within.inside``."""
    C: tl.constexpr = 1 << BITS
    local_head, chunk, n, start, length, before, A, tile0, begin = chunk_at(
        tl.program_id(0), heads, documents, first, N, T, tiles_a_row, P, BITS, PACKED
    )
    if begin >= length:
        return
    head = head0 + local_head
    line = local_head.to(tl.int64)
    row = tl.arange(0, C)
    valid = row < length - begin
    base = start + begin
    at = line * tokens + base
    square = row[:, None] * C + row[None, :]
    values, grads = v + (base * H + head) * V, do + (base * H + head) * V
    dP = tl.zeros([C, C], tl.float32)
    for first_v in range(0, V, BV):
        rv = first_v + tl.arange(0, BV)
        grad = token_rows(grads, row, valid, H * V, rv, V)
        dP += product(grad, tl.trans(token_rows(values, row, valid, H * V, rv, V)), PRECISION)
    P_ts = tl.load(attention + at * C + square, mask=valid[:, None], other=0.0).to(tl.float32)
    G = tl.load(cums + at + row, mask=valid, other=0.0)
    mask = tl.where((row[:, None] >= row[None, :]) & valid[:, None], decay(G[:, None] - G[None, :]), 0.0)
    dP *= mask
    both = P_ts * dP
    P_ts *= mask
    if LOGLINEAR:
        lams = columns + line * L * tokens + base
        dlams = dcolumns + line * (L + 2) * tokens + base
        level_gradients(both, dlams, tokens, row, valid, L, BITS)
        levels = level_weights(lams, tokens, row, valid, L, BITS)
        P_ts *= levels
        dP *= levels
        both *= levels
    tl.store(dattention + at * C + square, dP.to(dattention.dtype.element_ty), mask=valid[:, None])
    both = tl.where(row[:, None] > row[None, :], both, 0.0)
    tl.store(gates + at + row, tl.sum(both, 1), mask=valid)
    tl.store(gates + heads.to(tl.int64) * tokens + at + row, tl.sum(both, 0), mask=valid)
    weights = P_ts.to(do.dtype.element_ty)
    for first_v in range(0, V, BV):
        rv = first_v + tl.arange(0, BV)
        back = product(token_columns(grads, row, valid, H * V, rv, V), weights, PRECISION)
        outputs = dv + (base * H + head) * V + row[None, :] * (H * V) + rv[:, None]
        inner = valid[None, :] & (rv < V)[:, None]
        if OUTER:
            back += tl.load(outputs, mask=inner, other=0.0).to(tl.float32)
        tl.store(outputs, back.to(dv.dtype.element_ty), mask=inner)


@triton.jit(do_not_specialize=[*VARYING, "scale"])
def solve_back(
    q, k, beta, attention, dattention, inverse, dqs, dks, dk_part, dq, dk, dbeta,
    documents, first, N, T, tiles_a_row, tokens, heads, head0, H, per_group, scale,
    K: tl.constexpr, KB: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr,
    PACKED: tl.constexpr, OUTER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a chunk and head. From ``dattention`` and ``dqs, dks, dk_part`` (with OUTER; else there are none) to
    ``dq, dk [tokens, H, K]`` and ``dbeta [tokens, H]``."""
    C: tl.constexpr = 1 << BITS
    local_head, chunk, n, start, length, before, A, tile0, begin = chunk_at(
        tl.program_id(0), heads, documents, first, N, T, tiles_a_row, P, BITS, PACKED
    )
    if begin >= length:
        return
    head = head0 + local_head
    groups = H // per_group
    dtype = attention.dtype.element_ty
    row = tl.arange(0, C)
    valid = row < length - begin
    base = start + begin
    at = local_head.to(tl.int64) * tokens + base
    stride = groups * K
    here = (base * groups + head // per_group) * K
    lower = row[:, None] >= row[None, :]
    square = row[:, None] * C + row[None, :]
    squareT = row[None, :] * C + row[:, None]

    dP = tl.load(dattention + at * C + square, mask=valid[:, None], other=0.0).to(tl.float32)
    scoresT = tl.zeros([C, C], tl.float32)
    for first_k in range(0, K, KB):
        column = first_k + tl.arange(0, KB)
        key = token_rows(k + here, row, valid, stride, column, K)
        scoresT += product(key, tl.trans(token_rows(q + here, row, valid, stride, column, K)), PRECISION)
        if OUTER:
            dP -= product(token_rows(dqs + at * K, row, valid, K, column, K), tl.trans(key), PRECISION)
    dP = tl.where(lower, dP, 0.0).to(dtype)
    scoresT = tl.where(row[:, None] <= row[None, :], scoresT * scale, 0.0).to(dtype)
    dT = product(scoresT, dP, PRECISION)
    if OUTER:
        for first_k in range(0, K, KB):
            column = first_k + tl.arange(0, KB)
            key = token_rows(k + here, row, valid, stride, column, K)
            dT += product(key, tl.trans(token_rows(dks + at * K, row, valid, K, column, K)), PRECISION)
    strength = tl.load(beta + base * H + head + row * H, mask=valid, other=0.0).to(tl.float32)
    dT = tl.where(lower, dT, 0.0)
    U = tl.load(inverse + at * C + square, mask=valid[:, None], other=0.0)
    by_writes = tl.sum(dT * U, 0)
    UT = tl.load(inverse + at * C + squareT, mask=valid[None, :], other=0.0)
    dN = product(product(UT, dT * strength[None, :], PRECISION), UT, PRECISION)
    dN = tl.where(row[:, None] > row[None, :], -dN, 0.0)
    W = (dN * strength[:, None]).to(dtype)
    TT = UT * strength[:, None]
    dZ = tl.where(lower, exact_right(dP, TT, PRECISION) * scale, 0.0)
    P_ts = tl.load(attention + at * C + square, mask=valid[:, None], other=0.0)

    by_keys = tl.zeros([C], tl.float32)
    for first_k in range(0, K, KB):
        column = first_k + tl.arange(0, KB)
        inner = valid[:, None] & (column < K)[None, :]
        to = (base * H + head) * K + row[:, None] * (H * K) + column[None, :]
        key = token_rows(k + here, row, valid, stride, column, K)
        dquery = exact_left(dZ, key, PRECISION)
        if OUTER:
            dquery += token_rows(dqs + at * K, row, valid, K, column, K).to(tl.float32) * scale
        tl.store(dq + to, dquery.to(dq.dtype.element_ty), mask=inner)
        dkeyT = product(token_columns(q + here, row, valid, stride, column, K), dZ.to(dtype), PRECISION)
        dkeyT += product(token_columns(k + here, row, valid, stride, column, K), W, PRECISION)
        if OUTER:
            dkeyT -= product(token_columns(dqs + at * K, row, valid, K, column, K), P_ts, PRECISION)
            dkeyT += product(token_columns(dks + at * K, row, valid, K, column, K), TT.to(dtype), PRECISION)
        passed = exact_left(dN, key, PRECISION)
        by_keys += tl.sum(key * passed, 1)
        dkey = strength[:, None] * passed + tl.trans(dkeyT)
        if OUTER:
            dkey += token_rows(dk_part + at * K, row, valid, K, column, K).to(tl.float32)
        tl.store(dk + to, dkey.to(dk.dtype.element_ty), mask=inner)
    tl.store(dbeta + base * H + head + row * H, (by_writes + by_keys).to(dbeta.dtype.element_ty), mask=valid)
