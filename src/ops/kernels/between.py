r"""The backward pass between tiles. ``do`` is the gradient of the outputs; everything else as in the forward pass.

``rows``: with ``X_j = do S_j^T``, ``dlambda_{t,j} = w <q_t, X_{j,t}>`` and ``dq_t += lambda w X_{j,t}``.
``columns_back``: with ``D`` the adjoint of a tile's own state, ``dv_s = exp(G_R - G_s) D^T k_s`` and
``dk_s = exp(G_R - G_s) D v_s``.
"""

import triton
import triton.language as tl

from src.ops.kernels.states import VARYING
from src.ops.kernels.tiles import bit_length, bit_of, decay, document_at, document_of, product, reads

BLOCKS = ["scale", "blocks", "block0", "heads_a_block", "partials"]


@triton.jit
def through(
    source, do, grad, row, valid, H,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``X = do S^T``, ``[R, BK]``. ``do`` points to the first row; where one block of values is all, ``grad`` is it."""
    rk = tl.arange(0, BK)
    NV: tl.constexpr = (V + BV - 1) // BV
    X = tl.zeros([R, BK], tl.float32)
    for part in range(NV):
        rv = part * BV + tl.arange(0, BV)
        if NV > 1:
            grad = tl.load(
                do + row[:, None] * (H * V) + rv[None, :],
                mask=valid[:, None] & (rv[None, :] < V),
                other=0.0,
            )
        nodeT = tl.load(source + rk[None, :] * V + rv[:, None], mask=(rk[None, :] < K) & (rv[:, None] < V), other=0.0)
        X += product(grad, nodeT.to(grad.dtype), PRECISION)
    return X


@triton.jit(do_not_specialize=[*VARYING, *BLOCKS])
def rows(
    q, do, cums, columns, nodes, spans, since, roots, dq, dcolumns, row_gates, crossed, root_crossed,
    documents, first, N, T, tiles_a_row, tiles, tokens, head0, H, per_group, L, J,
    scale, blocks, block0, heads_a_block, partials,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr,
    PACKED: tl.constexpr, LOGLINEAR: tl.constexpr, ROOTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a chunk of ``C = 2**BITS`` queries and some heads of a group.

    ``dq [partials, tokens, G, K]``: partial sums over heads. ``dcolumns [heads, L + 2, tokens]``:
    the level scales' gradient; line ``L`` takes the levels that share the last scale. ``row_gates [heads, tokens]``:
    ``sum_j lambda_j dlambda_j``; its sum over a chunk goes to ``crossed [heads, J, chunks]``, a level each, and that
    of groups of earlier calls to ``root_crossed [heads, chunks]``; a tile has ``2**P`` chunks.
    """
    C: tl.constexpr = 1 << BITS
    pid = tl.program_id(0)
    block = pid % blocks
    chunk = pid // blocks
    tile = chunk >> P
    n = document_of(tile, first, N, tiles_a_row, PACKED)
    start, length, chunk0, before = document_at(n, documents, first, N, T, tiles_a_row, PACKED)
    tile0 = chunk0 >> P
    A = tile0 + tile - before
    begin = ((A << P) - chunk0) * 64
    if begin >= length:
        return
    begin += (chunk & ((1 << P) - 1)) * C  # none of its queries may be there, and its sums are 0 then
    in_group = per_group // heads_a_block
    group = (block0 + block) // in_group
    groups = H // per_group
    rk = tl.arange(0, BK)
    rv = tl.arange(0, BV)
    row = tl.arange(0, C)
    valid = (row >= -begin) & (row < length - begin)
    base = start + begin
    query = tl.load(
        q + (base * groups + group) * K + row[:, None] * (groups * K) + rk[None, :],
        mask=valid[:, None] & (rk[None, :] < K),
        other=0.0,
    )
    acc = tl.zeros([C, BK], tl.float32)
    count = reads(A, tile0) if LOGLINEAR else 1
    for i in range(heads_a_block):
        local_head = block * heads_a_block + i
        head = head0 + local_head
        line = local_head.to(tl.int64)
        if LOGLINEAR:
            lams = columns + line * L * tokens + base
            dlams = dcolumns + line * (L + 2) * tokens + base
        strength = tl.exp(tl.load(cums + line * tokens + base + row, mask=valid, other=0.0)) * scale
        grads = do + (base * H + head) * V
        grad = tl.load(grads + row[:, None] * (H * V) + rv[None, :], mask=valid[:, None] & (rv[None, :] < V), other=0.0)
        gates = tl.zeros([C], tl.float32)
        shared = tl.zeros([C], tl.float32)
        rest = A
        run = 0.0
        for _ in range(count):
            slot = tile
            if LOGLINEAR:
                slot = before + rest - 1 - tile0
            X = through(nodes + (line * tiles + slot) * (K * V), grads, grad, row, valid, H, C, K, V, BK, BV, PRECISION)
            weight = strength
            if LOGLINEAR:
                weight = strength * tl.exp(run)
            dlam = weight * tl.sum(query * X, 1)
            if LOGLINEAR:
                j = bit_of(rest & -rest)
                run += tl.load(spans + (line * J + j) * tiles + slot)
                index = BITS + P + 1 + j
                lam = tl.load(lams + tl.minimum(index, L - 1).to(tl.int64) * tokens + row, mask=valid, other=0.0)
                if index < L - 1:
                    tl.store(dlams + index.to(tl.int64) * tokens + row, dlam, mask=valid)
                else:
                    shared += dlam
                weight *= lam.to(tl.float32)
                dlam *= lam.to(tl.float32)
                tl.store(crossed + ((line * J + j) * tiles << P) + chunk, tl.sum(dlam))
                rest = rest & (rest - 1)
            gates += dlam
            acc += weight[:, None] * X
        if ROOTS:
            here = tl.maximum(A << P, chunk0)
            strength *= tl.exp(tl.load(since + line * tiles + tile))
            rest = chunk0
            total = 0.0
            while rest > 0:
                j = bit_of(rest & -rest)
                source = roots + ((j * N + n).to(tl.int64) * H + head) * (K * V)
                X = through(source, grads, grad, row, valid, H, C, K, V, BK, BV, PRECISION)
                dlam = strength * tl.sum(query * X, 1)
                index = 6 + bit_length(here ^ (rest - 1))
                lam = tl.load(lams + tl.minimum(index, L - 1).to(tl.int64) * tokens + row, mask=valid, other=0.0)
                if index < L - 1:
                    # A group that began in an earlier call shares its level with what this call added to it.
                    tl.debug_barrier()
                    to = dlams + index.to(tl.int64) * tokens + row
                    tl.store(to, tl.load(to, mask=valid, other=0.0) + dlam, mask=valid)
                else:
                    shared += dlam
                dlam *= lam.to(tl.float32)
                gates += dlam
                total += tl.sum(dlam)
                acc += (strength * lam.to(tl.float32))[:, None] * X
                rest = rest & (rest - 1)
            tl.store(root_crossed + (line * tiles << P) + chunk, total)
        tl.store(row_gates + line * tokens + base + row, gates, mask=valid)
        if LOGLINEAR:
            tl.store(dlams + L.to(tl.int64) * tokens + row, shared, mask=valid)
    # Heads of an earlier pass have been here.
    turn = (block0 + block) % in_group
    to = dq + ((turn % partials * tokens + base) * groups + group) * K + row[:, None] * (groups * K) + rk[None, :]
    inner = valid[:, None] & (rk[None, :] < K)
    acc += tl.load(to, mask=inner & (turn >= partials), other=0.0)
    tl.store(to, acc, mask=inner)


@triton.jit(do_not_specialize=[*VARYING, *BLOCKS])
def columns_back(
    k, v, cums, totals, adjoints, dhalf, dv, dk, column_gates,
    documents, first, N, T, tiles_a_row, tiles, tokens, head0, H, per_group,
    blocks, block0, heads_a_block, partials,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    PACKED: tl.constexpr, LOGLINEAR: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a tile of ``R = 64 << P`` keys and some heads of a group.

    ``dv [tokens, H, V]`` and the partial sums ``dk [partials, tokens, G, K]`` of what reaches a token from behind its
    tile, through ``adjoints [heads, tiles, K, V]``; ``column_gates [heads, tokens]``: ``<v_s, dv_s>`` of these. With
    HALF, the first chunk of a short last tile has the gradient ``dhalf [N, H, K, V]``.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    block = pid % blocks
    tile = pid // blocks
    n = document_of(tile, first, N, tiles_a_row, PACKED)
    start, length, chunk0, before = document_at(n, documents, first, N, T, tiles_a_row, PACKED)
    begin = ((((chunk0 >> P) + tile - before) << P) - chunk0) * 64
    if begin >= length:
        return
    whole = begin + R <= length
    in_group = per_group // heads_a_block
    group = (block0 + block) // in_group
    groups = H // per_group
    rk = tl.arange(0, BK)
    row = tl.arange(0, R)
    valid = (row >= -begin) & (row < length - begin)
    base = start + begin
    key = tl.load(
        k + (base * groups + group) * K + row[:, None] * (groups * K) + rk[None, :],
        mask=valid[:, None] & (rk[None, :] < K),
        other=0.0,
    )
    dkT = tl.zeros([BK, R], tl.float32)
    for h in range(heads_a_block):
        local_head = block * heads_a_block + h
        head = head0 + local_head
        line = local_head.to(tl.int64)
        G = tl.load(cums + line * tokens + base + row, mask=valid, other=0.0)
        total = tl.load(totals + line * tiles + tile)
        edge = decay(total - G)
        gates = tl.zeros([R], tl.float32)
        for part in range(NV):
            rv = part * BV + tl.arange(0, BV)
            cell = rk[:, None] * V + rv[None, :]
            inner = (rk[:, None] < K) & (rv[None, :] < V)
            at = (base * H + head) * V
            values = row[:, None] * (H * V) + rv[None, :]
            here = valid[:, None] & (rv[None, :] < V)
            value = tl.load(v + at + values, mask=here, other=0.0)  # early, so that it has arrived when it is needed
            # Of the log-linear form, a tile that is not whole has no state.
            there = inner & (whole | (not LOGLINEAR))
            D = tl.load(adjoints + (line * tiles + tile) * (K * V) + cell, mask=there, other=0.0)
            if HALF:
                if (not whole) & (begin + 64 <= length) & (begin + 64 > 0):
                    D = tl.load(dhalf + (n.to(tl.int64) * H + head) * (K * V) + cell, mask=inner, other=0.0).to(D.dtype)
                    middle = tl.load(cums + line * tokens + base + 63)
                    edge = tl.where(row < 64, decay(middle - G), 0.0)
            back = edge[:, None] * product(key, D, PRECISION)
            gates += tl.sum(value * back, 1)
            tl.store(dv + at + values, back.to(dv.dtype.element_ty), mask=here)
            dkT += product(D, tl.trans((value * edge[:, None]).to(key.dtype)), PRECISION)
        tl.store(column_gates + line * tokens + base + row, gates, mask=valid)
    turn = (block0 + block) % in_group
    to = dk + ((turn % partials * tokens + base) * groups + group) * K + row[None, :] * (groups * K) + rk[:, None]
    innerT = valid[None, :] & (rk[:, None] < K)
    dkT += tl.load(to, mask=innerT & (turn >= partials), other=0.0)
    tl.store(to, dkT, mask=innerT)
