r"""Gradients of what tiles write: of their own states and of what they do to states before them.

A tile maps ``S_j`` to ``exp(G_R) (S_j + M S_j)``, ``M = -k~^T k``, and adds ``k~^T diag(exp(G_R - G)) v``. With
``D_j``, the adjoints behind the tile (``after`` of ``chain.py``), and ``D``, that of its own state,

    dM = exp(G_R) sum_j D_j S_j^T ,
    dk~ = -k dM^T + diag(exp(G_R - G)) v D^T ,     dk = -k~ dM ,     dv = diag(exp(G_R - G)) k~ D .
"""

import triton
import triton.language as tl

from src.ops.kernels.delta.chain import first_slot, popcount
from src.ops.kernels.delta.solve import tile_at, token_rows
from src.ops.kernels.states import VARYING
from src.ops.kernels.tiles import decay, product


@triton.jit(do_not_specialize=[*VARYING, "slots", "slices"])
def changes_back(
    totals, seen, after, seen_first, changes, passing,
    documents, first, N, T, tiles_a_row, tiles, heads, slots, slices,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, KB: tl.constexpr, P: tl.constexpr,
    R: tl.constexpr, PACKED: tl.constexpr, LOGLINEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a tile, head and block of K: ``changes [heads, tiles, K, K]``, M, becomes dM.

    ``passing [heads, tiles, slices]``, a slice a program: ``sum_j <S_j, exp(G_R) (I + M)^T D_j> = <I + M, dM>``, the
    gates' gradient through a tile.
    """
    NK: tl.constexpr = (K + KB - 1) // KB
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    part = pid % NK
    local_head = (pid // NK) % heads
    tile = pid // (NK * heads)
    n, start, length, before, A, tile0, begin = tile_at(tile, documents, first, N, T, tiles_a_row, P, PACKED)
    if begin >= length:
        return
    line = local_head.to(tl.int64)
    to = passing + (line * tiles + tile) * slices + part
    if LOGLINEAR:
        if begin + R > length:
            tl.store(to, 0.0)
            return
    rk = tl.arange(0, BK)
    ra = part * KB + tl.arange(0, KB)
    slot = line * slots + first_slot(A, tile0, n, before, seen_first, tiles_a_row, PACKED, LOGLINEAR)
    acc = tl.zeros([BK, KB], tl.float32)
    for i in range((popcount(A) if LOGLINEAR else 1) * NV):
        rv = i % NV * BV + tl.arange(0, BV)
        at = (slot + i // NV) * (K * V)
        S = token_rows(seen + at, rk, rk < K, V, rv, V)
        D = token_rows(after + at, ra, ra < K, V, rv, V)
        acc += product(S, tl.trans(D), PRECISION)
    acc *= tl.exp(tl.load(totals + line * tiles + tile))
    # What is made is dM transposed; it takes the places of this block of M, which no other program reads.
    place = changes + (line * tiles + tile) * (K * K) + ra[None, :] * K + rk[:, None]
    inner = (rk[:, None] < K) & (ra[None, :] < K)
    passed = tl.load(place, mask=inner, other=0.0).to(tl.float32)
    passed += tl.where(rk[:, None] == ra[None, :], 1.0, 0.0)
    tl.store(to, tl.sum(passed * acc))
    tl.debug_barrier()
    tl.store(place, acc.to(changes.dtype.element_ty), mask=inner)


@triton.jit(do_not_specialize=[*VARYING, "slots"])
def columns_back(
    k, v, ks, cums, totals, changes, dnodes, after, dks, dk_part, dv, gates,
    documents, first, N, T, tiles_a_row, tiles, tokens, heads, head0, H, per_group, slots,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, KB: tl.constexpr, P: tl.constexpr,
    R: tl.constexpr, PACKED: tl.constexpr, LOGLINEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a tile, head and block of values or of keys: ``dks, dk_part [heads, tokens, K]`` and ``dv [tokens, H,
    V]`` of what reaches a token from behind its tile; ``<v_s, dv_s>`` of these goes to ``gates [4 + NV, heads,
    tokens]``, ``gates[4]`` and what follows, one for each block of values."""
    NV: tl.constexpr = (V + BV - 1) // BV
    NK: tl.constexpr = (K + KB - 1) // KB
    pid = tl.program_id(0)
    part = pid % (NV + NK)
    local_head = (pid // (NV + NK)) % heads
    tile = pid // ((NV + NK) * heads)
    n, start, length, before, A, tile0, begin = tile_at(tile, documents, first, N, T, tiles_a_row, P, PACKED)
    if begin >= length:
        return
    # Of the log-linear form, a tile that is not whole has no state: zeros come of it.
    there = (begin + R <= length) | (not LOGLINEAR)
    head = head0 + local_head
    groups = H // per_group
    line = local_head.to(tl.int64)
    row = tl.arange(0, R)
    valid = row < length - begin
    base = start + begin
    at = line * tokens + base
    values = v + (base * H + head) * V
    if LOGLINEAR:
        D_own = dnodes + (line * tiles + tile) * (K * V)
    else:  # the state behind a tile has its own added
        D_own = after + (line * slots + tile) * (K * V)
    edge = decay(tl.load(totals + line * tiles + tile) - tl.load(cums + at + row, mask=valid, other=0.0))
    if part < NV:
        rv = part * BV + tl.arange(0, BV)
        back = tl.zeros([R, BV], tl.float32)
        for first_k in range(0, K, KB):
            column = first_k + tl.arange(0, KB)
            writer = token_rows(ks + at * K, row, valid, K, column, K)
            back += product(writer, token_rows(D_own, column, (column < K) & there, V, rv, V), PRECISION)
        back *= edge[:, None]
        through = tl.sum(token_rows(values, row, valid, H * V, rv, V) * back, 1)
        tl.store(gates + (4 + part) * heads.to(tl.int64) * tokens + at + row, through, mask=valid)
        outputs = dv + (base * H + head) * V + row[:, None] * (H * V) + rv[None, :]
        tl.store(outputs, back.to(dv.dtype.element_ty), mask=valid[:, None] & (rv[None, :] < V))
    else:
        column = (part - NV) * KB + tl.arange(0, KB)
        to = at * K + row[:, None] * K + column[None, :]
        inner = valid[:, None] & (column < K)[None, :]
        keys = k + (base * groups + head // per_group) * K
        dM = changes + (line * tiles + tile) * (K * K)
        dwriter = tl.zeros([R, KB], tl.float32)
        for first_b in range(0, K, KB):
            rb = first_b + tl.arange(0, KB)
            key = token_rows(keys, row, valid, groups * K, rb, K)
            dwriter -= product(key, tl.trans(token_rows(dM, column, (column < K) & there, K, rb, K)), PRECISION)
        for first_v in range(0, V, BV):
            rv = first_v + tl.arange(0, BV)
            value = token_rows(values, row, valid, H * V, rv, V)
            value = (value * edge[:, None]).to(value.dtype)
            D = token_rows(D_own, column, (column < K) & there, V, rv, V)
            dwriter += product(value, tl.trans(D), PRECISION)
        tl.store(dks + to, dwriter.to(dks.dtype.element_ty), mask=inner)
        dkey = tl.zeros([R, KB], tl.float32)
        for first_b in range(0, K, KB):
            rb = first_b + tl.arange(0, KB)
            writer = token_rows(ks + at * K, row, valid, K, rb, K)
            dkey -= product(writer, token_rows(dM, rb, (rb < K) & there, K, column, K), PRECISION)
        tl.store(dk_part + to, dkey.to(dk_part.dtype.element_ty), mask=inner)
