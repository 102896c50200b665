r"""From tokens to the states that tiles read: one pass over the tokens, then one over the tiles.

``prepare`` makes each tile's own state (its leaf), ``exp`` decayed to the tile's end,

    leaf = sum_s exp(G_R - G_s) k_s v_s^T ,     G the running sum of g inside the tile,

and lays the gates out so that later kernels read them along the tokens.

``sweep`` (log-linear) turns leaves into groups, in place. Group ``i`` of ``2**j`` tiles is stored where its last
tile's leaf was. Odd groups are right children, which nobody reads, and their places are those of their parents:
a Fenwick tree over the tiles, with one place a tile. Tile ``A`` reads one group a set bit of ``A``, at the places
``A - 1``, ``(A without its lowest bit) - 1``, …

``scan`` (linear) turns leaves into the state before each tile, in place.
"""

import triton
import triton.language as tl

from src.ops.kernels.tiles import bit_length, bit_of, decay, document_at, document_of, product

VARYING = ["N", "T", "tiles_a_row", "tiles", "tokens", "heads", "head0", "H", "L", "J", "per_group", "entries"]
"""Sizes that no kernel is compiled anew for."""


@triton.jit(do_not_specialize=VARYING)
def prepare(
    k, v, g, scales,
    cums, columns, leaves, totals, half,
    documents, first, N, T, tiles_a_row, tiles, tokens, heads, head0, H, per_group, L,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BL: tl.constexpr, P: tl.constexpr,
    PACKED: tl.constexpr, LOGLINEAR: tl.constexpr, LEAVES: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a tile, head and block of values.

    ``cums [heads, tokens]``: G. ``columns [heads, L, tokens]``: the level scales. ``leaves [heads, tiles, K, V]``,
    ``totals [heads, tiles]``: a tile's whole log decay. ``half [N, H, K, V]`` (with HALF): where a document's
    whole chunks end in the middle of a tile of two, the state of the first.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    part = pid % NV
    local_head = (pid // NV) % heads
    tile = pid // (NV * heads)
    n = document_of(tile, first, N, tiles_a_row, PACKED)
    start, length, chunk0, before = document_at(n, documents, first, N, T, tiles_a_row, PACKED)
    A = (chunk0 >> P) + tile - before
    begin = ((A << P) - chunk0) * 64  # of the tile, counted from the document's first token
    if begin >= length:
        return
    head = head0 + local_head
    group = head // per_group
    groups = H // per_group
    rk = tl.arange(0, BK)
    rv = part * BV + tl.arange(0, BV)
    row = tl.arange(0, 64)
    acc = tl.zeros([BK, BV], tl.float32)
    total = 0.0
    for c in tl.static_range(1 << P):
        edge = begin + c * 64
        valid = (row >= -edge) & (row < length - edge)
        base = start + edge
        gate = tl.load(g + base * H + head + row * H, mask=valid, other=0.0).to(tl.float32)
        G = tl.cumsum(gate, 0)
        # The last of the sums, and not a sum of its own: they would differ by an ulp, which strong decay makes large.
        chunk_total = tl.sum(tl.where(row == 63, G, 0.0), 0)
        if part == 0:
            tl.store(cums + local_head.to(tl.int64) * tokens + base + row, total + G, mask=valid)
            if LOGLINEAR:
                rl = tl.arange(0, BL)
                here = valid[:, None] & (rl[None, :] < L)
                lam = tl.load(
                    scales + (base * H + head) * L + row[:, None] * (H * L) + rl[None, :], mask=here, other=0.0
                )
                to = columns + local_head.to(tl.int64) * L * tokens + base
                tl.store(to + rl[None, :].to(tl.int64) * tokens + row[:, None], lam, mask=here)
        if LEAVES:
            kT = tl.load(
                k + (base * groups + group) * K + row[None, :] * (groups * K) + rk[:, None],
                mask=valid[None, :] & (rk[:, None] < K),
                other=0.0,
            )
            value = tl.load(
                v + (base * H + head) * V + row[:, None] * (H * V) + rv[None, :],
                mask=valid[:, None] & (rv[None, :] < V),
                other=0.0,
            )
            value = (value * decay(chunk_total - G)[:, None]).to(kT.dtype)
            acc = acc * tl.exp(chunk_total) + product(kT, value, PRECISION)
            if HALF and c == 0:
                # The last whole chunk is the first of this tile: the tile is the document's last one.
                if (begin + 64 <= length) & (begin + 128 > length):
                    to = (n.to(tl.int64) * H + head) * K * V
                    tl.store(
                        half + to + rk[:, None] * V + rv[None, :],
                        acc,
                        mask=(rk[:, None] < K) & (rv[None, :] < V),
                    )
        total += chunk_total
    slot = local_head.to(tl.int64) * tiles + tile
    if part == 0:
        tl.store(totals + slot, total)
    if LEAVES:
        tl.store(
            leaves + slot * (K * V) + rk[:, None] * V + rv[None, :],
            acc.to(leaves.dtype.element_ty),
            mask=(rk[:, None] < K) & (rv[None, :] < V),
        )


@triton.jit
def part_of_state(heads, PARTS: tl.constexpr):
    """Which part of a state, head and document a program of the passes over tiles has."""
    pid = tl.program_id(0)
    return pid % PARTS, (pid // PARTS) % heads, pid // (PARTS * heads)


@triton.jit
def levels_of_document(n, local_head, before, J, entries, ROOM: tl.constexpr):
    """Where a document's levels begin in ``stack``, in states.

    With ROOM a document of m tiles has m + 1 places for levels, else J of them, whichever is less in all.
    """
    mine = before + n
    if ROOM == 0:
        mine = n * J
    return local_head.to(tl.int64) * entries + mine


@triton.jit
def _leaf(nodes, totals, slots, i, count, at, SIZE: tl.constexpr):
    """State and log decay of tile ``i`` of a document; zeros where there is none."""
    total = tl.load(totals + slots + i, mask=(i >= 0) & (i < count), other=0.0)
    return _node(nodes, slots, i, count, at, SIZE), total


@triton.jit
def _node(nodes, slots, i, count, at, SIZE: tl.constexpr):
    return tl.load(nodes + (slots + i) * SIZE + at, mask=(i >= 0) & (i < count), other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=VARYING)
def sweep(
    nodes, totals, spans, since, stack, kept, levels, cums,
    documents, first, N, T, tiles_a_row, tiles, tokens, heads, head0, H, J, entries,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr,
    PACKED: tl.constexpr, STATE: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """One program a document, head and BLOCK of a state's SIZE elements: leaves become groups, left to right.

    ``spans [heads, J, tiles]``: the log decay over the group of ``2**j`` tiles that ends at a tile; ``since``
    ``[heads, tiles]``: over the document before a tile. ``stack [heads, entries, SIZE]`` and ``kept [programs, J]``:
    scratch, the newest left child of each level in fp32, so that sums are not rounded to the nodes' dtype on the
    way, and its log decay. ``levels [J', N, H, SIZE]`` (with STATE): the groups that are live at the document's
    last chunk boundary, as seen from there; those of whole tiles are stored here.
    """
    PARTS: tl.constexpr = SIZE // BLOCK
    part, local_head, n = part_of_state(heads, PARTS)
    start, length, chunk0, before = document_at(n, documents, first, N, T, tiles_a_row, PACKED)
    tile0 = chunk0 >> P
    whole = ((chunk0 * 64 + length) >> (6 + P)) - tile0
    at = part * BLOCK + tl.arange(0, BLOCK)
    slots = local_head.to(tl.int64) * tiles + before
    own = stack + levels_of_document(n, local_head, before, J, entries, ROOM) * SIZE + at
    own_span = kept + tl.program_id(0).to(tl.int64) * J
    spans += local_head.to(tl.int64) * J * tiles + before
    run = 0.0
    # Four tiles at a time, so that their loads travel together; aligned, so that their tree is known.
    for i in range(-(tile0 & 3), whole, 4):
        node0, span0 = _leaf(nodes, totals, slots, i, whole, at, SIZE)
        node1, span1 = _leaf(nodes, totals, slots, i + 1, whole, at, SIZE)
        node2, span2 = _leaf(nodes, totals, slots, i + 2, whole, at, SIZE)
        node3, span3 = _leaf(nodes, totals, slots, i + 3, whole, at, SIZE)
        pair = tl.exp(span1) * node0 + node1
        span = span2 + span3
        four = tl.exp(span) * pair + tl.exp(span3) * node2 + node3
        if part == 0:
            for u in tl.static_range(4):
                here = (i + u >= 0) & (i + u < whole)
                own_total = span0 if u == 0 else span1 if u == 1 else span2 if u == 2 else span3
                tl.store(since + slots + i + u, run, mask=here)
                tl.store(spans + i + u, own_total, mask=here)
                run += own_total
            tl.store(spans + tiles + i + 1, span0 + span1, mask=(i + 1 >= 0) & (i + 1 < whole))
            tl.store(spans + tiles + i + 3, span, mask=i + 3 < whole)
        if STATE:
            tl.store(own_span, tl.where(i + 2 < whole, span2, span0))
            tl.store(own, tl.where(i + 2 < whole, node2, node0))
            tl.store(own_span + 1, span0 + span1)
            tl.store(own + SIZE, pair)
        if (i + 1 >= 0) & (i + 1 < whole):
            tl.store(nodes + (slots + i + 1) * SIZE + at, pair.to(nodes.dtype.element_ty))
        last = i + 3
        if last < whole:
            span += span0 + span1
            j = 2
            while (((tile0 + last) >> j) & 1) == 1:
                if part == 0:
                    tl.store(spans + j * tiles + last, span)
                if last >= (1 << j):  # else the left child is of an earlier call
                    four += tl.exp(span) * tl.load(own + j * SIZE)
                    span += tl.load(own_span + j)
                j += 1
            if part == 0:
                tl.store(spans + j * tiles + last, span)
            tl.store(own_span + j, span)
            tl.store(own + j * SIZE, four)
            tl.store(nodes + (slots + last) * SIZE + at, four.to(nodes.dtype.element_ty))
        tl.debug_barrier()
    if part == 0 and (whole << (6 + P)) < length + ((chunk0 - (tile0 << P)) * 64):
        tl.store(since + slots + whole, run)
    if STATE:
        run = since_boundary(cums + local_head.to(tl.int64) * tokens + start, length, chunk0, P)
        rest = tile0 + whole
        while rest > tile0:
            j = bit_of(rest & -rest)
            to = ((j + P) * N + n).to(tl.int64) * H + head0 + local_head
            tl.store(levels + to * SIZE + at, tl.exp(run) * tl.load(own + j * SIZE))
            run += tl.load(own_span + j)
            rest = rest & (rest - 1)


@triton.jit
def since_boundary(cums, length, chunk0, P: tl.constexpr):
    """Log decay from the end of a document's last whole tile to its last chunk boundary; ``cums`` at its start."""
    run = 0.0
    if P == 1:
        end = chunk0 * 64 + length
        boundary = ((end >> 6) << 6) - chunk0 * 64
        if ((end >> 6) & 1 == 1) & (boundary > 0):
            run = tl.load(cums + boundary - 1)
    return run


@triton.jit(do_not_specialize=VARYING)
def scan(
    leaves, nodes, totals, initial, final, crossing,
    documents, first, N, T, tiles_a_row, tiles, heads, head0, H,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, REVERSE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Linear form, one program a document, head and BLOCK elements: leaves become states before their tiles.

    With REVERSE, right to left: what tiles add to the adjoint of the state before them becomes the adjoint of the
    state behind them. ``nodes`` are then the states before tiles, and ``crossing [heads, tiles, slices]``, a slice each
    program, takes ``exp(decay) <state before, adjoint behind>``. ``initial, final [N, H, SIZE]``: where the run begins
    and where it ends.
    """
    PARTS: tl.constexpr = SIZE // BLOCK
    part, local_head, n = part_of_state(heads, PARTS)
    _, length, _, before = document_at(n, documents, first, N, T, tiles_a_row, PACKED)
    count = (length + R - 1) // R
    at = part * BLOCK + tl.arange(0, BLOCK)
    slots = local_head.to(tl.int64) * tiles + before
    row = (n.to(tl.int64) * H + head0 + local_head) * SIZE + at
    state = tl.zeros([BLOCK], tl.float32)
    if INITIAL:
        state = tl.load(initial + row).to(tl.float32)
    for i in range(0, count, 4):
        # Four at a time, so that their loads travel together.
        step = 1
        if REVERSE:
            step = -1
        begin = i
        if REVERSE:
            begin = count - 1 - i
        leaf0, span0 = _leaf(leaves, totals, slots, begin, count, at, SIZE)
        leaf1, span1 = _leaf(leaves, totals, slots, begin + step, count, at, SIZE)
        leaf2, span2 = _leaf(leaves, totals, slots, begin + 2 * step, count, at, SIZE)
        leaf3, span3 = _leaf(leaves, totals, slots, begin + 3 * step, count, at, SIZE)
        if REVERSE:
            node0 = _node(nodes, slots, begin, count, at, SIZE)
            node1 = _node(nodes, slots, begin + step, count, at, SIZE)
            node2 = _node(nodes, slots, begin + 2 * step, count, at, SIZE)
            node3 = _node(nodes, slots, begin + 3 * step, count, at, SIZE)
        for u in tl.static_range(4):
            leaf = leaf0 if u == 0 else leaf1 if u == 1 else leaf2 if u == 2 else leaf3
            span = span0 if u == 0 else span1 if u == 1 else span2 if u == 2 else span3
            slot = slots + begin + u * step
            if REVERSE:
                node = node0 if u == 0 else node1 if u == 1 else node2 if u == 2 else node3
                tl.store(crossing + slot * PARTS + part, tl.exp(span) * tl.sum(node * state), mask=i + u < count)
            tl.store(leaves + slot * SIZE + at, state.to(leaves.dtype.element_ty), mask=i + u < count)
            state = state * tl.exp(span) + leaf
    if FINAL:
        tl.store(final + row, state)


@triton.jit(do_not_specialize=VARYING)
def keep_roots(
    totals, roots, levels, cums,
    documents, first, N, T, tiles_a_row, tiles, tokens, heads, head0, H,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Groups of earlier calls, ``roots [J, N, H, SIZE]``, decayed into those of the new state that hold them."""
    PARTS: tl.constexpr = SIZE // BLOCK
    part, local_head, n = part_of_state(heads, PARTS)
    start, length, chunk0, before = document_at(n, documents, first, N, T, tiles_a_row, PACKED)
    end = (chunk0 * 64 + length) >> 6
    at = part * BLOCK + tl.arange(0, BLOCK)
    run = since_boundary(cums + local_head.to(tl.int64) * tokens + start, length, chunk0, P)
    for i in range((end >> P) - (chunk0 >> P)):
        run += tl.load(totals + local_head.to(tl.int64) * tiles + before + i)
    rest = chunk0
    while rest > 0:
        j = bit_of(rest & -rest)
        root = tl.load(roots + ((j * N + n).to(tl.int64) * H + head0 + local_head) * SIZE + at).to(tl.float32)
        level = bit_length(end ^ (rest - 1)) - 1
        to = levels + ((level * N + n).to(tl.int64) * H + head0 + local_head) * SIZE + at
        tl.store(to, tl.load(to) + tl.exp(run) * root)
        rest = rest & (rest - 1)
