"""Which token stands in which chunk.

Rows, packed documents and continued sequences all become one list of chunks of ``CHUNK_SIZE`` slots, so that
everything inside a chunk is one batched product. A document's chunks are aligned to its absolute positions: a
call that continues at position 70 first takes the 6 tokens 64..69 out of the state's buffer.

Shapes depend on the number of tokens and documents alone, never on where documents end, so nothing recompiles:
under ``torch.compile`` and on a GPU the list is padded to the largest number of chunks that could be needed.

``index_select`` rather than brackets: its backward pass is an ``index_add``, theirs sorts the indices first, which
took a quarter of a training step on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from src.ops.fenwick import CHUNK_BITS, CHUNK_SIZE


@dataclass
class Chunks:
    """Tables of one call. ``N`` documents (or rows), ``M`` chunks.

    first, whole, begin: ``[N]`` a document's first chunk in the list, how many whole chunks it gains in this
        call, and the absolute index of its first chunk.
    document, index: ``[M]`` a chunk's document and its absolute index there (0 for padding).
    last: ``[N]`` the chunk that stands at each document's end: unfinished, or empty (with ``keep_last``).
    max_index: bounds ``index`` from above.
    continued: whether documents may start behind position 0.
    rows, seq_len: ``B`` and ``T`` of the call.
    source: ``[M, C]`` the token of each slot, in the list of the call's tokens, the buffer's, and one of zeros.
    target: ``[B * T]`` the slot of each token. Both are None where a reshape does the same.
    """

    first: Tensor
    whole: Tensor
    begin: Tensor
    document: Tensor
    index: Tensor
    last: Tensor
    max_index: int
    continued: bool
    rows: int
    seq_len: int
    source: Tensor | None
    target: Tensor | None

    def __len__(self) -> int:
        return self.document.shape[0]

    def finish_none(self) -> bool:
        """Whether every row of an unpacked call stays inside a chunk; False where that cannot be known."""
        return is_dynamic(self.whole) and len(self.whole) == self.rows and not self.whole.any()

    def gather(self, x: Tensor, buffer: Tensor | None = None) -> Tensor:
        """``[B, T, *]`` (and the state's ``[N, 63, *]``) -> ``[M, C, *]``, zeros in the empty slots."""
        if self.source is None:
            count = len(self) // self.rows
            x = F.pad(x, [0, 0] * (x.ndim - 2) + [0, count * CHUNK_SIZE - self.seq_len])
            return x.reshape(len(self), CHUNK_SIZE, *x.shape[2:])
        parts, source = [x.flatten(0, 1), x.new_zeros(1, *x.shape[2:])], self.source.flatten()
        if buffer is None or not self.continued:  # the tables have no place for a buffer that cannot hold anything
            source = source.clamp(max=len(parts[0]))
        else:
            parts.insert(1, buffer.flatten(0, 1).to(x.dtype))
        return torch.cat(parts).index_select(0, source).unflatten(0, self.source.shape)

    def scatter(self, y: Tensor) -> Tensor:
        """``[M, C, *]`` -> ``[B, T, *]``."""
        if self.target is None:
            return y.reshape(self.rows, -1, *y.shape[2:])[:, : self.seq_len]
        return y.flatten(0, 1).index_select(0, self.target).unflatten(0, (-1, self.seq_len))


def document_lengths(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """``[N]`` int64."""
    if cu_seqlens is None:
        return torch.full((x.shape[0],), x.shape[1], dtype=torch.int64, device=x.device)
    return cu_seqlens.diff().long()


def document_of(tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The document that each flat token index belongs to; empty documents own none."""
    # Not cu_seqlens[1:]: Inductor (torch 2.11, CUDA) drops a slice's offset inside searchsorted, without a word.
    ends = cu_seqlens.diff().cumsum(0)
    return torch.searchsorted(ends, tokens, right=True)


def is_dynamic(x: Tensor) -> bool:
    """Whether sizes may be read from tensors: on the CPU in eager mode they cost nothing."""
    return not torch.compiler.is_compiling() and x.device.type == "cpu"


def dense_chunks(x: Tensor, keep_last: bool) -> Chunks:
    """Tables for ``x [B, T, …]`` without packing or state: plain reshapes."""
    rows, seq_len = x.shape[:2]
    whole = seq_len >> CHUNK_BITS
    count = whole + 1 if keep_last else -(-seq_len // CHUNK_SIZE)
    row = torch.arange(rows, device=x.device)
    return Chunks(
        first=row * count,
        whole=torch.full_like(row, whole),
        begin=torch.zeros_like(row),
        document=row.repeat_interleave(count, output_size=rows * count),
        index=torch.arange(count, device=x.device).repeat(rows),
        last=row * count + count - 1,
        max_index=count - 1,
        continued=False,
        rows=rows,
        seq_len=seq_len,
        source=None,
        target=None,
    )


def packed_chunks(
    x: Tensor, cu_seqlens: Tensor | None, positions: Tensor | None, max_position: int, keep_last: bool
) -> Chunks:
    """Tables for any call; ``positions [N]`` are where the documents stood before it (None: at 0)."""
    rows, seq_len = x.shape[:2]
    tokens = rows * seq_len
    if cu_seqlens is None:
        cu_seqlens = torch.arange(rows + 1, device=x.device) * seq_len
    cu_seqlens = cu_seqlens.long()
    lengths = cu_seqlens.diff()
    count = len(lengths)
    if positions is None:
        positions = torch.zeros_like(lengths)
    buffered = positions % CHUNK_SIZE
    begin = positions >> CHUNK_BITS
    whole = (buffered + lengths) >> CHUNK_BITS
    chunks = whole + 1 if keep_last else -((-buffered - lengths) >> CHUNK_BITS)
    ends = chunks.cumsum(0)
    first = ends - chunks

    # The most chunks that these tokens can need: each document may leave one unfinished.
    carried = (CHUNK_SIZE - 1) * count if max_position else 0
    most = (tokens + carried) // CHUNK_SIZE + count
    if is_dynamic(x):
        most = int(ends[-1]) if count else 0

    chunk = torch.arange(most, device=x.device)
    document = torch.searchsorted(ends, chunk, right=True).clamp(max=count - 1)
    real = chunk < ends[-1]
    local = chunk - first[document]
    index = torch.where(real, begin[document] + local, 0)

    slot = torch.arange(CHUNK_SIZE, device=x.device)
    offset = local[:, None] * CHUNK_SIZE + slot - buffered[document, None]  # in this call's part of the document
    in_buffer = tokens + document[:, None] * (CHUNK_SIZE - 1) + slot
    source = torch.where(offset < 0, in_buffer, cu_seqlens[document, None] + offset)
    nothing = tokens + (count * (CHUNK_SIZE - 1) if max_position else 0)
    source = torch.where(real[:, None] & (offset < lengths[document, None]), source, nothing)

    token = torch.arange(tokens, device=x.device)
    owner = document_of(token, cu_seqlens)
    target = first[owner] * CHUNK_SIZE + buffered[owner] + token - cu_seqlens[owner]
    return Chunks(
        first=first,
        whole=whole,
        begin=begin,
        document=document,
        index=index,
        last=first + whole,
        max_index=(max_position + seq_len) >> CHUNK_BITS,
        continued=max_position > 0,
        rows=rows,
        seq_len=seq_len,
        source=source,
        target=target,
    )
