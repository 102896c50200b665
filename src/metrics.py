"""Validation totals: sums that are exact over unequal batches and over ranks."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric


class TokenTotals(Metric):
    """Sums of the negative log-likelihood, of labelled tokens and of the text's bytes and words.

    `compute` gives
        loss             Σ NLL / Σ tokens, in nats a token
        perplexity       exp(loss), by token
        word_perplexity  exp(Σ NLL / Σ words), only if every batch named its words
        bits_per_byte    Σ NLL / (ln 2 · Σ bytes), only if every batch named its bytes
        tokens           Σ tokens
    Perplexities by token compare only under one tokenizer; those by word and bits per byte compare under all.
    The sums are float64 (float32 on MPS, which has no float64): 1e9 tokens in float32 lose the last nats.
    """

    full_state_update = False

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.precision = torch.float32 if torch.device(device).type == "mps" else torch.float64
        for name in ("nll", "tokens", "bytes", "words"):
            self.add_state(name, torch.zeros((), dtype=self.precision), dist_reduce_fx="sum")
        self.to(device)

    def update(self, nll: Tensor, tokens: int, n_bytes: float | None, n_words: float | None) -> None:
        self.nll += nll.detach().to(self.precision)
        self.tokens += tokens
        self.bytes += math.nan if n_bytes is None else n_bytes
        self.words += math.nan if n_words is None else n_words

    def compute(self) -> dict[str, float]:
        nll, tokens, n_bytes, n_words = torch.stack([self.nll, self.tokens, self.bytes, self.words]).tolist()
        if not tokens:
            return {}
        loss = nll / tokens
        values = {"loss": loss, "perplexity": _exp(loss), "tokens": tokens}
        if n_words > 0:  # false for NaN too
            values["word_perplexity"] = _exp(nll / n_words)
        if n_bytes > 0:
            values["bits_per_byte"] = nll / (math.log(2) * n_bytes)
        return values


def _exp(x: float) -> float:
    return math.inf if x > 700 else math.exp(x)


class RecallTotals(Metric):
    """Associative recall: mean over sequences of a sequence's accuracy (Arora et al. 2023, arXiv:2312.04927).

    A batch is of one kind, (sequence length, number of pairs). `compute` gives the sums of each kind as
    `{(seq_len, n_pairs): (sum of accuracies, sequences)}`, empty where no batch had pairs.
    """

    full_state_update = False

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.add_state("rows", [], dist_reduce_fx="cat")
        self.to(device)

    def update(self, right: Tensor, row: Tensor, n_rows: int, seq_len: int, n_pairs: int) -> None:
        """`right [N]` tells which labelled places were answered right, `row [N]` the sequence of each."""
        counts = torch.zeros(2, n_rows, device=right.device)
        counts.index_add_(1, row, torch.stack([right.float(), torch.ones_like(right, dtype=torch.float32)]))
        asked = counts[1] > 0
        accuracy = torch.where(asked, counts[0] / counts[1].clamp(min=1), 0.0)
        kind = torch.tensor([seq_len, n_pairs], device=right.device, dtype=torch.float32)
        self.rows.append(torch.cat([kind, torch.stack([accuracy.sum(), asked.sum()])])[None])

    def compute(self) -> dict[tuple[int, int], tuple[float, int]]:
        rows = torch.cat(self.rows) if isinstance(self.rows, list) and self.rows else self.rows
        kinds: dict[tuple[int, int], tuple[float, int]] = {}
        for seq_len, n_pairs, total, sequences in [] if isinstance(rows, list) else rows.tolist():
            if sequences:  # ranks with fewer batches are given ones without labels
                before = kinds.get((int(seq_len), int(n_pairs)), (0.0, 0))
                kinds[int(seq_len), int(n_pairs)] = (before[0] + total, before[1] + int(sequences))
        return kinds


class ExactMatch(Metric):
    """The share of examples whose labelled places were all predicted right, over batches and ranks."""

    full_state_update = False

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__()
        for name in ("right", "examples"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.to(device)

    def update(self, right: Tensor, places: Tensor, cu_seqlens: Tensor) -> None:
        """See `exact_match`."""
        matches = exact_match(right, places, cu_seqlens)
        self.right += matches.sum()
        self.examples += matches.numel()

    def compute(self) -> dict[str, float]:
        right, examples = torch.stack([self.right, self.examples]).tolist()
        return {"exact_match": right / examples} if examples else {}


def exact_match(right: Tensor, places: Tensor, cu_seqlens: Tensor) -> Tensor:
    """bool [N]: of each of the N examples with labels, whether all its labelled places were predicted right.

    `right [n]` tells which labelled places were, `places [n]` where they are in the flattened row, `cu_seqlens` is
    the batch's.
    """
    example = torch.searchsorted(cu_seqlens.to(places.dtype), places, right=True) - 1
    counts = torch.zeros(2, len(cu_seqlens), dtype=torch.int64, device=right.device)
    counts.index_add_(1, example, torch.stack([right.long(), torch.ones_like(example)]))
    return (counts[0] == counts[1])[counts[1] > 0]


def accuracies(kinds: dict[tuple[int, int], tuple[float, int]]) -> dict[str, float]:
    """`accuracy` over all sequences, `accuracy/pairs_<N>` by number of pairs, `accuracy/<T>x<N>` by length too."""
    groups: dict[str, list[tuple[float, int]]] = {}
    for (seq_len, n_pairs), sums in sorted(kinds.items()):
        for tag in ("accuracy", f"accuracy/pairs_{n_pairs}", f"accuracy/{seq_len}x{n_pairs}"):
            groups.setdefault(tag, []).append(sums)
    return {tag: sum(s for s, _ in g) / sum(n for _, n in g) for tag, g in groups.items()}


def recall_rows(kinds: dict[tuple[int, int], tuple[float, int]]) -> list[dict[str, Any]]:
    """The cells as flat rows, for tables and JSON."""
    return [
        {"seq_len": seq_len, "n_pairs": n_pairs, "accuracy": total / n, "sequences": n}
        for (seq_len, n_pairs), (total, n) in sorted(kinds.items())
    ]


def recall_matrix(rows: list[dict[str, Any]]) -> tuple[np.ndarray, list[int], list[int]]:
    """Accuracy `[lengths, pairs]`, NaN where there is no such cell; the lengths; the numbers of pairs."""
    lengths, pairs = (sorted({row[key] for row in rows}) for key in ("seq_len", "n_pairs"))
    matrix = np.full((len(lengths), len(pairs)), np.nan)
    for row in rows:
        matrix[lengths.index(row["seq_len"]), pairs.index(row["n_pairs"])] = row["accuracy"]
    return matrix, lengths, pairs


def recall_table(rows: list[dict[str, Any]], trained_length: int | None = None) -> str:
    """Accuracy by sequence length (lines) and number of pairs (columns); lengths beyond `trained_length` are marked."""
    matrix, lengths, pairs = recall_matrix(rows)
    lines = ["accuracy, mean over sequences", f"{'tokens / pairs':<14}" + "".join(f"{n:>8}" for n in pairs)]
    for length, line in zip(lengths, matrix, strict=True):
        mark = "  beyond the trained length" if trained_length is not None and length > trained_length else ""
        lines.append(f"{length:<14}" + "".join(f"{'' if np.isnan(a) else f'{a:.1%}':>8}" for a in line) + mark)
    return "\n".join(lines)
