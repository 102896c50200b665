r"""The Fenwick partition: which past tokens share a memory state.

Log-linear attention (Guo et al., arXiv 2506.04761) gives position ``t`` a handful of states, each of which
sums a *bucket* of past tokens. Near tokens get small buckets, far tokens large ones, and all sizes are powers
of two. Reading ``t`` in binary says where the buckets lie: clear the set bits one by one, the lowest first.

Position 13 = 0b1101 splits the tokens 0..13 into these four buckets::

    token    0  1  2  3  4  5  6  7 │ 8  9 10 11 │ 12 │ 13
             ╰──────────────────────╯ ╰──────────╯ ╰──╯ ╰──╯
    level            4                     3        1    0
    from           bit 3                 bit 2    bit 0  itself
    size             8                     4        1    1
                                                          bit 1 is not set: level 2 is empty

**The rule.** Token ``s`` belongs to position ``t``'s level ``bit_length(t XOR s)``: the highest bit in which
the two differ. Level 0 is the token itself; level ``l >= 1`` is a bucket of ``2**(l-1)`` neighbours, and exists
where bit ``l-1`` of ``t`` is set.

**One step** is a binary increment. From ``t-1`` to ``t`` the ``z`` trailing ones of ``t-1`` become zeros and
the bit above becomes one; so the buckets of levels ``0..z`` merge into level ``z+1``, which was empty::

    t = 11 = 0b1011   levels 0, 1, 2 and 4 hold   {11} {10} {8, 9} {0..7}
    t = 12 = 0b1100   z = 2: levels 0..2 merge    {12} {8, 9, 10, 11} {0..7}
                                           level   0         3          4

Fewer than two merges a step on average, at most ``log2(t + 1) + 1`` states at any time.

**Chunks.** Cut the sequence into chunks of ``2**c`` tokens. Inside a chunk the levels are ``0..c``, with the
same pattern in every chunk; chunk ``b`` sees the earlier *chunks* through the same partition, one level higher
for each: token level ``c+1+j`` is the aligned group of ``2**j`` chunks that ends where bit ``j`` of ``b`` says.
That group has index ``(b >> j) - 1`` among its kind. It is always even: a left child in the binary tree over
chunks, whose right sibling holds ``b``. So one tree serves all readers (see ``tree.py``).

Positions count from 0. Nothing here needs a length that is a power of two.
"""

import torch
from torch import Tensor

CHUNK_BITS = 6
CHUNK_SIZE = 1 << CHUNK_BITS
"""Tokens in a chunk. Fixed, and aligned to absolute positions: a decoding state depends on it."""

CHUNK_LEVELS = CHUNK_BITS + 1
"""Levels inside a chunk; level ``CHUNK_LEVELS + j`` is bit ``j`` of the chunk's index."""


def level(t: int, s: int) -> int:
    """The level at which position ``t`` sees token ``s <= t``."""
    if not 0 <= s <= t:
        raise ValueError(f"level(t, s) needs 0 <= s <= t, got t={t}, s={s}")
    return (t ^ s).bit_length()


def num_levels(seq_len: int) -> int:
    """Levels that a sequence of ``seq_len`` tokens needs: 1 -> 1, 2 -> 2, 3..4 -> 3, 16384 -> 15."""
    if seq_len < 1:
        raise ValueError(f"num_levels(seq_len) needs seq_len >= 1, got {seq_len}")
    return (seq_len - 1).bit_length() + 1


def live_levels(t: int) -> list[int]:
    """The levels that hold something at position ``t``: 0, and ``j+1`` for each set bit ``j`` of ``t``."""
    return [0] + [j + 1 for j in range(t.bit_length()) if t >> j & 1]


def merged_levels(t: int) -> int:
    """``z + 1`` such that the step from ``t-1`` to ``t`` sums levels ``0..z`` into level ``z+1``."""
    if t < 1:
        raise ValueError(f"merged_levels(t) needs t >= 1, got {t}")
    return (t & -t).bit_length()


def level_matrix(size: int, device: torch.device | None = None) -> Tensor:
    """``[size, size]`` of ``level(t, s)`` for ``s <= t``, and 0 above the diagonal, where it means nothing."""
    t = torch.arange(size, device=device)
    differ = torch.tril(t[:, None] ^ t[None, :])
    powers = 2 ** torch.arange(max(1, (size - 1).bit_length()), device=device)
    return (differ[..., None] >= powers).sum(-1)  # bit_length, without leaving the device
