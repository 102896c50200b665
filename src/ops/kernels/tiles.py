"""Where a program's tokens are: what all kernels share.

A *tile* is ``R = C << P`` tokens of one document, aligned to the document's absolute positions; a *block* is
the ``C`` of them that stand in registers at once. Tiles of all documents are numbered through. Without packing
a document is a row, and everything follows from the tile's number; with it, three numbers a document say where
it starts in the list of tokens, how many it has, and the absolute index of its first chunk of 64 (a sequence
that is continued does not begin at 0).
"""

import triton
import triton.language as tl


@triton.jit
def document_at(n, documents, first, N, T, tiles_a_row, PACKED: tl.constexpr):
    """Of document ``n``: its first token, its tokens, its first chunk, its first tile."""
    if PACKED:
        start = tl.load(documents + n)
        length = tl.load(documents + N + n).to(tl.int32)
        chunk0 = tl.load(documents + 2 * N + n).to(tl.int32)
        before = tl.load(first + n)
    else:
        start = n.to(tl.int64) * T
        length = T
        chunk0 = n * 0
        before = n * tiles_a_row
    return start, length, chunk0, before


@triton.jit
def document_of(tile, first, N, tiles_a_row, PACKED: tl.constexpr):
    """The document that a tile belongs to: the last one that begins at it or before."""
    if PACKED:
        low = tile * 0
        high = low + N
        while high - low > 1:
            middle = (low + high) // 2
            begun = tl.load(first + middle) <= tile
            low = tl.where(begun, middle, low)
            high = tl.where(begun, high, middle)
    else:
        low = tile // tiles_a_row
    return low


@triton.jit
def trailing_ones(A):
    """Level of the group that ends with tile ``A``."""
    z = A * 0
    while ((A >> z) & 1) == 1:
        z += 1
    return z


@triton.jit
def reads(A, tile0):
    """How many groups tile ``A`` reads, of those that end in this call: set bits whose groups end behind ``tile0``."""
    count = A * 0
    rest = A
    while rest > tile0:
        count += 1
        rest = rest & (rest - 1)
    return count


@triton.jit
def bit_of(power):
    """``j`` of ``2**j``."""
    return (tl.log2(power.to(tl.float32)) + 0.5).to(tl.int32)


@triton.jit
def bit_length(x):
    n = x * 0
    while (x >> n) > 0:
        n += 1
    return n


@triton.jit
def decay(x):
    """``exp`` of a difference of sums of log decays: never above 1, whatever rounding made of the difference."""
    return tl.exp(tl.minimum(x, 0.0))


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def levels_of_places(row):
    """``[C, 8]``: the levels at which a token reads the 8 keys of its own block, by their places in it."""
    place = (row & 7)[:, None] ^ tl.arange(0, 8)[None, :]
    return (place > 0).to(tl.int32) + (place > 1).to(tl.int32) + (place > 3).to(tl.int32)


@triton.jit
def levels_of_blocks(row, BITS: tl.constexpr):
    """``[C, C / 8]``: the levels, above 3, at which a token reads all keys of other blocks of 8; 4 for its own."""
    block = (row >> 3)[:, None] ^ tl.arange(0, (1 << BITS) // 8)[None, :]
    level = block * 0 + 4
    for bit in tl.static_range(1, BITS - 3):
        level += (block >= (1 << bit)).to(tl.int32)
    return level


@triton.jit
def scales_at(lams, level, stride, row, valid, L):
    """Level scales ``[C, n]`` at given levels; the last serves all above it. ``lams``: the first token's level 0."""
    index = tl.minimum(level, L - 1).to(tl.int64)
    return tl.load(lams + index * stride + row[:, None], mask=valid[:, None], other=0.0).to(tl.float32)


@triton.jit
def level_weights(lams, stride, row, valid, L, BITS: tl.constexpr):
    """``M_ts = lambda_{t, level(t, s)}`` of a chunk, ``[C, C]``.

    Levels above 3 are one number for eight neighbouring keys, levels below 4 belong to eight keys alone: two
    tables of ``C x 8`` instead of a choice among all levels for each of ``C x C`` places.
    """
    C: tl.constexpr = 1 << BITS
    near = scales_at(lams, levels_of_places(row), stride, row, valid, L)
    far = scales_at(lams, levels_of_blocks(row, BITS), stride, row, valid, L)
    own = (row >> 3)[:, None] == tl.arange(0, C // 8)[None, :]
    return tl.reshape(tl.where(own[:, :, None], near[:, None, :], far[:, :, None]), [C, C])


@triton.jit
def group_scales(lams, rest, lowest, stride, row, valid, L):
    """Level scales of the smallest group of ``rest`` tiles, which is at level ``lowest`` if it is one tile.

    Without a group (``rest`` 0) those of the lowest, for nobody to use.
    """
    index = tl.minimum(lowest + bit_of(tl.maximum(rest & -rest, 1)), L - 1).to(tl.int64)
    return tl.load(lams + index * stride + row, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def doubled(T, N, row, bit: tl.constexpr, PRECISION: tl.constexpr):
    """From the inverses ``T`` of blocks of ``2**bit`` on the diagonal to those of twice the size: ``T - T X T``, where
    ``X`` is what ``N`` has inside the large blocks but outside the small ones."""
    # By blocks' numbers, other ones for each size: a square of their differences would stay in registers.
    number = row >> bit
    X = tl.where((number[:, None] ^ number[None, :]) == 1, N, 0.0)
    return T - product(product(T, X, PRECISION), T, PRECISION)


@triton.jit
def unit_inverse(N, BITS: tl.constexpr, PRECISION: tl.constexpr):
    """``(I + N)^-1`` of a strictly lower triangular ``N [C, C]``, by doubling the blocks on the diagonal.

    As stable as substitution: no power of ``N`` is formed, which at repeated keys grows to 1e18 before it cancels.
    Blocks up to 16 are a batch of small products, each a warp's own; two large steps are left.
    """
    C: tl.constexpr = 1 << BITS
    block = tl.arange(0, C // 16)
    same = (block[:, None] == block[None, :])[:, None, :, None]
    small = tl.sum(tl.where(same, tl.reshape(N, (C // 16, 16, C // 16, 16)), 0.0), 2)
    row = tl.arange(0, 16)
    differ = row[:, None] ^ row[None, :]
    T = tl.where(differ == 0, 1.0, tl.where(differ == 1, -small, 0.0))
    for bit in tl.static_range(1, 4):
        T = doubled(T, small, row, bit, PRECISION)
    T = tl.reshape(tl.where(same, T[:, :, None, :], 0.0), (C, C))
    for bit in tl.static_range(4, BITS):
        T = doubled(T, N, tl.arange(0, C), bit, PRECISION)
    return T
