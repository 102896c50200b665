r"""The delta rule inside a tile: triangular inverses, and what its tokens are to everything outside.

Notation of ``src/ops/chunked.py``. Of a chunk of 64 tokens, ``solve`` makes

    T = (I + N)^-1 diag(beta) ,   N = strictly_lower(diag(beta) k k^T) ,
    P = tril(scale q k^T) T ,     q~ = scale q - P k ,     k~ = T^T k .

Of a tile of two chunks, ``join`` makes the same for its 128 tokens, from products of 64 x 64 alone: queries of the
second chunk see states through the first one, keys of the first are written through the second,

    q~_2' = q~_2 - Y k_1 ,     k~_1' = k~_1 - X k~_2 ,     Y = q~_2 k~_1^T ,     X = k~_1 k_2^T ,

in their places. ``Y`` is what attends from the second chunk to the first. ``leaves`` makes a tile's own state and what
it does to states before it, ``S -> exp(G_R) (S + M S)``:

    leaf = sum_s exp(G_R - G_s) k~_s v_s^T ,     M = -k~^T k .

``M`` and not ``I + M`` is kept: rounded to bf16, it errs by a part of what changes, not of what stays.
"""

import triton
import triton.language as tl

from src.ops.kernels.states import VARYING
from src.ops.kernels.tiles import decay, document_at, document_of, product, unit_inverse


@triton.jit
def tile_at(tile, documents, first, N, T, tiles_a_row, P: tl.constexpr, PACKED: tl.constexpr):
    """Of a tile: its document's number, first token, tokens and first tile; its place in the absolute numbering of
    the document, the absolute place of the document's first, and its first token, counted from the document's."""
    n = document_of(tile, first, N, tiles_a_row, PACKED)
    start, length, chunk0, before = document_at(n, documents, first, N, T, tiles_a_row, PACKED)
    tile0 = chunk0 >> P
    A = tile0 + tile - before
    return n, start, length, before, A, tile0, ((A << P) - chunk0) * 64


@triton.jit
def chunk_at(
    pid, heads, documents, first, N, T, tiles_a_row,
    P: tl.constexpr, BITS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Of the chunk and head of program ``pid``: the head, counted in the pass, the chunk, then as ``tile_at``, with the
    chunk's first token in place of the tile's."""
    chunk = pid // heads
    n, start, length, before, A, tile0, begin = tile_at(chunk >> P, documents, first, N, T, tiles_a_row, P, PACKED)
    begin += (chunk & ((1 << P) - 1)) << BITS
    return pid % heads, chunk, n, start, length, before, A, tile0, begin


@triton.jit
def token_rows(x, row, valid, stride, column, WIDTH: tl.constexpr):
    """``[rows, columns]`` of a matrix with a row a token; ``x`` points to the first."""
    return tl.load(
        x + row[:, None] * stride + column[None, :], mask=valid[:, None] & (column[None, :] < WIDTH), other=0.0
    )


@triton.jit
def exact_right(a, b, PRECISION: tl.constexpr):
    """``a b`` with ``b`` in fp32, also where ``a`` is bf16: what rounding takes off goes through a second product."""
    high = b.to(a.dtype)
    made = product(a, high, PRECISION)
    if a.dtype == tl.bfloat16:
        made += product(a, (b - high.to(tl.float32)).to(a.dtype), PRECISION)
    return made


@triton.jit
def exact_left(a, b, PRECISION: tl.constexpr):
    """The same with ``a`` in fp32: sums over equal keys cancel, and what is left must not be rounding."""
    high = a.to(b.dtype)
    made = product(high, b, PRECISION)
    if b.dtype == tl.bfloat16:
        made += product((a - high.to(tl.float32)).to(b.dtype), b, PRECISION)
    return made


@triton.jit(do_not_specialize=[*VARYING, "scale"])
def solve(
    q, k, beta, qs, ks, attention, inverse,
    documents, first, N, T, tiles_a_row, tokens, heads, head0, H, per_group, scale,
    K: tl.constexpr, KB: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr,
    PACKED: tl.constexpr, BACKWARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a chunk and head. ``qs, ks [heads, tokens, K]``: q~ and k~; ``attention, inverse [heads, tokens,
    C]``: P and, with BACKWARD, ``(I + N)^-1``."""
    C: tl.constexpr = 1 << BITS
    local_head, chunk, n, start, length, before, A, tile0, begin = chunk_at(
        tl.program_id(0), heads, documents, first, N, T, tiles_a_row, P, BITS, PACKED
    )
    if begin >= length:
        return
    head = head0 + local_head
    groups = H // per_group
    row = tl.arange(0, C)
    valid = row < length - begin
    base = start + begin
    here = (base * groups + head // per_group) * K
    strength = tl.load(beta + base * H + head + row * H, mask=valid, other=0.0).to(tl.float32)
    gram = tl.zeros([C, C], tl.float32)
    for first_k in range(0, K, KB):
        column = first_k + tl.arange(0, KB)
        key = token_rows(k + here, row, valid, groups * K, column, K)
        gram += product(key, tl.trans(key), PRECISION)
    below = row[:, None] > row[None, :]
    solved = unit_inverse(tl.where(below, strength[:, None] * gram, 0.0), BITS, PRECISION)
    to = local_head.to(tl.int64) * tokens + base
    square = row[:, None] * C + row[None, :]
    if BACKWARD:
        tl.store(inverse + to * C + square, solved.to(inverse.dtype.element_ty), mask=valid[:, None])
    # Not rounded: with equal keys what T writes is taken back at the next token, up to the rounding of the keys' norm.
    writes = solved * strength[None, :]
    scores = tl.zeros([C, C], tl.float32)
    for first_k in range(0, K, KB):
        column = first_k + tl.arange(0, KB)
        key = token_rows(k + here, row, valid, groups * K, column, K)
        query = token_rows(q + here, row, valid, groups * K, column, K)
        scores += product(query, tl.trans(key), PRECISION)
    scores = tl.where(row[:, None] >= row[None, :], scores * scale, 0.0).to(qs.dtype.element_ty)
    inside = exact_right(scores, writes, PRECISION).to(qs.dtype.element_ty)
    tl.store(attention + to * C + square, inside, mask=valid[:, None])
    for first_k in range(0, K, KB):
        column = first_k + tl.arange(0, KB)
        key = token_rows(k + here, row, valid, groups * K, column, K)
        query = token_rows(q + here, row, valid, groups * K, column, K)
        reader = query.to(tl.float32) * scale - product(inside, key, PRECISION)
        writerT = exact_right(tl.trans(key), writes, PRECISION)
        there = row[:, None] * K + column[None, :]
        inner = valid[:, None] & (column < K)[None, :]
        tl.store(qs + to * K + there, reader.to(qs.dtype.element_ty), mask=inner)
        thereT = row[None, :] * K + column[:, None]
        innerT = valid[None, :] & (column < K)[:, None]
        tl.store(ks + to * K + thereT, writerT.to(ks.dtype.element_ty), mask=innerT)


@triton.jit(do_not_specialize=VARYING)
def join(
    k, qs, ks, chunks, crossing, overlap,
    documents, first, N, T, tiles_a_row, tiles, tokens, heads, head0, H, per_group,
    K: tl.constexpr, KB: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr,
    PACKED: tl.constexpr, BACKWARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a tile of two chunks and head: ``qs, ks`` of chunks become those of the tile.

    ``crossing [heads, tiles, C, C]``: Y. With BACKWARD, also ``overlap``: X, and what was in the places that change,
    ``k~_1`` and ``q~_2``, in ``chunks [heads, tokens, K]``.
    """
    C: tl.constexpr = 1 << BITS
    pid = tl.program_id(0)
    local_head = pid % heads
    tile = pid // heads
    n, start, length, before, A, tile0, begin = tile_at(tile, documents, first, N, T, tiles_a_row, P, PACKED)
    if begin >= length:
        return
    dtype = qs.dtype.element_ty
    groups = H // per_group
    row = tl.arange(0, C)
    valid = row < length - begin
    later = row < length - begin - C
    base = start + begin
    raw = k + (base * groups + (head0 + local_head) // per_group) * K
    line = local_head.to(tl.int64)
    own = (line * tokens + base) * K
    next_ = own + C * K
    Y = tl.zeros([C, C], tl.float32)
    X = tl.zeros([C, C], tl.float32)
    for first_k in range(0, K, KB):
        column = first_k + tl.arange(0, KB)
        reader = token_rows(qs + next_, row, later, K, column, K)
        writer = token_rows(ks + own, row, valid, K, column, K)
        key = token_rows(raw + C * groups * K, row, later, groups * K, column, K)
        Y += product(reader, tl.trans(writer), PRECISION)
        X += product(writer, tl.trans(key), PRECISION)
    Y = Y.to(dtype)
    X = X.to(dtype)
    square = (line * tiles + tile) * (C * C) + row[:, None] * C + row[None, :]
    tl.store(crossing + square, Y)
    if BACKWARD:
        tl.store(overlap + square, X)
    for first_k in range(0, K, KB):
        column = first_k + tl.arange(0, KB)
        inner = valid[:, None] & (column < K)[None, :]
        inner_later = later[:, None] & (column < K)[None, :]
        there = row[:, None] * K + column[None, :]
        key = token_rows(raw, row, valid, groups * K, column, K)
        reader = token_rows(qs + next_, row, later, K, column, K)
        joined = reader.to(tl.float32) - product(Y, key, PRECISION)
        tl.debug_barrier()  # all have read what is overwritten
        if BACKWARD:
            tl.store(chunks + next_ + there, reader, mask=inner_later)
        tl.store(qs + next_ + there, joined.to(dtype), mask=inner_later)
        writer_next = token_rows(ks + next_, row, later, K, column, K)
        writer = token_rows(ks + own, row, valid, K, column, K)
        joined = writer.to(tl.float32) - product(X, writer_next, PRECISION)
        tl.debug_barrier()
        if BACKWARD:
            tl.store(chunks + own + there, writer, mask=inner)
        tl.store(ks + own + there, joined.to(dtype), mask=inner)


@triton.jit(do_not_specialize=VARYING)
def leaves(
    k, v, ks, cums, totals, nodes, changes,
    documents, first, N, T, tiles_a_row, tiles, tokens, heads, head0, H, per_group,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, KB: tl.constexpr, P: tl.constexpr,
    R: tl.constexpr, PACKED: tl.constexpr, LOGLINEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a tile, head and block of values or of keys: ``nodes [heads, tiles, K, V]`` takes leaves, ``changes
    [heads, tiles, K, K]`` takes M. A log-linear document's last tile, if it is short, has neither."""
    NV: tl.constexpr = (V + BV - 1) // BV
    NK: tl.constexpr = (K + KB - 1) // KB
    pid = tl.program_id(0)
    part = pid % (NV + NK)
    local_head = (pid // (NV + NK)) % heads
    tile = pid // ((NV + NK) * heads)
    n, start, length, before, A, tile0, begin = tile_at(tile, documents, first, N, T, tiles_a_row, P, PACKED)
    if begin >= length:
        return
    if LOGLINEAR:
        if begin + R > length:
            return
    head = head0 + local_head
    groups = H // per_group
    line = local_head.to(tl.int64)
    slot = line * tiles + tile
    rk = tl.arange(0, BK)
    row = tl.arange(0, 64)
    at = line * tokens + start + begin
    total = tl.load(totals + slot)
    if part < NV:
        rv = part * BV + tl.arange(0, BV)
        acc = tl.zeros([BK, BV], tl.float32)
        for c in tl.static_range(1 << P):
            valid = row < length - begin - c * 64
            base = start + begin + c * 64
            writer = token_rows(ks + (at + c * 64) * K, row, valid, K, rk, K)
            value = token_rows(v + (base * H + head) * V, row, valid, H * V, rv, V)
            edge = decay(total - tl.load(cums + at + c * 64 + row, mask=valid, other=0.0))
            acc += product(tl.trans(writer), (value * edge[:, None]).to(writer.dtype), PRECISION)
        inner = (rk[:, None] < K) & (rv[None, :] < V)
        tl.store(nodes + slot * (K * V) + rk[:, None] * V + rv[None, :], acc.to(nodes.dtype.element_ty), mask=inner)
    else:
        rb = (part - NV) * KB + tl.arange(0, KB)
        acc = tl.zeros([BK, KB], tl.float32)
        for c in tl.static_range(1 << P):
            valid = row < length - begin - c * 64
            base = start + begin + c * 64
            writer = token_rows(ks + (at + c * 64) * K, row, valid, K, rk, K)
            key = token_rows(k + (base * groups + head // per_group) * K, row, valid, groups * K, rb, K)
            acc -= product(tl.trans(writer), key, PRECISION)
        inner = (rk[:, None] < K) & (rb[None, :] < K)
        tl.store(changes + slot * (K * K) + rk[:, None] * K + rb[None, :], acc.to(changes.dtype.element_ty), mask=inner)
