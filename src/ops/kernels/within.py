r"""The backward pass inside tiles, and the last steps of the gates' and level scales' gradients.

With ``P = q k^T``, ``dP = do v^T`` and the mask ``m`` of levels and decays,

    dS = dP * m ,   dq = dS k ,   dlambda_l = sum_s [level l] P dP exp(G_t - G_s)      (rows are queries)
    dv = (P * m)^T do ,   dk = dS^T q                                                  (rows are keys)

in two kernels, each with its own rows: sums over a row stay in a thread, and no product takes a transposed
accumulator (compilers have returned wrong gradients for that). ``dS`` is summed over the heads of a group before
the product with ``k`` or ``q``, which is then one for all of them.
"""

import triton
import triton.language as tl

from src.ops.kernels.between import BLOCKS
from src.ops.kernels.states import VARYING
from src.ops.kernels.tiles import decay, document_at, document_of, product


@triton.jit(do_not_specialize=[*VARYING, *BLOCKS])
def inside_rows(
    q, k, v, do, cums, columns, dq, dcolumns, gates,
    documents, first, N, T, tiles_a_row, tokens, head0, H, per_group, L,
    scale, blocks, block0, heads_a_block,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
    BITS: tl.constexpr,
    PACKED: tl.constexpr, LOGLINEAR: tl.constexpr, MORE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a block of ``C = 2**BITS`` queries and some heads of a group.

    With MORE, ``dq`` holds what comes from other tiles and is added to. ``dcolumns [heads, L + 1, tokens]``: the
    level scales' gradient. ``gates [heads, tokens]``: ``sum_l lambda_l dlambda_l`` over the levels above 0.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    SP: tl.constexpr = BITS + P - 6
    pid = tl.program_id(0)
    block = pid % blocks
    at = pid // blocks
    tile = at >> P
    sub = at & ((1 << P) - 1)
    n = document_of(tile, first, N, tiles_a_row, PACKED)
    start, length, chunk0, before = document_at(n, documents, first, N, T, tiles_a_row, PACKED)
    A = (chunk0 >> SP) + tile - before
    begin = ((A << SP) - chunk0) * 64 + sub * C
    if (begin >= length) | (begin + C <= 0):
        return
    in_group = per_group // heads_a_block
    group = (block0 + block) // in_group
    groups = H // per_group
    rk = tl.arange(0, BK)
    place = tl.arange(0, C)
    valid = (place >= -begin) & (place < length - begin)
    base = start + begin
    differ = place[:, None] ^ place[None, :]
    causal = (place[:, None] >= place[None, :]) & valid[None, :] & valid[:, None]
    across = place[:, None] * (groups * K) + rk[None, :]  # of q and k, and the same transposed
    down = place[None, :] * (groups * K) + rk[:, None]

    query = tl.load(
        q + (base * groups + group) * K + across, mask=valid[:, None] & (rk[None, :] < K), other=0.0
    )
    keyT = tl.load(k + (base * groups + group) * K + down, mask=valid[None, :] & (rk[:, None] < K), other=0.0)
    scores = product(query, keyT, PRECISION) * scale
    dscores = tl.zeros([C, C], tl.float32)
    if P == 1:
        left = base - C
        has_left = (sub == 1) & (begin >= C)
        keyT = tl.load(k + (left * groups + group) * K + down, mask=(rk[:, None] < K) & has_left, other=0.0)
        left_scores = (product(query, keyT, PRECISION) * scale).to(query.dtype)
        left_dscores = tl.zeros([C, C], tl.float32)

    for i in range(heads_a_block):
        local_head = block * heads_a_block + i
        head = head0 + local_head
        line = local_head.to(tl.int64)
        sums = cums + line * tokens + base
        values, grads = v + (base * H + head) * V, do + (base * H + head) * V
        G = tl.load(sums + place, mask=valid, other=0.0)
        dP = tl.zeros([C, C], tl.float32)
        for part in tl.static_range(NV):
            rv = part * BV + tl.arange(0, BV)
            grad = tl.load(
                grads + place[:, None] * (H * V) + rv[None, :], mask=valid[:, None] & (rv[None, :] < V), other=0.0
            )
            valueT = tl.load(
                values + place[None, :] * (H * V) + rv[:, None], mask=valid[None, :] & (rv[:, None] < V), other=0.0
            )
            dP += product(grad, valueT, PRECISION)
        dP *= tl.where(causal, decay(G[:, None] - G[None, :]), 0.0)
        row_gates = tl.zeros([C], tl.float32)
        if LOGLINEAR:
            both = scores * dP
            lams = columns + line * L * tokens + base
            dlams = dcolumns + line * (L + 1) * tokens + base
            shared = tl.zeros([C], tl.float32)
            levels = tl.zeros([C, C], tl.float32)
            # Always ``differ``, but the compiler does not know: it would keep every level's mask in registers.
            changes = differ + tl.minimum(head, 0)
            for level in tl.static_range(BITS + 1):
                if level == 0:
                    same = changes == 0
                else:
                    same = (changes >= (1 << (level - 1))) & (changes < (1 << level))
                index = tl.minimum(level, L - 1).to(tl.int64)
                lam = tl.load(lams + index * tokens + place, mask=valid, other=0.0).to(tl.float32)
                dlam = tl.sum(tl.where(same, both, 0.0), 1)
                if level > 0:
                    row_gates += lam * dlam
                if level < L - 1:
                    tl.store(dlams + index * tokens + place, dlam, mask=valid)
                else:
                    shared += dlam
                levels = tl.where(same, lam[:, None], levels)
            dscores += dP * levels
        else:
            row_gates += tl.sum(tl.where(differ == 0, 0.0, scores * dP), 1)
            dscores += dP

        if P == 1:
            edge = tl.load(sums - 1, mask=has_left, other=0.0)
            incoming = decay(G - edge)
            dlam = tl.zeros([C], tl.float32)
            if has_left:
                outgoing = decay(edge - tl.load(sums - C + place))
                dP = tl.zeros([C, C], tl.float32)
                for part in tl.static_range(NV):
                    rv = part * BV + tl.arange(0, BV)
                    grad = tl.load(
                        grads + place[:, None] * (H * V) + rv[None, :],
                        mask=valid[:, None] & (rv[None, :] < V),
                        other=0.0,
                    )
                    valueT = tl.load(
                        values - C * H * V + place[None, :] * (H * V) + rv[:, None], mask=rv[:, None] < V, other=0.0
                    )
                    dP += product(grad, valueT, PRECISION)
                dP *= outgoing[None, :]
                dlam = incoming * tl.sum(left_scores.to(tl.float32) * dP, 1)
                lam = tl.full([C], 1.0, tl.float32)
                if LOGLINEAR:
                    index = tl.minimum(BITS + 1, L - 1).to(tl.int64)
                    lam = tl.load(lams + index * tokens + place, mask=valid, other=0.0).to(tl.float32)
                    if BITS + 1 < L - 1:
                        tl.store(dlams + index * tokens + place, dlam, mask=valid)
                    else:
                        shared += dlam
                row_gates += lam * dlam
                left_dscores += (incoming * lam)[:, None] * dP
        if LOGLINEAR:
            if BITS + P >= L - 1:
                tl.store(dlams + (L - 1).to(tl.int64) * tokens + place, shared, mask=valid)
        tl.store(gates + line * tokens + base + place, row_gates, mask=valid)

    key = tl.load(k + (base * groups + group) * K + across, mask=valid[:, None] & (rk[None, :] < K), other=0.0)
    dquery = product((dscores * scale).to(key.dtype), key, PRECISION)
    if P == 1:
        key = tl.load(k + (left * groups + group) * K + across, mask=(rk[None, :] < K) & has_left, other=0.0)
        dquery += product((left_dscores * scale).to(key.dtype), key, PRECISION)
    to = ((((block0 + block) % in_group) * tokens + base) * groups + group) * K + across
    here = valid[:, None] & (rk[None, :] < K)
    if MORE:
        dquery += tl.load(dq + to, mask=here, other=0.0)
    tl.store(dq + to, dquery, mask=here)


@triton.jit(do_not_specialize=[*VARYING, *BLOCKS])
def inside_columns(
    q, k, v, do, cums, columns, dk, dv, gates,
    documents, first, N, T, tiles_a_row, tokens, head0, H, per_group, L,
    scale, blocks, block0, heads_a_block,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
    BITS: tl.constexpr,
    PACKED: tl.constexpr, LOGLINEAR: tl.constexpr, MORE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a block of ``C = 2**BITS`` keys and some heads of a group.

    In a tile of two blocks (P = 1), the first one's keys also meet the second one's queries. With MORE, ``dk, dv``
    hold what comes from other tiles and are added to. ``gates [heads, tokens]``: sums of ``P dP m`` over queries
    behind the key.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    SP: tl.constexpr = BITS + P - 6
    pid = tl.program_id(0)
    block = pid % blocks
    at = pid // blocks
    tile = at >> P
    sub = at & ((1 << P) - 1)
    n = document_of(tile, first, N, tiles_a_row, PACKED)
    start, length, chunk0, before = document_at(n, documents, first, N, T, tiles_a_row, PACKED)
    A = (chunk0 >> SP) + tile - before
    begin = ((A << SP) - chunk0) * 64 + sub * C
    if (begin >= length) | (begin + C <= 0):
        return
    in_group = per_group // heads_a_block
    group = (block0 + block) // in_group
    groups = H // per_group
    rk = tl.arange(0, BK)
    place = tl.arange(0, C)
    valid = (place >= -begin) & (place < length - begin)
    base = start + begin
    differ = place[:, None] ^ place[None, :]
    causal = (place[None, :] >= place[:, None]) & valid[None, :] & valid[:, None]
    across = place[:, None] * (groups * K) + rk[None, :]
    down = place[None, :] * (groups * K) + rk[:, None]

    key = tl.load(k + (base * groups + group) * K + across, mask=valid[:, None] & (rk[None, :] < K), other=0.0)
    queryT = tl.load(q + (base * groups + group) * K + down, mask=valid[None, :] & (rk[:, None] < K), other=0.0)
    scores = product(key, queryT, PRECISION) * scale
    dscores = tl.zeros([C, C], tl.float32)
    if P == 1:
        has_next = (sub == 0) & (begin + C < length)
        later = base + C
        later_valid = (place < length - begin - C) & has_next
        queryT = tl.load(
            q + (later * groups + group) * K + down, mask=later_valid[None, :] & (rk[:, None] < K), other=0.0
        )
        next_scores = (product(key, queryT, PRECISION) * scale).to(key.dtype)
        next_dscores = tl.zeros([C, C], tl.float32)

    for i in range(heads_a_block):
        local_head = block * heads_a_block + i
        head = head0 + local_head
        line = local_head.to(tl.int64)
        sums = cums + line * tokens + base
        values, grads = v + (base * H + head) * V, do + (base * H + head) * V
        G = tl.load(sums + place, mask=valid, other=0.0)
        dP = tl.zeros([C, C], tl.float32)
        for part in tl.static_range(NV):
            rv = part * BV + tl.arange(0, BV)
            value = tl.load(
                values + place[:, None] * (H * V) + rv[None, :], mask=valid[:, None] & (rv[None, :] < V), other=0.0
            )
            gradT = tl.load(
                grads + place[None, :] * (H * V) + rv[:, None], mask=valid[None, :] & (rv[:, None] < V), other=0.0
            )
            dP += product(value, gradT, PRECISION)
        mask = tl.where(causal, decay(G[None, :] - G[:, None]), 0.0)
        if LOGLINEAR:
            lams = columns + line * L * tokens + base
            lam = tl.load(lams + place, mask=valid, other=0.0).to(tl.float32)
            levels = tl.broadcast_to(lam[None, :], [C, C])
            changes = differ + tl.minimum(head, 0)  # as above
            for level in tl.static_range(1, BITS + 1):
                index = tl.minimum(level, L - 1).to(tl.int64)
                lam = tl.load(lams + index * tokens + place, mask=valid, other=0.0).to(tl.float32)
                levels = tl.where(changes >= (1 << (level - 1)), lam[None, :], levels)
            mask *= levels
        dP *= mask
        dscores += dP
        column_gates = tl.sum(tl.where(differ == 0, 0.0, scores * dP), 1)
        attention = (scores * mask).to(key.dtype)

        if P == 1:
            edge = tl.load(sums + C - 1, mask=has_next, other=0.0)
            outgoing = decay(edge - G)
            incoming = decay(tl.load(sums + C + place, mask=later_valid, other=0.0) - edge)
            incoming = tl.where(later_valid, incoming, 0.0)
            if has_next:
                if LOGLINEAR:
                    index = tl.minimum(BITS + 1, L - 1).to(tl.int64)
                    lam = tl.load(lams + index * tokens + C + place, mask=later_valid, other=0.0)
                    incoming *= lam.to(tl.float32)
                dP = tl.zeros([C, C], tl.float32)
                for part in tl.static_range(NV):
                    rv = part * BV + tl.arange(0, BV)
                    value = tl.load(
                        values + place[:, None] * (H * V) + rv[None, :],
                        mask=valid[:, None] & (rv[None, :] < V),
                        other=0.0,
                    )
                    gradT = tl.load(
                        grads + C * H * V + place[None, :] * (H * V) + rv[:, None],
                        mask=later_valid[None, :] & (rv[:, None] < V),
                        other=0.0,
                    )
                    dP += product(value, gradT, PRECISION)
                dP *= outgoing[:, None] * incoming[None, :]
                next_dscores += dP
                column_gates += tl.sum(next_scores.to(tl.float32) * dP, 1)

        for part in tl.static_range(NV):
            rv = part * BV + tl.arange(0, BV)
            to = place[:, None] * (H * V) + rv[None, :]
            here = valid[:, None] & (rv[None, :] < V)
            back = product(attention, tl.load(grads + to, mask=here, other=0.0), PRECISION)
            if P == 1:
                if has_next:
                    grad = tl.load(
                        grads + C * H * V + to, mask=later_valid[:, None] & (rv[None, :] < V), other=0.0
                    )
                    grad = (grad * incoming[:, None]).to(key.dtype)
                    back += outgoing[:, None] * product(next_scores, grad, PRECISION)
            if MORE:
                back += tl.load(dv + (base * H + head) * V + to, mask=here, other=0.0).to(tl.float32)
            tl.store(dv + (base * H + head) * V + to, back.to(dv.dtype.element_ty), mask=here)
        tl.store(gates + line * tokens + base + place, column_gates, mask=valid)

    query = tl.load(q + (base * groups + group) * K + across, mask=valid[:, None] & (rk[None, :] < K), other=0.0)
    dkey = product((dscores * scale).to(key.dtype), query, PRECISION)
    if P == 1:
        query = tl.load(
            q + (later * groups + group) * K + across, mask=later_valid[:, None] & (rk[None, :] < K), other=0.0
        )
        dkey += product((next_dscores * scale).to(key.dtype), query, PRECISION)
    to = ((((block0 + block) % in_group) * tokens + base) * groups + group) * K + across
    here = valid[:, None] & (rk[None, :] < K)
    if MORE:
        dkey += tl.load(dk + to, mask=here, other=0.0)
    tl.store(dk + to, dkey, mask=here)


@triton.jit(do_not_specialize=VARYING)
def finish(
    dcolumns, gates, passing, dg, dscales,
    documents, first, N, T, tiles_a_row, tiles, tokens, heads, head0, H, L,
    R: tl.constexpr, BITS: tl.constexpr, BL: tl.constexpr, PARTS: tl.constexpr,
    PACKED: tl.constexpr, LOGLINEAR: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """One program a tile of ``R = 2**BITS`` tokens and head: ``dg [tokens, H]`` and ``dlambda [tokens, H, L]``.

    ``dg_t`` sums over all pairs ``s < t <= u`` what the write at ``s`` adds through the read at ``u``. ``gates``
    ``[4, heads, tokens]`` are rows and columns inside the tile, rows and columns between tiles:

        passing                                 both outside the tile
        + sum_{u >= t} between rows             s before the tile
        + sum_{s < t} between columns           u behind the tile
        + sum_{u >= t} inside rows - columns    both inside

    Pairs ``s = t = u`` have no decay and are in none of these sums.
    """
    SP: tl.constexpr = BITS - 6
    pid = tl.program_id(0)
    local_head = pid % heads
    tile = pid // heads
    n = document_of(tile, first, N, tiles_a_row, PACKED)
    start, length, chunk0, before = document_at(n, documents, first, N, T, tiles_a_row, PACKED)
    begin = ((((chunk0 >> SP) + tile - before) << SP) - chunk0) * 64
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
    if MORE:
        to_end += tl.load(at + 2 * kind, mask=valid, other=0.0)
    gate = tl.cumsum(to_end, 0, reverse=True)
    if MORE:
        outward = tl.load(at + 3 * kind, mask=valid, other=0.0)
        over = tl.cumsum(outward, 0) - outward
        for part in tl.static_range(PARTS):
            over += tl.load(passing + (line * tiles + tile) * PARTS + part)
        if LOGLINEAR:
            # What is read at the end is read at the last chunk boundary.
            boundary = (((chunk0 * 64 + length) >> 6) - chunk0) * 64
            over = tl.where(row < boundary - begin, over, 0.0)
        gate += over
    tl.store(dg + base * H + head + row * H, gate.to(dg.dtype.element_ty), mask=valid)
    if LOGLINEAR:
        rl = tl.arange(0, BL)
        lines = dcolumns + line * (L + 1) * tokens + base
        here = valid[:, None] & (rl[None, :] < L)
        dlam = tl.load(lines + rl[None, :].to(tl.int64) * tokens + row[:, None], mask=here, other=0.0)
        if MORE:
            last = tl.load(lines + L.to(tl.int64) * tokens + row, mask=valid, other=0.0)
            dlam = tl.where(rl[None, :] == L - 1, dlam + last[:, None], dlam)
        to = dscales + (base * H + head) * L + row[:, None] * (H * L) + rl[None, :]
        tl.store(to, dlam.to(dscales.dtype.element_ty), mask=here)
