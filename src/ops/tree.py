"""The binary tree over chunks: every state that some chunk reads, in O(log n) batched steps.

A chunk of tokens acts on the states before it by a *transition* and adds a state of its own, its leaf. Two
neighbouring groups combine as ``state = A_right state_left + state_right``, ``A = A_right A_left``: a tree of
aligned groups, built level by level. Chunk ``b`` reads the group of level ``j`` where bit ``j`` of ``b`` is set,
after the transitions of the chunks between that group's end and ``b``; those are the groups that ``b`` reads at
lower levels. Nothing is sequential but the levels. Work is O(n) for building and O(n log n) for reading.

A transition is ``exp(log_decay) * matrix`` with ``log_decay [n, H]`` and ``matrix [n, H, K, K]``, None for the
identity (scalar decay).

A continued sequence brings groups of earlier calls along (``roots``): they are left children, take part as of
the boundary where the call's chunks begin, and have the identity as their transition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from src.ops.chunks import Chunks, is_dynamic


@dataclass
class Transition:
    log_decay: Tensor
    matrix: Tensor | None

    def __getitem__(self, index: Tensor) -> Transition:
        matrix = None if self.matrix is None else self.matrix.index_select(0, index)
        return Transition(self.log_decay.index_select(0, index), matrix)

    def after(self, earlier: Transition) -> Transition:
        """First ``earlier``, then this one."""
        matrix = None if self.matrix is None else self.matrix @ earlier.matrix
        return Transition(self.log_decay + earlier.log_decay, matrix)

    def apply(self, state: Tensor) -> Tensor:
        """``A S``, on ``[n, H, K, V]``."""
        if self.matrix is not None:
            state = self.matrix @ state
        return state * self.log_decay.clamp(max=0).exp()[..., None, None]

    def where(self, keep: Tensor) -> Transition:
        """The identity where ``keep`` is False."""
        log_decay = torch.where(keep[:, None], self.log_decay, 0)
        if self.matrix is None:
            return Transition(log_decay, None)
        eye = torch.eye(self.matrix.shape[-1], dtype=self.matrix.dtype, device=self.matrix.device)
        return Transition(log_decay, torch.where(keep[:, None, None, None], self.matrix, eye))


@dataclass
class Level:
    """Groups of ``2**j`` chunks: ``state [n, H, K, V]``, their transition, and where a document's groups are.

    Group ``i`` of document ``d`` stands at ``start[d] + i``.
    """

    state: Tensor
    transition: Transition
    start: Tensor


def build(chunks: Chunks, leaf: Tensor, transition: Transition, roots: Tensor | None) -> list[Level]:
    """All aligned groups that some chunk of the call may read. ``roots [J, N, H, K, V]``: those from before."""
    levels: list[Level] = []
    end = chunks.begin + chunks.whole
    for j in range(chunks.max_index.bit_length()):
        # A document's groups run from ``low`` to ``end >> j``. Where bit j of its first chunk is set, the group
        # before that chunk is one of an earlier call.
        old = chunks.begin >> j & 1
        low = (chunks.begin >> j) - old
        counts = (end >> j) - low
        ends = counts.cumsum(0)
        start = ends - counts - low
        most = (len(chunks) >> j) + (len(counts) if roots is not None else 0)
        if is_dynamic(leaf):
            most = int(ends[-1])
        place = torch.arange(max(1, most), device=leaf.device)  # never empty, so that every index has a target
        document = torch.searchsorted(ends, place, right=True).clamp(max=len(counts) - 1)
        group = place - start[document]
        if j == 0:
            chunk = (chunks.first[document] + group - chunks.begin[document]).clamp(0, len(chunks) - 1)
            new = Level(leaf.index_select(0, chunk), transition[chunk], start)
        else:
            below = levels[-1]
            left = (below.start[document] + 2 * group).clamp(0, below.state.shape[0] - 1)
            right = (left + 1).clamp(max=below.state.shape[0] - 1)
            later = below.transition[right]
            state = later.apply(below.state.index_select(0, left)) + below.state.index_select(0, right)
            new = Level(state, later.after(below.transition[left]), start)
        if roots is not None:
            is_root = group < chunks.begin[document] >> j
            root = roots[j].index_select(0, document).to(leaf.dtype) if j < len(roots) else torch.zeros_like(new.state)
            new.state = torch.where(is_root[:, None, None, None], root, new.state)
            new.transition = new.transition.where(~is_root)
        levels.append(new)
    return levels


def select(mask: Tensor, most: int) -> Tensor:
    """Indices where ``mask`` holds; where sizes must be static, padded to ``most`` with ``len(mask)``."""
    if is_dynamic(mask):
        return mask.nonzero().flatten()
    # The i-th True is where the running count reaches i; a count that is never reached is found at the end.
    return torch.searchsorted(mask.cumsum(0), torch.arange(1, most + 1, device=mask.device))


def reads(chunks: Chunks, levels: list[Level]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each level ``j``: the chunks that read it, and the states as they see them, ``[r, H, K, V]``.

    Chunk indices may be padded with ``len(chunks)``: scatter into one place more.
    """
    if not levels:
        return
    # Product of the transitions since the start of the aligned group of 2**j chunks that holds the chunk.
    width = len(chunks)
    first = levels[0].transition
    eye = None
    if first.matrix is not None:
        eye = torch.eye(first.matrix.shape[-1], dtype=first.matrix.dtype, device=first.matrix.device)
        eye = eye.repeat(width + 1, first.matrix.shape[1], 1, 1)  # Inductor writes into an expanded one in place
    prefix = Transition(first.log_decay.new_zeros(width + 1, first.log_decay.shape[1]), eye)
    # Without earlier calls, each chunk that has the bit has a partner in its document that has not.
    most = width if chunks.continued else width // 2
    for j, level in enumerate(levels):
        reader = select(chunks.index >> j & 1 == 1, most)
        inside = reader.clamp(max=width - 1)
        group = level.start[chunks.document[inside]] + (chunks.index[inside] >> j) - 1
        group = group.clamp(0, level.state.shape[0] - 1)
        since = prefix[reader]
        yield j, reader, since.apply(_repeat(level.state, group))
        if j + 1 < len(levels):
            passed = level.transition
            matrix = None if passed.matrix is None else _repeat(passed.matrix, group)
            longer = since.after(Transition(_repeat(passed.log_decay, group), matrix))
            prefix = Transition(
                prefix.log_decay.index_copy(0, reader, longer.log_decay),
                None if prefix.matrix is None else prefix.matrix.index_copy(0, reader, longer.matrix),
            )


def prefixes(chunks: Chunks, levels: list[Level], leaf: Tensor, initial: Tensor | None) -> Tensor:
    """The state before each chunk, all groups summed, ``[M, H, K, V]``: what a linear model reads.

    From the largest groups to the smallest: chunk ``b``, whose lowest set bit is ``j``, continues the state
    before chunk ``b - 2**j`` by one group. O(n) work. ``initial [N, H, K, V]``: the states before chunk 0.
    """
    index, width = chunks.index, len(chunks)
    state = torch.zeros_like(torch.cat([leaf, leaf[:1]]))
    if initial is not None:
        first = (index == 0)[:, None, None, None]
        state = torch.cat([torch.where(first, initial.to(leaf.dtype).index_select(0, chunks.document), 0), state[:1]])
    for j, level in reversed(list(enumerate(levels))):
        most = min(width, (width >> (j + 1)) + len(chunks.first))
        target = select((index & -index) == 1 << j, most)
        inside = target.clamp(max=width - 1)
        group = level.start[chunks.document[inside]] + (index[inside] >> j) - 1
        group = group.clamp(0, len(level.state) - 1)
        before = state.index_select(0, (inside - (1 << j)).clamp(min=0))
        state = state.index_copy(0, target, level.transition[group].apply(before) + level.state.index_select(0, group))
    return state[:width]


def _repeat(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]`` where an index comes more than once: its gradients are summed in a fixed order.

    On a GPU ``index_select`` would add them by atomics; the backward pass of brackets sorts first.
    """
    return x[index] if x.is_cuda else x.index_select(0, index)
