"""One split as a stream of tokens, and rows of it as batches.

The stream of documents t, t', … is

    EOT t1 … tn  EOT t'1 … t'm  …  EOT

A document's segment is [EOT t1 … tn] with the labels [t1 … tn EOT]: its first token and its end are both
predicted, and nothing is predicted across a border. Position p of the stream has the label stream[p + 1];
rows are cut from it without a gap, so no token is padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

CU_SEQLENS_MULTIPLE = 16  # few different shapes: nothing recompiles for a number of documents


@dataclass(eq=False)  # compared and hashed by identity: caches ask by stream
class Stream:
    """Memory-mapped arrays of one split with m documents and L labels."""

    path: Path
    """Folder and stem of the four files."""

    def __post_init__(self) -> None:
        self.tokens = np.load(f"{self.path}.tokens.npy", mmap_mode="r")  # [L + 1]
        self.starts = np.load(f"{self.path}.starts.npy", mmap_mode="r")  # [m + 1] places of the EOTs, then L
        self.byte_starts = np.load(f"{self.path}.bytes.npy", mmap_mode="r")  # [m + 1] UTF-8 bytes before them
        self.word_starts = np.load(f"{self.path}.words.npy", mmap_mode="r")  # [m + 1] words before them

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path}  # a pickled memory map would carry the corpus

    def __setstate__(self, state: dict[str, object]) -> None:
        self.path = state["path"]
        self.__post_init__()

    def __len__(self) -> int:
        """Labels: all tokens, and one end-of-text per document."""
        return len(self.tokens) - 1

    @property
    def n_documents(self) -> int:
        return len(self.starts) - 1

    @property
    def n_bytes(self) -> int:
        return int(self.byte_starts[-1])

    def facts(self) -> dict[str, int]:
        words = int(self.word_starts[-1])
        return {"documents": self.n_documents, "tokens": len(self), "words": words, "bytes": self.n_bytes}

    def share(self, amounts: np.ndarray, place: int) -> float:
        """Of `byte_starts` or `word_starts`, what the labels [0, place) spell, a cut document's in proportion."""
        if place >= len(self):
            return float(amounts[-1])
        j = int(np.searchsorted(self.starts, place, side="right")) - 1
        begin, end = int(self.starts[j]), int(self.starts[j + 1])
        low, high = int(amounts[j]), int(amounts[j + 1])
        return low + (high - low) * (place - begin) / (end - begin)

    def borders(self, begin: int, end: int) -> np.ndarray:
        """Where documents begin strictly inside [begin, end)."""
        first = np.searchsorted(self.starts, begin, side="right")
        last = np.searchsorted(self.starts, end, side="left")
        return np.asarray(self.starts[first:last])


def pack(
    stream: Stream, rows: Sequence[tuple[int, int]], packing: Literal["documents", "concatenate"]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows [begin, end) of the stream as (input_ids, labels, cu_seqlens).

    documents: one row [1, sum of lengths] with cu_seqlens at every row and document, padded with its last
    value to a multiple of 16 entries. concatenate: [B, T] (rows of one length), no cu_seqlens.
    """
    spans = [np.asarray(stream.tokens[begin : end + 1]).astype(np.int64) for begin, end in rows]
    if packing == "concatenate":
        both = torch.from_numpy(np.stack(spans))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous(), None
    input_ids = torch.from_numpy(np.concatenate([span[:-1] for span in spans]))[None]
    labels = torch.from_numpy(np.concatenate([span[1:] for span in spans]))[None]
    parts, place = [], 0
    for begin, end in rows:
        parts += [[place], stream.borders(begin, end) - begin + place]
        place += end - begin
    return input_ids, labels, padded_borders(np.concatenate(parts), place)


def padded_borders(starts: np.ndarray, end: int) -> Tensor:
    """cu_seqlens of documents with these starts in a row of `end` tokens: int32, a multiple of 16 entries."""
    total = -(-(len(starts) + 1) // CU_SEQLENS_MULTIPLE) * CU_SEQLENS_MULTIPLE
    cu_seqlens = np.full(total, end, dtype=np.int32)
    cu_seqlens[: len(starts)] = starts
    return torch.from_numpy(cu_seqlens)
