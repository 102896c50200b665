r"""The backward pass inside tiles, and the last steps of the gates' and level scales' gradients.

Rows are queries ``t``, columns keys ``s``. With ``P = q k^T``, ``dP = do v^T`` and the mask ``m`` of levels and
decays,

    dS = dP * m ,   dq = dS k ,   dk^T = q^T dS ,   dv^T = do^T (P * m) ,
    dlambda_l = sum_s [level l] P dP exp(G_t - G_s) .

``dk`` and ``dv`` are made transposed: the same squares then serve all products as they are. A transposed
accumulator as an operand would be shorter, but compilers have returned wrong gradients for it. ``dS`` is summed
over the heads of a group before its products with ``k`` and ``q``, which are then one for all of them.
"""

import triton
import triton.language as tl

from src.ops.kernels.between import BLOCKS
from src.ops.kernels.states import VARYING
from src.ops.kernels.tiles import (
    decay,
    document_at,
    document_of,
    level_weights,
    levels_of_blocks,
    levels_of_places,
    product,
)


@triton.jit
def values_at(x, place, valid, stride, part, V: tl.constexpr, BV: tl.constexpr):
    """Some values of some tokens, ``[C, BV]``; ``x`` points to the first token."""
    rv = part * BV + tl.arange(0, BV)
    return tl.load(x + place[:, None] * stride + rv[None, :], mask=valid[:, None] & (rv[None, :] < V), other=0.0)


@triton.jit
def rows_by_columns(
    grad, grads, values, rows_valid, columns_valid, place, stride,
    V: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``dP = do v^T``; ``grads`` and ``values`` point to the first token. ``grad``: the first block of ``grads``."""
    dP = product(grad, tl.trans(values_at(values, place, columns_valid, stride, 0, V, BV)), PRECISION)
    for part in range(1, (V + BV - 1) // BV):
        grad = values_at(grads, place, rows_valid, stride, part, V, BV)
        dP += product(grad, tl.trans(values_at(values, place, columns_valid, stride, part, V, BV)), PRECISION)
    return dP


@triton.jit
def queries_by_keys(
    queries, keys, queries_valid, keys_valid, place, stride,
    C: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``P = q k^T``, some of the K columns at a time; both point to the first token."""
    P = tl.zeros([C, C], tl.float32)
    for first in range(0, K, KB):
        rb = first + tl.arange(0, KB)
        inner = rb < K
        at = place[:, None] * stride + rb[None, :]
        query = tl.load(queries + at, mask=queries_valid[:, None] & inner[None, :], other=0.0)
        key = tl.load(keys + at, mask=keys_valid[:, None] & inner[None, :], other=0.0)
        P += product(query, tl.trans(key), PRECISION)
    return P


@triton.jit
def by_level(parts, level, wanted):
    """``[C, n]``: sums of the parts ``[C, m]`` that are of each wanted level."""
    return tl.sum(tl.where(level[:, :, None] == wanted[None, None, :], parts[:, :, None], 0.0), 1)


@triton.jit
def level_gradients(both, dlams, tokens, row, valid, L, BITS: tl.constexpr):
    """The level scales' gradient inside a chunk, from ``P dP exp(G_t - G_s)``: each level's part of a row, by the two
    tables of ``level_weights``, sums over blocks of 8 keys and the own block's keys. ``dlams``: the first token's level
    0; levels that share the last scale go to that line."""
    C: tl.constexpr = 1 << BITS
    by_block = tl.reshape(both, [C, C // 8, 8])
    own = (row >> 3)[:, None] == tl.arange(0, C // 8)[None, :]
    far = tl.sum(by_block, 2)
    near = tl.sum(tl.where(own[:, :, None], by_block, 0.0), 1)
    low, high, last = tl.arange(0, 4), tl.arange(0, 4) + 4, L - 1
    low_parts = by_level(near, levels_of_places(row), low)
    high_parts = by_level(tl.where(own, 0.0, far), levels_of_blocks(row, BITS), high)
    at_low = dlams + low[None, :].to(tl.int64) * tokens + row[:, None]
    at_high = dlams + high[None, :].to(tl.int64) * tokens + row[:, None]
    tl.store(at_low, low_parts, mask=valid[:, None] & (low < last)[None, :])
    tl.store(at_high, high_parts, mask=valid[:, None] & ((high < last) & (high <= BITS))[None, :])
    if last <= BITS:
        shared = tl.sum(tl.where((low >= last)[None, :], low_parts, 0.0), 1)
        shared += tl.sum(tl.where((high >= last)[None, :], high_parts, 0.0), 1)
        tl.store(dlams + last.to(tl.int64) * tokens + row, shared, mask=valid)


@triton.jit(do_not_specialize=[*VARYING, *BLOCKS])
def inside(
    q, k, v, do, cums, columns, dq, dk, dv, dcolumns, gates,
    documents, first, N, T, tiles_a_row, tokens, heads, head0, H, per_group, L,
    scale, blocks, block0, heads_a_block, partials,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr,
    PACKED: tl.constexpr, LOGLINEAR: tl.constexpr, MORE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The square on the diagonal: one program a chunk of ``C = 2**BITS`` tokens and some heads of a group.

    With MORE, ``dq, dk, dv`` hold what comes from other chunks, and are added to. ``dcolumns [heads, L + 2, tokens]``:
    the level scales' gradient. ``gates [5, heads, tokens]``: of ``P dP m`` below the diagonal, sums over rows and over
    columns.
    """
    C: tl.constexpr = 1 << BITS
    KB: tl.constexpr = 64 if BK > 64 else BK
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    block = pid % blocks
    at = pid // blocks
    tile = at >> P
    n = document_of(tile, first, N, tiles_a_row, PACKED)
    start, length, chunk0, before = document_at(n, documents, first, N, T, tiles_a_row, PACKED)
    begin = ((((chunk0 >> P) + tile - before) << P) - chunk0) * 64 + (at & ((1 << P) - 1)) * C
    if (begin >= length) | (begin + C <= 0):
        return
    in_group = per_group // heads_a_block
    group = (block0 + block) // in_group
    groups = H // per_group
    row = tl.arange(0, C)
    valid = row < length - begin
    base = start + begin
    here = (base * groups + group) * K
    kind = heads.to(tl.int64) * tokens
    to = ((block0 + block) % in_group % partials * tokens + base) * groups * K + group * K
    stride = groups * K
    differ = row[:, None] ^ row[None, :]
    causal = (row[:, None] >= row[None, :]) & valid[:, None] & valid[None, :]
    first_values = tl.arange(0, BV)[:, None]
    scores = queries_by_keys(q + here, k + here, valid, valid, row, stride, C, K, KB, PRECISION) * scale
    dscores = tl.zeros([C, C], tl.float32)
    for i in range(heads_a_block):
        local_head = block * heads_a_block + i
        head = head0 + local_head
        line = local_head.to(tl.int64)
        sums = cums + line * tokens + base
        sides = gates + line * tokens + base
        values, grads = v + (base * H + head) * V, do + (base * H + head) * V
        outputs = dv + (base * H + head) * V + row[None, :] * (H * V)
        grad = values_at(grads, row, valid, H * V, 0, V, BV)
        dP = rows_by_columns(grad, grads, values, valid, valid, row, H * V, V, BV, PRECISION)
        G = tl.load(sums + row, mask=valid, other=0.0)
        mask = tl.where(causal, decay(G[:, None] - G[None, :]), 0.0)
        if LOGLINEAR:
            lams = columns + line * L * tokens + base
            dlams = dcolumns + line * (L + 2) * tokens + base
            levels = level_weights(lams, tokens, row, valid, L, BITS)
            attention = (scores * mask * levels).to(do.dtype.element_ty)
            dP *= mask
            both = scores * dP
            dP *= levels
            level_gradients(both, dlams, tokens, row, valid, L, BITS)
            both = tl.where(differ == 0, 0.0, both * levels)
            row_gates = tl.sum(both, 1)
        else:
            dP *= mask
            attention = (scores * mask).to(do.dtype.element_ty)
            both = tl.where(differ == 0, 0.0, scores * dP)
            row_gates = tl.sum(both, 1)
        dscores += dP
        tl.store(sides + row, row_gates, mask=valid)
        tl.store(sides + kind + row, tl.sum(both, 0), mask=valid)
        for part in range(NV):
            rv = part * BV + first_values
            into = valid[None, :] & (rv < V)
            if NV > 1:
                grad = values_at(grads, row, valid, H * V, part, V, BV)
            back = product(tl.trans(grad), attention, PRECISION)
            if MORE:
                back += tl.load(outputs + rv, mask=into, other=0.0).to(tl.float32)
            tl.store(outputs + rv, back.to(dv.dtype.element_ty), mask=into)

    # Once for all heads, some of the K columns at a time.
    dscores = (dscores * scale).to(do.dtype.element_ty)
    for first_k in range(0, BK, KB):
        rb = first_k + tl.arange(0, KB)
        inner = rb < K
        keys = tl.load(
            k + here + row[:, None] * stride + rb[None, :],
            mask=valid[:, None] & inner[None, :],
            other=0.0,
        )
        dquery = product(dscores, keys, PRECISION)
        dqueries = dq + to + row[:, None] * stride + rb[None, :]
        in_query = valid[:, None] & inner[None, :]
        if MORE:
            dquery += tl.load(dqueries, mask=in_query, other=0.0)
        tl.store(dqueries, dquery, mask=in_query)
        queryT = tl.load(
            q + here + row[None, :] * stride + rb[:, None], mask=valid[None, :] & inner[:, None], other=0.0
        )
        dkeyT = product(queryT, dscores, PRECISION)
        dkeys = dk + to + row[None, :] * stride + rb[:, None]
        in_key = valid[None, :] & inner[:, None]
        if MORE:
            dkeyT += tl.load(dkeys, mask=in_key, other=0.0)
        tl.store(dkeys, dkeyT, mask=in_key)


@triton.jit(do_not_specialize=[*VARYING, *BLOCKS])
def pairs(
    q, k, v, do, cums, columns, dq, dk, dv, dcolumns, gates,
    documents, first, N, T, tiles_a_row, tokens, heads, head0, H, per_group, L,
    scale, blocks, block0, heads_a_block, partials,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr,
    PACKED: tl.constexpr, LOGLINEAR: tl.constexpr, MORE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The queries of a tile's second chunk at the keys of its first: one program a tile and some heads of a group.

    One level for the whole square, so that mask and decays factor into one number a row and one a column. Without
    MORE, ``dq, dk, dv`` are begun here: zeros where nothing is added. Line ``L + 1`` of ``dcolumns`` takes the level
    where it shares the last scale; sums over rows and columns go to ``gates[2]``.
    """
    C: tl.constexpr = 1 << BITS
    KB: tl.constexpr = 64 if BK > 64 else BK
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    block = pid % blocks
    tile = pid // blocks
    n = document_of(tile, first, N, tiles_a_row, PACKED)
    start, length, chunk0, before = document_at(n, documents, first, N, T, tiles_a_row, PACKED)
    begin = ((((chunk0 >> P) + tile - before) << P) - chunk0) * 64
    if begin >= length:
        return
    in_group = per_group // heads_a_block
    group = (block0 + block) // in_group
    groups = H // per_group
    row = tl.arange(0, C)
    # A document that begins with a tile's second chunk has no first one; a short one no second.
    valid = (row < length - begin) & (begin >= 0)
    later_valid = row < length - begin - C
    base = start + begin
    here = (base * groups + group) * K
    step = C * groups * K
    stride = groups * K
    first_values = tl.arange(0, BV)[:, None]
    scores = queries_by_keys(q + here + step, k + here, later_valid, valid, row, stride, C, K, KB, PRECISION)
    scores = (scores * scale).to(do.dtype.element_ty)
    dscores = tl.zeros([C, C], tl.float32)
    kind = heads.to(tl.int64) * tokens
    for i in range(heads_a_block):
        local_head = block * heads_a_block + i
        head = head0 + local_head
        line = local_head.to(tl.int64)
        sums = cums + line * tokens + base
        sides = gates + 2 * kind + line * tokens + base
        values, grads = v + (base * H + head) * V, do + (base * H + head) * V + C * H * V
        outputs = dv + (base * H + head) * V + row[None, :] * (H * V)
        if MORE and NV == 1:  # early, so that it has arrived when it is needed
            rest = tl.load(outputs + first_values, mask=valid[None, :] & (first_values < V), other=0.0)
        grad = values_at(grads, row, later_valid, H * V, 0, V, BV)
        dP = rows_by_columns(grad, grads, values, later_valid, valid, row, H * V, V, BV, PRECISION)
        edge = tl.load(sums + C - 1, mask=(length - begin >= C) & (begin >= 0), other=0.0)
        outgoing = decay(edge - tl.load(sums + row, mask=valid, other=0.0))
        incoming = decay(tl.load(sums + C + row, mask=later_valid, other=0.0) - edge)
        dP *= outgoing[None, :]
        row_gates = incoming * tl.sum(scores.to(tl.float32) * dP, 1)
        if LOGLINEAR:
            index = tl.minimum(BITS + 1, L - 1).to(tl.int64)
            lams = columns + (line * L + index) * tokens + base + C
            lam = tl.load(lams + row, mask=later_valid, other=0.0).to(tl.float32)
            own_line = tl.where(BITS + 1 < L - 1, BITS + 1, L + 1).to(tl.int64)
            dlams = dcolumns + (line * (L + 2) + own_line) * tokens + base + C
            tl.store(dlams + row, row_gates, mask=later_valid & (begin >= 0))
            row_gates *= lam
            incoming *= lam
        dP *= incoming[:, None]
        dscores += dP
        tl.store(sides + C + row, row_gates, mask=later_valid)
        tl.store(sides + row, -tl.sum(scores.to(tl.float32) * dP, 0), mask=valid)
        for part in range(NV):
            rv = part * BV + first_values
            inner = valid[None, :] & (rv < V)
            if NV > 1:
                grad = values_at(grads, row, later_valid, H * V, part, V, BV)
            weighted = (tl.trans(grad) * incoming[None, :]).to(do.dtype.element_ty)
            back = product(weighted, scores, PRECISION) * outgoing[None, :]
            if MORE:
                if NV > 1:
                    rest = tl.load(outputs + rv, mask=inner, other=0.0)
                back += rest.to(tl.float32)
            else:
                later = later_valid[None, :] & (rv < V)
                tl.store(outputs + C * H * V + rv, tl.zeros([BV, C], dv.dtype.element_ty), mask=later)
            tl.store(outputs + rv, back.to(dv.dtype.element_ty), mask=inner)

    to = ((block0 + block) % in_group % partials * tokens + base) * groups * K + group * K
    dscores = (dscores * scale).to(do.dtype.element_ty)
    for first_k in range(0, BK, KB):
        rb = first_k + tl.arange(0, KB)
        inner = rb < K
        along = row[:, None] * stride + rb[None, :]
        down = row[None, :] * stride + rb[:, None]
        later = later_valid[:, None] & inner[None, :]
        laterT = later_valid[None, :] & inner[:, None]
        earlier = valid[:, None] & inner[None, :]
        earlierT = valid[None, :] & inner[:, None]
        dquery = product(dscores, tl.load(k + here + along, mask=earlier, other=0.0), PRECISION)
        dkeyT = product(tl.load(q + here + step + down, mask=laterT, other=0.0), dscores, PRECISION)
        if MORE:
            dquery += tl.load(dq + to + step + along, mask=later, other=0.0)
            dkeyT += tl.load(dk + to + down, mask=earlierT, other=0.0)
        else:
            tl.store(dq + to + along, tl.zeros([C, KB], tl.float32), mask=earlier)
            tl.store(dk + to + step + down, tl.zeros([KB, C], tl.float32), mask=laterT)
        tl.store(dq + to + step + along, dquery, mask=later)
        tl.store(dk + to + down, dkeyT, mask=earlierT)


@triton.jit(do_not_specialize=[*VARYING, "slices"])
def finish(
    dcolumns, gates, passing, dg, dscales,
    documents, first, N, T, tiles_a_row, tiles, tokens, heads, head0, H, L, slices,
    R: tl.constexpr, P: tl.constexpr, BL: tl.constexpr, SLICES: tl.constexpr,
    PACKED: tl.constexpr, LOGLINEAR: tl.constexpr, MORE: tl.constexpr, OUTWARD: tl.constexpr,
):  # fmt: skip
    """One program a tile of ``R = 64 << P`` tokens and head: ``dg [tokens, H]`` and ``dlambda [tokens, H, L]``.

    ``passing [heads, tiles, slices]``: sums of ``carry``, one slice, or of ``scan``, a slice each of its programs.

    ``dg_t`` sums over all pairs ``s < t <= u`` what the write at ``s`` adds through the read at ``u``. ``gates [4 +
    OUTWARD, heads, tokens]`` are two of ``inside``, one of ``pairs``, then rows between tiles and, in so many parts,
    columns between tiles:

        passing                                 both outside the tile
        + sum_{u >= t} between rows             s before the tile
        + sum_{s < t} between columns           u behind the tile
        + sum_{u >= t} rows - columns inside    both inside

    Pairs ``s = t = u`` have no decay and are in none of these sums.
    """
    pid = tl.program_id(0)
    local_head = pid % heads
    tile = pid // heads
    n = document_of(tile, first, N, tiles_a_row, PACKED)
    start, length, chunk0, before = document_at(n, documents, first, N, T, tiles_a_row, PACKED)
    begin = ((((chunk0 >> P) + tile - before) << P) - chunk0) * 64
    if begin >= length:
        return
    head = head0 + local_head
    line = local_head.to(tl.int64)
    row = tl.arange(0, R)
    valid = (row >= -begin) & (row < length - begin)
    base = start + begin
    kind = heads.to(tl.int64) * tokens
    at = gates + line * tokens + base + row
    to_end = tl.load(at, mask=valid, other=0.0) - tl.load(at + kind, mask=valid, other=0.0)
    if R > 64:
        to_end += tl.load(at + 2 * kind, mask=valid, other=0.0)
    if MORE:
        to_end += tl.load(at + 3 * kind, mask=valid, other=0.0)
    gate = tl.cumsum(to_end, 0, reverse=True)
    if MORE:
        outward = tl.load(at + 4 * kind, mask=valid, other=0.0)
        for part in tl.static_range(1, OUTWARD):
            outward += tl.load(at + (4 + part) * kind, mask=valid, other=0.0)
        over = tl.cumsum(outward, 0) - outward
        piece = tl.arange(0, SLICES)
        over += tl.sum(tl.load(passing + (line * tiles + tile) * slices + piece, mask=piece < slices, other=0.0))
        if LOGLINEAR:
            # What is read at the end is read at the last chunk boundary.
            boundary = (((chunk0 * 64 + length) >> 6) - chunk0) * 64
            over = tl.where(row < boundary - begin, over, 0.0)
        gate += over
    tl.store(dg + base * H + head + row * H, gate.to(dg.dtype.element_ty), mask=valid)
    if LOGLINEAR:
        rl = tl.arange(0, BL)
        lines = dcolumns + line * (L + 2) * tokens + base
        here = valid[:, None] & (rl[None, :] < L)
        dlam = tl.load(lines + rl[None, :].to(tl.int64) * tokens + row[:, None], mask=here, other=0.0)
        last = tl.load(lines + L.to(tl.int64) * tokens + row, mask=valid, other=0.0)
        last += tl.load(lines + (L + 1).to(tl.int64) * tokens + row, mask=valid, other=0.0)
        dlam = tl.where(rl[None, :] == L - 1, dlam + last[:, None], dlam)
        to = dscales + (base * H + head) * L + row[:, None] * (H * L) + rl[None, :]
        tl.store(to, dlam.to(dscales.dtype.element_ty), mask=here)
