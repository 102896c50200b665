r"""States along the sequence, and their adjoints back: the only steps that wait for each other.

At level ``j`` an aligned group of ``2**j`` tiles with an even number, a left child, is read by the tiles of its right
sibling, each of which changes it for those behind: ``S -> exp(G_R) (S + M S)``. ``follow`` takes a level of the tree:
every left child passes through its sibling, and where that is complete their sum is the parent. Groups of one level
pass side by side, so that the wait is for all tiles once, and shared among levels: 1 + 2 + 4 + … steps. The lowest
three levels are one launch, a program for each eight tiles: so short a wait costs less than a launch, and their states
stay in the caches.

What tile ``A`` sees at each set bit of ``A`` is kept in ``seen``, lowest bit first, one slot each: ``first_slot``. The
group of tiles that ends at a tile is stored at that tile's place in ``nodes``, right children in the place of their
parents, as in ``states.py``. A group of an earlier call is a left child as any other, that comes from ``roots``.

``ebb`` goes back, from the highest level to the lowest. The slots of ``after`` are those of ``seen``. They hold what
tiles read of it, ``E`` (``read.py``); ``D``, the adjoint of what the tile leaves behind, takes its place, and the
tile passes on ``exp(G_R) (D + M^T D) + E``.

The linear form has one running state instead of a tree. A state is held in blocks of ``CB`` rows, a tuple of them, so
that products of all blocks with each other are as long as K asks for.
"""

import triton
import triton.language as tl

from src.ops.kernels.states import VARYING
from src.ops.kernels.tiles import document_at, product

LOWEST = tl.constexpr(3)
"""Levels that are one launch: four right children, two, one."""

CHAIN = [*VARYING, "level", "children_a_row", "slots"]


@triton.jit
def popcount(x):
    """Set bits of a number below 2**31."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return (x + (x >> 16)) & 0x3F


@triton.jit
def bits_below(x):
    """Set bits of all numbers below ``x``, summed."""
    count = x * 0
    for bit in tl.static_range(26):
        count += ((x >> (bit + 1)) << bit) + tl.maximum((x & ((2 << bit) - 1)) - (1 << bit), 0)
    return count


@triton.jit
def first_slot(A, tile0, n, before, seen_first, tiles_a_row, PACKED: tl.constexpr, LOGLINEAR: tl.constexpr):
    """Of what tile ``A`` of document ``n`` sees, the slot of its lowest bit; the others follow."""
    if LOGLINEAR:
        slot = bits_below(A) - bits_below(tile0)
        if PACKED:
            slot += tl.load(seen_first + n)
        else:
            slot += n * bits_below(tiles_a_row)
    else:
        slot = before + A - tile0
    return slot


@triton.jit
def slot_at(A, level, tile0, n, before, seen_first, tiles_a_row, PACKED: tl.constexpr, LOGLINEAR: tl.constexpr):
    """The slot of what tile ``A`` sees at ``level``."""
    slot = first_slot(A, tile0, n, before, seen_first, tiles_a_row, PACKED, LOGLINEAR)
    if LOGLINEAR:
        slot += popcount(A & ((1 << level) - 1))
    return slot


@triton.jit
def child_at(
    child, level, children_first, children_a_row, documents, first, N, T, tiles_a_row,
    P: tl.constexpr, PACKED: tl.constexpr, LOGLINEAR: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """What program ``child`` of a level takes: ``there, n``, the ``o`` of a right child, and ``before, tile0, limit,
    whole`` of its document: tiles in this call are ``tile0 <= A < limit``, those below ``whole`` are whole.

    ``children_first [J + 1, N + 1]`` counts the right children before a document's first, at each level; its last line,
    for LOW, the windows of eight tiles, and ``o`` is the window's number. The linear form has one for each document.
    """
    there = child >= 0
    n = child
    rank = child * 0
    if LOGLINEAR:
        if PACKED:
            counts = children_first + level * (N + 1)
            there = child < tl.load(counts + N)
            low = child * 0
            high = low + N
            while high - low > 1:
                middle = (low + high) // 2
                begun = tl.load(counts + middle) <= child
                low = tl.where(begun, middle, low)
                high = tl.where(begun, high, middle)
            n = low
            rank = child - tl.load(counts + n)
        else:
            n = child // children_a_row
            rank = child % children_a_row
    _, length, chunk0, before = document_at(n, documents, first, N, T, tiles_a_row, PACKED)
    tile0 = chunk0 >> P
    end = chunk0 * 64 + length
    limit = tl.where(length > 0, (end + (64 << P) - 1) >> (6 + P), tile0)
    whole = end >> (6 + P)
    o = rank
    if LOW:
        o = (tile0 >> LOWEST) + rank
    elif LOGLINEAR:
        o = ((tile0 >> level) | 1) + 2 * rank
    else:
        whole = limit
    return there, n, o, before, tile0, limit, whole


@triton.jit
def block_of(x, a, rv, K: tl.constexpr, V: tl.constexpr, CB: tl.constexpr):
    """Rows ``a CB …`` of a state ``[K, V]``: where they are, and which there are."""
    rows = a * CB + tl.arange(0, CB)
    return x + rows[:, None] * V + rv[None, :], (rows[:, None] < K) & (rv[None, :] < V)


@triton.jit
def load_rounded(x, there, rv, K: tl.constexpr, V: tl.constexpr, CB: tl.constexpr):
    """As it is stored, which takes fewer registers."""
    S = ()
    for a in tl.static_range((K + CB - 1) // CB):
        at, inner = block_of(x, a, rv, K, V, CB)
        S = S + (tl.load(at, mask=inner & there, other=0.0),)
    return S


@triton.jit
def load_state(x, there, rv, K: tl.constexpr, V: tl.constexpr, CB: tl.constexpr):
    rounded = load_rounded(x, there, rv, K, V, CB)
    S = ()
    for a in tl.static_range((K + CB - 1) // CB):
        S = S + (rounded[a].to(tl.float32),)
    return S


@triton.jit
def store_state(x, S, there, rv, K: tl.constexpr, V: tl.constexpr, CB: tl.constexpr):
    for a in tl.static_range((K + CB - 1) // CB):
        at, inner = block_of(x, a, rv, K, V, CB)
        tl.store(at, S[a].to(x.dtype.element_ty), mask=inner & there)


@triton.jit
def sum_states(S, other, K: tl.constexpr, CB: tl.constexpr):
    new = ()
    for a in tl.static_range((K + CB - 1) // CB):
        new = new + (S[a] + other[a],)
    return new


@triton.jit
def load_change(change, passes, K: tl.constexpr, CB: tl.constexpr, BACK: tl.constexpr):
    """M of a tile in blocks, row by row, with BACK transposed; zeros where the tile is not whole."""
    NK: tl.constexpr = (K + CB - 1) // CB
    M = ()
    for a in tl.static_range(NK):
        ra = a * CB + tl.arange(0, CB)
        for b in tl.static_range(NK):
            rb = b * CB + tl.arange(0, CB)
            if BACK:
                inner = (rb[:, None] < K) & (ra[None, :] < K) & passes
                block = tl.trans(tl.load(change + rb[:, None] * K + ra[None, :], mask=inner, other=0.0))
            else:
                inner = (ra[:, None] < K) & (rb[None, :] < K) & passes
                block = tl.load(change + ra[:, None] * K + rb[None, :], mask=inner, other=0.0)
            M = M + (block,)
    return M


@triton.jit
def passed(S, M, total, K: tl.constexpr, CB: tl.constexpr, PRECISION: tl.constexpr):
    """``exp(G_R) (S + M S)``."""
    NK: tl.constexpr = (K + CB - 1) // CB
    rounded = ()
    for a in tl.static_range(NK):
        rounded = rounded + (S[a].to(M[0].dtype),)
    new = ()
    for a in tl.static_range(NK):
        acc = S[a]
        for b in tl.static_range(NK):
            acc += product(M[a * NK + b], rounded[b], PRECISION)
        new = new + (tl.exp(total) * acc,)
    return new


@triton.jit
def follow_child(
    o, level, n, before, tile0, limit, whole, line, row, rv,
    nodes, changes, totals, roots, seen, levels, seen_first, tiles_a_row, tiles, slots,
    K: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, PACKED: tl.constexpr, LOGLINEAR: tl.constexpr,
    ROOTS: tl.constexpr, STATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A left child through its right sibling ``o``; the linear form's state through a document."""
    tile_line = line * tiles + before - tile0  # of the document's tile 0, were it in this call
    lo, hi = tile0, limit
    left = tile0
    right = whole
    if LOGLINEAR:
        left = (o << level) - 1
        right = ((o + 1) << level) - 1
        lo, hi = tl.maximum(left + 1, tile0), tl.minimum(right + 1, limit)
        S = load_state(nodes + (tile_line + left) * (K * V), left >= tile0, rv, K, V, CB)
        if ROOTS:
            S = sum_states(S, load_state(roots + row, left < tile0, rv, K, V, CB), K, CB)
    else:
        S = load_state(roots + row if ROOTS else nodes, ROOTS, rv, K, V, CB)
    for A in range(lo, hi):
        passes = A < whole
        slot = slot_at(A, level, tile0, n, before, seen_first, tiles_a_row, PACKED, LOGLINEAR)
        store_state(seen + (line * slots + slot) * (K * V), S, True, rv, K, V, CB)
        total = tl.load(totals + tile_line + A, mask=passes, other=0.0)
        M = load_change(changes + (tile_line + A) * (K * K), passes, K, CB, False)
        S = passed(S, M, total, K, CB, PRECISION)
        if not LOGLINEAR:
            S = sum_states(S, load_state(nodes + (tile_line + A) * (K * V), True, rv, K, V, CB), K, CB)
    if LOGLINEAR:
        if right < whole:
            parent = nodes + (tile_line + right) * (K * V)
            S = sum_states(S, load_state(parent, True, rv, K, V, CB), K, CB)
            store_state(parent, S, True, rv, K, V, CB)
        elif STATE:
            store_state(levels + row, S, True, rv, K, V, CB)
    elif STATE:
        store_state(levels + row, S, True, rv, K, V, CB)


@triton.jit(do_not_specialize=CHAIN)
def follow(
    nodes, changes, totals, roots, seen, levels, children_first, seen_first,
    documents, first, N, T, tiles_a_row, tiles, heads, head0, H, level, children_a_row, slots,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, CB: tl.constexpr, P: tl.constexpr, PACKED: tl.constexpr,
    LOGLINEAR: tl.constexpr, LOW: tl.constexpr, ROOTS: tl.constexpr, STATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a right child of a level, head and block of values; with LOW a window of eight tiles.

    ``seen [heads, slots, K, V]``; ``roots`` and, with STATE, ``levels [J, N, H, K, V]`` in fp32: groups before the
    call and behind it (``[N, H, K, V]`` for the linear form).
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    rv = pid % NV * BV + tl.arange(0, BV)
    local_head = (pid // NV) % heads
    there, n, o, before, tile0, limit, whole = child_at(
        pid // (NV * heads), level, children_first, children_a_row, documents, first, N, T, tiles_a_row,
        P, PACKED, LOGLINEAR, LOW,
    )  # fmt: skip
    if not there:
        return
    line = local_head.to(tl.int64)
    row = (n.to(tl.int64) * H + head0 + local_head) * (K * V)
    a_level = N.to(tl.int64) * H * (K * V)
    if LOW:
        last = tl.maximum(limit - 1, whole) if STATE else limit - 1
        for j in range(LOWEST):
            for i in range(4 >> j):
                child = ((o << LOWEST) >> j) + 1 + 2 * i
                if ((child << j) <= last) & (((child + 1) << j) > tile0):
                    follow_child(
                        child, j, n, before, tile0, limit, whole, line, row + j * a_level, rv,
                        nodes, changes, totals, roots, seen, levels, seen_first, tiles_a_row, tiles, slots,
                        K, V, CB, PACKED, LOGLINEAR, ROOTS, STATE, PRECISION,
                    )  # fmt: skip
            tl.debug_barrier()
    else:
        follow_child(
            o, level, n, before, tile0, limit, whole, line, row + level * a_level, rv,
            nodes, changes, totals, roots, seen, levels, seen_first, tiles_a_row, tiles, slots,
            K, V, CB, PACKED, LOGLINEAR, ROOTS, STATE, PRECISION,
        )  # fmt: skip


@triton.jit
def ebb_child(
    o, level, n, before, tile0, limit, whole, line, row, rv,
    changes, totals, after, dnodes, dlevels, droots, seen_first, tiles_a_row, tiles, slots,
    K: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, PACKED: tl.constexpr, LOGLINEAR: tl.constexpr,
    ROOTS: tl.constexpr, STATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As ``follow_child``, back."""
    tile_line = line * tiles + before - tile0
    lo, hi = tile0, limit
    left = tile0
    if LOGLINEAR:
        left = (o << level) - 1
        right = ((o + 1) << level) - 1
        lo, hi = tl.maximum(left + 1, tile0), tl.minimum(right + 1, limit)
        complete = right < whole
        D = load_state(dnodes + (tile_line + right) * (K * V), complete, rv, K, V, CB)
        if STATE:
            D = sum_states(D, load_state(dlevels + row, not complete, rv, K, V, CB), K, CB)
    else:
        D = load_state(dlevels + row if STATE else changes, STATE, rv, K, V, CB)
    # E is loaded by the threads that store D there (one layout for both), and a step ahead: no product waits for it.
    AHEAD: tl.constexpr = K * after.dtype.element_ty.primitive_bitwidth <= 2048  # else there are too few registers
    slot = slot_at(hi - 1, level, tile0, n, before, seen_first, tiles_a_row, PACKED, LOGLINEAR)
    if AHEAD:
        E_next = load_rounded(after + (line * slots + slot) * (K * V), lo < hi, rv, K, V, CB)
    for step in range(hi - lo):
        A = hi - 1 - step
        passes = A < whole
        place = after + (line * slots + slot) * (K * V)
        slot = slot_at(A - 1, level, tile0, n, before, seen_first, tiles_a_row, PACKED, LOGLINEAR)
        if AHEAD:
            E = E_next
            E_next = load_rounded(after + (line * slots + slot) * (K * V), A > lo, rv, K, V, CB)
        else:
            E = load_rounded(place, True, rv, K, V, CB)
        total = tl.load(totals + tile_line + A, mask=passes, other=0.0)
        M = load_change(changes + (tile_line + A) * (K * K), passes, K, CB, True)
        new = passed(D, M, total, K, CB, PRECISION)
        store_state(place, D, True, rv, K, V, CB)
        D = sum_states(new, E, K, CB)
    if LOGLINEAR:
        store_state(dnodes + (tile_line + left) * (K * V), D, left >= tile0, rv, K, V, CB)
        if ROOTS:
            store_state(droots + row, D, left < tile0, rv, K, V, CB)
    elif ROOTS:
        store_state(droots + row, D, True, rv, K, V, CB)


@triton.jit(do_not_specialize=CHAIN)
def ebb(
    changes, totals, after, dnodes, dlevels, droots, children_first, seen_first,
    documents, first, N, T, tiles_a_row, tiles, heads, head0, H, level, children_a_row, slots,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, CB: tl.constexpr, P: tl.constexpr, PACKED: tl.constexpr,
    LOGLINEAR: tl.constexpr, LOW: tl.constexpr, ROOTS: tl.constexpr, STATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs as those of ``follow``; levels from the highest to the lowest.

    ``dnodes [heads, tiles, K, V]``: adjoints of groups, in the places of ``nodes``, zeros before the first level; in
    the end those of leaves.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    rv = pid % NV * BV + tl.arange(0, BV)
    local_head = (pid // NV) % heads
    there, n, o, before, tile0, limit, whole = child_at(
        pid // (NV * heads), level, children_first, children_a_row, documents, first, N, T, tiles_a_row,
        P, PACKED, LOGLINEAR, LOW,
    )  # fmt: skip
    if not there:
        return
    line = local_head.to(tl.int64)
    row = (n.to(tl.int64) * H + head0 + local_head) * (K * V)
    a_level = N.to(tl.int64) * H * (K * V)
    if LOW:
        last = tl.maximum(limit - 1, whole) if STATE else limit - 1
        for step in range(LOWEST):
            j = LOWEST - 1 - step
            for i in range(4 >> j):
                child = ((o << LOWEST) >> j) + 1 + 2 * i
                if ((child << j) <= last) & (((child + 1) << j) > tile0):
                    ebb_child(
                        child, j, n, before, tile0, limit, whole, line, row + j * a_level, rv,
                        changes, totals, after, dnodes, dlevels, droots, seen_first, tiles_a_row, tiles, slots,
                        K, V, CB, PACKED, LOGLINEAR, ROOTS, STATE, PRECISION,
                    )  # fmt: skip
            tl.debug_barrier()
    else:
        ebb_child(
            o, level, n, before, tile0, limit, whole, line, row + level * a_level, rv,
            changes, totals, after, dnodes, dlevels, droots, seen_first, tiles_a_row, tiles, slots,
            K, V, CB, PACKED, LOGLINEAR, ROOTS, STATE, PRECISION,
        )  # fmt: skip
