r"""The backward pass of states: what reads them, and what passes over a tile.

``adjoint``: what reads a group, ``E = sum_t lambda_t exp(decay from the group's end to t) q_t do_t^T``, over the
tiles that read it. A group is read by its right sibling's tiles alone, so one program adds them up in order:
no atomics. Each pair of a group and a reader is visited once, as in the forward pass.

``descend``: the adjoint of a group, which is that of the tile it ends with, is ``D[i] = E[i] + exp(decay) D[parent]``,
where ``parent = i + 2**j`` is the place of the smallest group that holds the one stored at ``i`` (``j`` trailing ones
of ``i``).

``carry``: the gate's gradient that passes over a whole tile; see ``finish`` in ``within.py``.
"""

import triton
import triton.language as tl

from src.ops.kernels.states import VARYING, levels_of_document, part_of_state, since_boundary
from src.ops.kernels.tiles import bit_length, document_at, document_of, product, trailing_ones


@triton.jit(do_not_specialize=[*VARYING, "scale", "width"])
def adjoint(
    q, do, cums, columns, totals, E,
    documents, first, N, T, tiles_a_row, tiles, tokens, heads, head0, H, per_group, L, scale, width,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    PACKED: tl.constexpr, LOGLINEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a group (a place in the tree), head and block of values. ``R = 64 << P`` tokens a tile.

    Without packing, programs of large groups come first, since they take longest; ``width`` is a power of two
    that is at least ``tiles_a_row``.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
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
    tile0 = chunk0 >> P
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
        index = tl.minimum(6 + P + 1 + z, L - 1).to(tl.int64)
        lams = columns + (local_head.to(tl.int64) * L + index) * tokens + start
    else:
        if i > last:
            return
        from_tile = i
        count = i * 0 + 1
    acc = tl.zeros([BK, BV], tl.float32)
    run = 0.0
    for r in range(count):
        b = from_tile + r
        begin = ((tile0 + b) << (6 + P)) - chunk0 * 64
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
    tl.store(E + slot * (K * V) + cell, acc.to(E.dtype.element_ty), mask=inner)


@triton.jit(do_not_specialize=VARYING)
def descend(
    E, nodes, spans, stack, cums, dlevels, crossing,
    documents, first, N, T, tiles_a_row, tiles, tokens, heads, head0, H, J, entries,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr,
    PACKED: tl.constexpr, STATE: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """One program a document, head and BLOCK of a state's SIZE elements: E becomes D, in place, right to left.

    A group without a parent is live at the end: with STATE, its gradient there, ``dlevels [J', N, H, SIZE]``, takes the
    parent's part. ``crossing [heads, tiles, slices]``, a slice each program: what passes from a group to its parent or
    to the end, ``exp(decay) <S[i], D[parent]>``. ``stack``: scratch as in ``sweep``, here for each level the newest
    D that is a parent of groups of that level.
    """
    PARTS: tl.constexpr = SIZE // BLOCK
    part, local_head, n = part_of_state(heads, PARTS)
    start, length, chunk0, before = document_at(n, documents, first, N, T, tiles_a_row, PACKED)
    tile0 = chunk0 >> P
    whole = ((chunk0 * 64 + length) >> (6 + P)) - tile0
    at = part * BLOCK + tl.arange(0, BLOCK)
    slots = local_head.to(tl.int64) * tiles + before
    own = stack + levels_of_document(n, local_head, before, J, entries, ROOM) * SIZE + at
    spans += local_head.to(tl.int64) * J * tiles + before
    cross = crossing + slots * PARTS + part
    run = 0.0
    final = dlevels
    if STATE:
        run = since_boundary(cums + local_head.to(tl.int64) * tokens + start, length, chunk0, P)
        final += ((P * N + n).to(tl.int64) * H + head0 + local_head) * SIZE + at
    levels = N.to(tl.int64) * H * SIZE  # from one level to the next
    # Four tiles at a time, so that their loads travel together; aligned, so that their tree is known.
    left = tile0 & 3
    for step in range(tl.where(whole > 0, (whole + left + 3) // 4, 0)):
        i = (whole + left - 1) // 4 * 4 - left - 4 * step
        last = i + 3
        z = trailing_ones(tile0 + last)
        E3, S3 = _both(E, nodes, slots + last, (last >= 0) & (last < whole), at, SIZE)
        E2, S2 = _both(E, nodes, slots + i + 2, (i + 2 >= 0) & (i + 2 < whole), at, SIZE)
        E1, S1 = _both(E, nodes, slots + i + 1, (i + 1 >= 0) & (i + 1 < whole), at, SIZE)
        E0, S0 = _both(E, nodes, slots + i, (i >= 0) & (i < whole), at, SIZE)
        above = tl.load(own + z * SIZE, mask=last + (1 << z) < whole, other=0.0)
        D3, run = _child(E3, S3, above, spans, cross, final, z, last, whole, run, tiles, levels, PARTS, STATE)
        D2, run = _child(E2, S2, D3, spans, cross, final, 0, i + 2, whole, run, tiles, levels, PARTS, STATE)
        D1, run = _child(E1, S1, D3, spans, cross, final, 1, i + 1, whole, run, tiles, levels, PARTS, STATE)
        D0, run = _child(E0, S0, D1, spans, cross, final, 0, i, whole, run, tiles, levels, PARTS, STATE)
        place = E + (slots + i) * SIZE + at
        tl.store(place, D0.to(E.dtype.element_ty), mask=(i >= 0) & (i < whole))
        tl.store(place + SIZE, D1.to(E.dtype.element_ty), mask=(i + 1 >= 0) & (i + 1 < whole))
        tl.store(place + 2 * SIZE, D2.to(E.dtype.element_ty), mask=(i + 2 >= 0) & (i + 2 < whole))
        tl.store(place + 3 * SIZE, D3.to(E.dtype.element_ty), mask=last < whole)
        if last < whole:
            for j in range(2, z):
                tl.store(own + j * SIZE, D3)
        tl.debug_barrier()


@triton.jit
def _both(E, nodes, slot, there, at, SIZE: tl.constexpr):
    place = slot * SIZE + at
    return (
        tl.load(E + place, mask=there, other=0.0).to(tl.float32),
        tl.load(nodes + place, mask=there, other=0.0).to(tl.float32),
    )


@triton.jit
def _child(E, S, D, spans, cross, final, j, i, whole, run, tiles, levels, PARTS: tl.constexpr, STATE: tl.constexpr):
    """``D`` of the group of ``2**j`` tiles that ends at ``i``, given its parent's, and ``run`` behind the group.

    ``run``, of live groups with STATE: the decay from a group's end to the document's last chunk boundary.
    """
    up = i + (1 << j)
    there = (i >= 0) & (up < whole)
    weight = tl.where(there, tl.exp(tl.load(spans + j * tiles + up, mask=there, other=0.0)), 0.0)
    if STATE:
        live = (i >= 0) & (i < whole) & (up >= whole)
        D = tl.where(live, tl.load(final + j * levels, mask=live, other=0.0), D)
        weight = tl.where(live, tl.exp(run), weight)
        run += tl.load(spans + j * tiles + i, mask=live, other=0.0)
        there = there | live
    tl.store(cross + i * PARTS, weight * tl.sum(S * D), mask=there)
    return E + weight * D, run


@triton.jit(do_not_specialize=VARYING)
def root_adjoint(
    q, do, cums, columns, totals, roots, dlevels, droots, root_crossing,
    documents, first, N, T, tiles_a_row, tiles, tokens, heads, head0, H, per_group, L, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    PACKED: tl.constexpr, STATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a group of an earlier call, document, head and block of values: its gradient ``droots``."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    part = pid % NV
    local_head = (pid // NV) % heads
    n = (pid // (NV * heads)) % N
    j = pid // (NV * heads * N)
    start, length, chunk0, before = document_at(n, documents, first, N, T, tiles_a_row, PACKED)
    if (chunk0 >> j) & 1 == 0:
        return
    newest = ((chunk0 >> j) << j) - 1  # the group's last chunk
    tile0 = chunk0 >> P
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
        begin = ((tile0 + i) << (6 + P)) - chunk0 * 64
        valid = (row >= -begin) & (row < length - begin)
        base = start + begin
        here = tl.maximum((tile0 + i) << P, chunk0)
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
        run += since_boundary(sums, length, chunk0, P)
        level = bit_length((end >> 6) ^ newest) - 1
        to = ((level * N + n).to(tl.int64) * H + head) * (K * V) + cell
        final = tl.load(dlevels + to, mask=inner, other=0.0) * tl.exp(run)
        acc += final
        root = tl.load(roots + at, mask=inner, other=0.0).to(tl.float32)
        tl.store(root_crossing + ((j * N + n) * heads + local_head).to(tl.int64) * NV + part, tl.sum(final * root))
    tl.store(droots + at, acc, mask=inner)


@triton.jit(do_not_specialize=[*VARYING, "JR", "parts", "slices"])
def carry(
    crossing, crossed, root_crossing, root_crossed, passing,
    documents, first, N, T, tiles_a_row, tiles, heads, J, JR, parts, slices,
    P: tl.constexpr, WIDTH: tl.constexpr, SLICES: tl.constexpr,
    PACKED: tl.constexpr, ROOTS: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """``passing [heads, tiles]``: the gate's gradient through a tile, of all pairs of tokens before and behind it.

    From ``crossing [heads, tiles, slices]`` of ``descend``, ``crossed [heads, J, chunks]`` and ``root_crossed [heads,
    chunks]`` of ``rows``, and ``root_crossing [JR, N, heads, parts]`` of ``root_adjoint``, a part each block of values.

    One program a document and head walks from the last tile to the first. A pair belongs to a group before the
    tile, one a set bit of its index, and is read by a tile behind, inside the group's right sibling (``crossed``),
    or behind that, through the group's parent (``crossing``). Sums of what does cross: nothing has to cancel.
    """
    pid = tl.program_id(0)
    local_head = pid % heads
    n = pid // heads
    _, length, chunk0, before = document_at(n, documents, first, N, T, tiles_a_row, PACKED)
    tile0 = chunk0 >> P
    end = chunk0 * 64 + length
    whole = (end >> (6 + P)) - tile0
    count = tl.where(length > 0, ((end + (64 << P) - 1) >> (6 + P)) - tile0, 0)
    line = local_head.to(tl.int64)
    acc = tl.zeros([WIDTH], tl.float32)
    from_roots = 0.0
    if ROOTS and STATE:
        for j in range(JR):
            if (chunk0 >> j) & 1 == 1:
                for part in range(parts):
                    from_roots += tl.load(
                        root_crossing + ((j * N + n) * heads + local_head).to(tl.int64) * parts + part
                    )
    for step in range(0, whole + 1, 4):
        # Four tiles at a time, so that their loads travel together.
        i = whole - step
        bits0, entered0, outside0, own0, root0 = _around(
            crossing, crossed, root_crossed, line, before, tile0, i, step == 0, count,
            tiles, J, slices, WIDTH, SLICES, P, ROOTS, STATE,
        )  # fmt: skip
        bits1, entered1, outside1, own1, root1 = _around(
            crossing, crossed, root_crossed, line, before, tile0, i - 1, False, count,
            tiles, J, slices, WIDTH, SLICES, P, ROOTS, STATE,
        )  # fmt: skip
        bits2, entered2, outside2, own2, root2 = _around(
            crossing, crossed, root_crossed, line, before, tile0, i - 2, False, count,
            tiles, J, slices, WIDTH, SLICES, P, ROOTS, STATE,
        )  # fmt: skip
        bits3, entered3, outside3, own3, root3 = _around(
            crossing, crossed, root_crossed, line, before, tile0, i - 3, False, count,
            tiles, J, slices, WIDTH, SLICES, P, ROOTS, STATE,
        )  # fmt: skip
        for u in tl.static_range(4):
            bits = bits0 if u == 0 else bits1 if u == 1 else bits2 if u == 2 else bits3
            entered = entered0 if u == 0 else entered1 if u == 1 else entered2 if u == 2 else entered3
            outside = outside0 if u == 0 else outside1 if u == 1 else outside2 if u == 2 else outside3
            acc = tl.where(bits, tl.where(entered, outside, acc), 0.0)
            there = (i - u >= 0) & (i - u < count)
            tl.store(passing + line * tiles + before + i - u, tl.sum(acc) + from_roots, mask=there)
            acc += own0 if u == 0 else own1 if u == 1 else own2 if u == 2 else own3
            from_roots += root0 if u == 0 else root1 if u == 1 else root2 if u == 2 else root3


@triton.jit
def _around(
    crossing, crossed, root_crossed, line, before, tile0, i, at_end, count, tiles, J, slices,
    WIDTH: tl.constexpr, SLICES: tl.constexpr, P: tl.constexpr, ROOTS: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """Of tile ``i``: the levels that it reads, those whose right siblings end with it, what passes behind these, and
    what it adds itself, to each level and to the groups of earlier calls."""
    levels = tl.arange(0, WIDTH)
    b = tile0 + i
    slot = ((b >> levels) << levels) - 1 - tile0  # where the group's state stands
    bits = ((b >> levels) & 1 == 1) & (levels < J) & (slot >= 0) & (i >= 0)
    entered = ((b & ((1 << levels) - 1)) == (1 << levels) - 1) | at_end
    asked = bits & entered
    if not STATE:
        asked = asked & (not at_end)
    AT_A_TIME: tl.constexpr = 16 if SLICES > 16 else SLICES
    outside = tl.zeros([WIDTH], tl.float32)
    for first_piece in range(0, SLICES, AT_A_TIME):
        piece = first_piece + tl.arange(0, AT_A_TIME)
        pieces = crossing + ((line * tiles + before + slot) * slices)[:, None] + piece[None, :]
        outside += tl.sum(tl.load(pieces, mask=asked[:, None] & (piece < slices)[None, :], other=0.0), 1)
    own = tl.zeros([WIDTH], tl.float32)
    root = 0.0
    there = (i >= 0) & (i < count)
    for chunk in tl.static_range(1 << P):
        at = ((line * J + levels) * tiles + before + i << P) + chunk
        own += tl.load(crossed + at, mask=bits & there, other=0.0)
        if ROOTS:
            root += tl.load(root_crossed + (line * tiles + before + i << P) + chunk, mask=there, other=0.0)
    return bits, entered, outside, own, root
