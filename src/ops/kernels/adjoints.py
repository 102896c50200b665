r"""The backward pass of states: what reads them, and what passes over a tile.

``adjoint``: what reads a group, ``E = sum_t lambda_t exp(decay from the group's end to t) q_t do_t^T``, over the
tiles that read it. A group is read by its right sibling's tiles alone, so one program adds them up in order:
no atomics. Each pair of a group and a reader is visited once, as in the forward pass.

The adjoint of a tile's own state is ``D[i] = E[i] + exp(decay) D[parent]``, where ``parent = i + 2**j`` is the
place of the smallest group that holds the one stored at ``i`` (``j`` trailing ones of ``i``): a path of at most
``log n`` steps, which ``columns_back`` in ``between.py`` walks for itself.

``carry``: the gate's gradient that passes over a whole tile; see ``finish`` in ``within.py``.
"""

import triton
import triton.language as tl

from src.ops.kernels.states import VARYING, since_boundary
from src.ops.kernels.tiles import bit_length, bit_of, document_at, document_of, product, trailing_ones


@triton.jit(do_not_specialize=[*VARYING, "scale", "width"])
def adjoint(
    q, do, cums, columns, totals, spans, nodes, dlevels, E, crossing,
    documents, first, N, T, tiles_a_row, tiles, tokens, heads, head0, H, per_group, L, J, scale, width,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, TILE_BITS: tl.constexpr,
    PACKED: tl.constexpr, LOGLINEAR: tl.constexpr, STATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a group (a place in the tree), head and block of values. ``R = 2**TILE_BITS`` tokens a tile.

    Without packing, programs of large groups come first, since they take longest; ``width`` is a power of two
    that is at least ``tiles_a_row``. With STATE, ``dlevels`` reaches the groups that are live at the end; the
    gate's gradient through them goes to ``crossing``.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    SP: tl.constexpr = TILE_BITS - 6
    pid = tl.program_id(0)
    part = pid % NV
    local_head = (pid // NV) % heads
    place = pid // (NV * heads)
    if PACKED:
        n = document_of(place, first, N, tiles_a_row, PACKED)
        start, length, chunk0, before = document_at(n, documents, first, N, T, tiles_a_row, PACKED)
        i = place - before
    else:
        n = place % N
        order = place // N
        start, length, chunk0, before = document_at(n, documents, first, N, T, tiles_a_row, PACKED)
        i = width - 1
        if order > 0:
            rank = bit_length(order) - 1
            i = (2 * (order - (1 << rank)) + 1) * (width >> (rank + 1)) - 1
    tile0 = chunk0 >> SP
    A = tile0 + i
    end = chunk0 * 64 + length
    last = (end + R - 1) // R - 1 - tile0  # the document's last tile, a short one included
    whole = end // R - tile0
    head = head0 + local_head
    group = head // per_group
    groups = H // per_group
    rk = tl.arange(0, BK)
    rv = part * BV + tl.arange(0, BV)
    row = tl.arange(0, R)
    sums = cums + local_head.to(tl.int64) * tokens + start
    if LOGLINEAR:
        if i >= whole:
            return
        z = trailing_ones(A)
        from_tile = i + 1
        count = tl.minimum(1 << z, last - i)
        index = tl.minimum(TILE_BITS + 1 + z, L - 1).to(tl.int64)
        lams = columns + (local_head.to(tl.int64) * L + index) * tokens + start
    else:
        if i > last:
            return
        z = i * 0
        from_tile = i
        count = i * 0 + 1
    acc = tl.zeros([BK, BV], tl.float32)
    run = 0.0
    for r in range(count):
        b = from_tile + r
        begin = ((tile0 + b) << TILE_BITS) - chunk0 * 64
        valid = (row >= -begin) & (row < length - begin)
        base = start + begin
        weight = tl.exp(tl.load(sums + begin + row, mask=valid, other=0.0) + run) * scale
        if LOGLINEAR:
            weight *= tl.load(lams + begin + row, mask=valid, other=0.0).to(tl.float32)
        qT = tl.load(
            q + (base * groups + group) * K + row[None, :] * (groups * K) + rk[:, None],
            mask=valid[None, :] & (rk[:, None] < K),
            other=0.0,
        )
        grad = tl.load(
            do + (base * H + head) * V + row[:, None] * (H * V) + rv[None, :],
            mask=valid[:, None] & (rv[None, :] < V),
            other=0.0,
        )
        acc += product(qT, (grad * weight[:, None]).to(grad.dtype), PRECISION)
        run += tl.load(totals + local_head.to(tl.int64) * tiles + before + b)
    slot = local_head.to(tl.int64) * tiles + before + i
    cell = rk[:, None] * V + rv[None, :]
    inner = (rk[:, None] < K) & (rv[None, :] < V)
    if LOGLINEAR and STATE:
        # Live at the end: the groups that a tile behind the last whole one would read.
        rest = tile0 + whole
        run = since_boundary(sums, length, chunk0, SP)
        while rest > A + 1:
            run += tl.load(
                spans + (local_head * J + bit_of(rest & -rest)).to(tl.int64) * tiles + before + rest - 1 - tile0
            )
            rest = rest & (rest - 1)
        if rest == A + 1:
            at = ((z + SP) * N + n).to(tl.int64) * H + head
            final = tl.load(dlevels + at * (K * V) + cell, mask=inner, other=0.0) * tl.exp(run)
            acc += final
            node = tl.load(nodes + slot * (K * V) + cell, mask=inner, other=0.0).to(tl.float32)
            tl.store(crossing + slot * NV + part, tl.sum(final * node))
    tl.store(E + slot * (K * V) + cell, acc.to(E.dtype.element_ty), mask=inner)


@triton.jit(do_not_specialize=VARYING)
def root_adjoint(
    q, do, cums, columns, since, totals, roots, dlevels, droots, root_crossing,
    documents, first, N, T, tiles_a_row, tiles, tokens, heads, head0, H, per_group, L, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, TILE_BITS: tl.constexpr,
    PACKED: tl.constexpr, STATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a group of an earlier call, document, head and block of values: its gradient ``droots``."""
    NV: tl.constexpr = (V + BV - 1) // BV
    SP: tl.constexpr = TILE_BITS - 6
    pid = tl.program_id(0)
    part = pid % NV
    local_head = (pid // NV) % heads
    n = (pid // (NV * heads)) % N
    j = pid // (NV * heads * N)
    start, length, chunk0, before = document_at(n, documents, first, N, T, tiles_a_row, PACKED)
    if (chunk0 >> j) & 1 == 0:
        return
    newest = ((chunk0 >> j) << j) - 1  # the group's last chunk
    tile0 = chunk0 >> SP
    end = chunk0 * 64 + length
    count = tl.where(length > 0, (end + R - 1) // R - tile0, 0)
    head = head0 + local_head
    group = head // per_group
    groups = H // per_group
    rk = tl.arange(0, BK)
    rv = part * BV + tl.arange(0, BV)
    cell = rk[:, None] * V + rv[None, :]
    inner = (rk[:, None] < K) & (rv[None, :] < V)
    sums = cums + local_head.to(tl.int64) * tokens + start
    row = tl.arange(0, R)
    acc = tl.zeros([BK, BV], tl.float32)
    run = 0.0
    for i in range(count):
        begin = ((tile0 + i) << TILE_BITS) - chunk0 * 64
        valid = (row >= -begin) & (row < length - begin)
        base = start + begin
        here = tl.maximum((tile0 + i) << SP, chunk0)
        index = tl.minimum(6 + bit_length(here ^ newest), L - 1).to(tl.int64)
        lam = tl.load(columns + (local_head.to(tl.int64) * L + index) * tokens + base + row, mask=valid, other=0.0)
        weight = tl.exp(tl.load(sums + begin + row, mask=valid, other=0.0) + run) * scale * lam.to(tl.float32)
        qT = tl.load(
            q + (base * groups + group) * K + row[None, :] * (groups * K) + rk[:, None],
            mask=valid[None, :] & (rk[:, None] < K),
            other=0.0,
        )
        grad = tl.load(
            do + (base * H + head) * V + row[:, None] * (H * V) + rv[None, :],
            mask=valid[:, None] & (rv[None, :] < V),
            other=0.0,
        )
        acc += product(qT, (grad * weight[:, None]).to(grad.dtype), PRECISION)
        if i < end // R - tile0:
            run += tl.load(totals + local_head.to(tl.int64) * tiles + before + i)
    at = ((j * N + n).to(tl.int64) * H + head) * (K * V) + cell
    if STATE:
        # It lives on in the group of the new state that holds it, if only decayed.
        run += since_boundary(sums, length, chunk0, SP)
        level = bit_length((end >> 6) ^ newest) - 1
        to = ((level * N + n).to(tl.int64) * H + head) * (K * V) + cell
        final = tl.load(dlevels + to, mask=inner, other=0.0) * tl.exp(run)
        acc += final
        root = tl.load(roots + at, mask=inner, other=0.0).to(tl.float32)
        tl.store(root_crossing + ((j * N + n) * heads + local_head).to(tl.int64) * NV + part, tl.sum(final * root))
    tl.store(droots + at, acc, mask=inner)


@triton.jit(do_not_specialize=[*VARYING, "JR", "parts"])
def carry(
    crossing, crossed, root_crossing, root_crossed, passing,
    documents, first, N, T, tiles_a_row, tiles, heads, J, JR, parts,
    TILE_BITS: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, ROOTS: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """``passing [heads, tiles]``: the gate's gradient through a tile, of all pairs of tokens before and behind it.

    One program a document and head walks from the last tile to the first. A pair belongs to a group before the
    tile, one a set bit of its index, and is read by a tile behind, inside the group's right sibling (``crossed``),
    or behind that, through the group's parent (``crossing``). Sums of what does cross: nothing has to cancel.
    """
    SP: tl.constexpr = TILE_BITS - 6
    pid = tl.program_id(0)
    local_head = pid % heads
    n = pid // heads
    _, length, chunk0, before = document_at(n, documents, first, N, T, tiles_a_row, PACKED)
    tile0 = chunk0 >> SP
    end = chunk0 * 64 + length
    whole = (end >> TILE_BITS) - tile0
    count = tl.where(length > 0, ((end + (1 << TILE_BITS) - 1) >> TILE_BITS) - tile0, 0)
    line = local_head.to(tl.int64)
    levels = tl.arange(0, WIDTH)
    within = levels < J
    acc = tl.zeros([WIDTH], tl.float32)
    from_roots = 0.0
    if ROOTS and STATE:
        for j in range(JR):
            if (chunk0 >> j) & 1 == 1:
                for part in range(parts):
                    from_roots += tl.load(
                        root_crossing + ((j * N + n) * heads + local_head).to(tl.int64) * parts + part
                    )
    for step in range(whole + 1):
        i = whole - step
        b = tile0 + i
        bits = ((b >> levels) & 1 == 1) & within
        slot = ((b >> levels) << levels) - 1 - tile0  # where the group's state stands
        bits = bits & (slot >= 0)
        entered = (step == 0) | ((b & ((1 << levels) - 1)) == (1 << levels) - 1)
        outside = tl.zeros([WIDTH], tl.float32)
        for part in range(parts):
            at = crossing + (line * tiles + before + slot) * parts + part
            outside += tl.load(at, mask=bits & entered & ((step > 0) | STATE), other=0.0)
        acc = tl.where(bits, tl.where(entered, outside, acc), 0.0)
        if i < count:
            tl.store(passing + line * tiles + before + i, tl.sum(acc) + from_roots)
            acc += tl.load(crossed + (line * J + levels) * tiles + before + i, mask=bits, other=0.0)
            if ROOTS:
                from_roots += tl.load(root_crossed + line * tiles + before + i)
