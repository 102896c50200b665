r"""Outputs: attention inside a tile, and one product a group of tiles before it.

    o_t  =  sum_{s in t's block} lambda_{t, level(t,s)} exp(G_t - G_s) (q_t . k_s) v_s
          + lambda_t exp(G_t - G_b) sum_{s in the block before, of the same tile} (q_t . k_s) exp(G_b - G_s) v_s
          + sum_j lambda_{t,j} exp(G_t) exp(decay from the group's end to the tile) q_t^T S_j

The level is one number for a pair of blocks and for a group: only the square on the diagonal needs a mask of
levels, made in registers from ``t XOR s``. ``q k^T`` is one product for all heads of a q/k group.
"""

import triton
import triton.language as tl

from src.ops.kernels.states import VARYING
from src.ops.kernels.tiles import (
    bit_length,
    bit_of,
    decay,
    document_at,
    document_of,
    group_scales,
    level_weights,
    product,
    reads,
)


@triton.jit(do_not_specialize=[*VARYING, "scale", "blocks", "block0", "heads_a_block"])
def output(
    q, k, v, cums, columns, nodes, spans, since, roots, o,
    documents, first, N, T, tiles_a_row, tiles, tokens, head0, H, per_group, L, J,
    scale, blocks, block0, heads_a_block,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr,
    PACKED: tl.constexpr, LOGLINEAR: tl.constexpr, NODES: tl.constexpr, ROOTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a block of ``C = 2**BITS`` tokens, some heads of a group, and a block of values."""
    NV: tl.constexpr = (V + BV - 1) // BV
    C: tl.constexpr = 1 << BITS
    pid = tl.program_id(0)
    part = pid % NV
    block = (pid // NV) % blocks
    at = pid // (NV * blocks)
    tile = at >> P
    sub = at & ((1 << P) - 1)
    n = document_of(tile, first, N, tiles_a_row, PACKED)
    start, length, chunk0, before = document_at(n, documents, first, N, T, tiles_a_row, PACKED)
    tile0 = chunk0 >> P
    A = tile0 + tile - before
    begin = ((A << P) - chunk0) * 64 + sub * C
    if (begin >= length) | (begin + C <= 0):
        return
    group = ((block0 + block) * heads_a_block) // per_group
    groups = H // per_group
    rk = tl.arange(0, BK)
    rv = part * BV + tl.arange(0, BV)
    inside = tl.arange(0, C)
    valid = (inside >= -begin) & (inside < length - begin)
    base = start + begin
    causal = (inside[:, None] >= inside[None, :]) & valid[None, :]

    query = tl.load(
        q + (base * groups + group) * K + inside[:, None] * (groups * K) + rk[None, :],
        mask=valid[:, None] & (rk[None, :] < K),
        other=0.0,
    )
    kT = tl.load(
        k + (base * groups + group) * K + inside[None, :] * (groups * K) + rk[:, None],
        mask=valid[None, :] & (rk[:, None] < K),
        other=0.0,
    )
    scores = product(query, kT, PRECISION) * scale
    if P == 1:
        # The block before, in the same tile: a whole one, unless the document begins with this one.
        has_left = (sub == 1) & (begin >= C)
        left = base - C  # all of its keys, also where this block is a short last one
        kT = tl.load(
            k + (left * groups + group) * K + inside[None, :] * (groups * K) + rk[:, None],
            mask=(rk[:, None] < K) & has_left,
            other=0.0,
        )
        left_scores = (product(query, kT, PRECISION) * scale).to(query.dtype)
    count = 0
    if NODES:
        count = reads(A, tile0) if LOGLINEAR else 1

    cell = inside[:, None] * (H * V) + rv[None, :]
    for i in range(heads_a_block):
        local_head = block * heads_a_block + i
        head = head0 + local_head
        sums = cums + local_head.to(tl.int64) * tokens + base
        G = tl.load(sums + inside, mask=valid, other=0.0)
        value = tl.load(v + (base * H + head) * V + cell, mask=valid[:, None] & (rv[None, :] < V), other=0.0)
        if P == 1:
            # Here, so that it travels together with the own block's.
            edge = tl.load(sums - 1, mask=has_left, other=0.0)
            G_left = tl.load(sums - C + inside, mask=has_left, other=0.0)
            left_value = tl.load(v + (left * H + head) * V + cell, mask=has_left & (rv[None, :] < V), other=0.0)
        weight = decay(G[:, None] - G[None, :])
        if LOGLINEAR:
            lams = columns + local_head.to(tl.int64) * L * tokens + base
            weight *= level_weights(lams, tokens, inside, valid, L, BITS)
        attention = tl.where(causal, scores * weight, 0.0).to(value.dtype)
        acc = product(attention, value, PRECISION)
        if P == 1:
            if has_left:
                left_value = (left_value * decay(edge - G_left)[:, None]).to(value.dtype)
                strength = decay(G - edge)
                if LOGLINEAR:
                    index = tl.minimum(BITS + 1, L - 1).to(tl.int64)
                    strength *= tl.load(lams + index * tokens + inside, mask=valid, other=0.0).to(tl.float32)
                acc += strength[:, None] * product(left_scores, left_value, PRECISION)
        if NODES:
            strength = tl.exp(G) * scale
            rest = A
            run = 0.0
            if LOGLINEAR:
                lam = group_scales(lams, rest, BITS + P + 1, tokens, inside, valid, L)
            for _ in range(count):
                slot = tile
                weight_row = strength
                if LOGLINEAR:
                    slot = before + rest - 1 - tile0
                    weight_row = strength * lam * tl.exp(run)
                    run += tl.load(spans + (local_head * J + bit_of(rest & -rest)).to(tl.int64) * tiles + slot)
                    rest = rest & (rest - 1)
                    # The next group's, so that it travels while this one is used.
                    lam = group_scales(lams, rest, BITS + P + 1, tokens, inside, valid, L)
                node = tl.load(
                    nodes + (local_head.to(tl.int64) * tiles + slot) * (K * V) + rk[:, None] * V + rv[None, :],
                    mask=(rk[:, None] < K) & (rv[None, :] < V),
                    other=0.0,
                )
                acc += weight_row[:, None] * product(query, node, PRECISION)
        if ROOTS:
            # Groups of earlier calls: each sees one level, whichever its tokens are.
            here = (chunk0 * 64 + begin) >> 6
            here = tl.where(begin < 0, chunk0, here)
            strength = tl.exp(G + tl.load(since + local_head.to(tl.int64) * tiles + tile)) * scale
            rest = chunk0
            while rest > 0:
                j = bit_of(rest & -rest)
                index = tl.minimum(6 + bit_length(here ^ (rest - 1)), L - 1).to(tl.int64)
                lam = tl.load(lams + index * tokens + inside, mask=valid, other=0.0).to(tl.float32)
                root = tl.load(
                    roots + ((j * N + n).to(tl.int64) * H + head) * (K * V) + rk[:, None] * V + rv[None, :],
                    mask=(rk[:, None] < K) & (rv[None, :] < V),
                    other=0.0,
                )
                acc += (strength * lam)[:, None] * product(query, root.to(query.dtype), PRECISION)
                rest = rest & (rest - 1)
        tl.store(
            o + (base * H + head) * V + cell,
            acc.to(o.dtype.element_ty),
            mask=valid[:, None] & (rv[None, :] < V),
        )
