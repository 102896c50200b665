"""task=perplexity: the loss of next-token prediction, its exponentials, and how they change with the length.

A split is cut into rows of each length, as in training, so all lengths see the same tokens, with more or less text
before them; of a sample (`max_tokens=`) too. Rows beyond the trained length show what the model makes of more.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from src.data import DataModule
from src.data.common.corpus import Corpus
from src.errors import UserError
from src.evaluation import Report, Trained, figures
from src.metrics import TokenTotals
from src.pieces import token_losses

USES = {"split", "lengths", "max_tokens"}
NAMES = ("loss", "perplexity", "word_perplexity", "bits_per_byte")


def evaluate(trained: Trained) -> Report:
    options = trained.options
    data = [_rows(trained, length) for length in dict.fromkeys(options.lengths or [None])]
    blocks = _blocks(trained, data)
    found = [{"length": rows.config.seq_len, **totals(trained, rows, blocks)} for rows in data]
    first = found[0]
    report = Report(
        values={**{k: v for k, v in first.items() if k != "length"}, "lengths": found, "data": facts(data[0])},
        table=table(found),
        scalars=_scalars(trained, found),
    )
    if len(found) > 1:
        report.curve = {f"{n}_by_length": [(row["length"], row[n]) for row in found] for n in NAMES if n in first}
        report.figure = figures.curves(
            {trained.run_dir.name: ([row["length"] for row in found], [row["loss"] for row in found])},
            x="row length, tokens",
            y="loss, nats a token",
            title=f"{trained.run_dir.name}, {first['tokens']:,} tokens of {trained.options.split}",
            trained_length=trained.trained_length,
        )
    return report


def _scalars(trained: Trained, found: list[dict[str, Any]]) -> dict[str, float]:
    """What stands under one tag: the values of all tokens, or of the usual sample, at the row length of training."""
    lengths, own = trained.options.lengths, trained.run.data.seq_len
    if lengths and (trained.options.max_tokens or own not in lengths):
        return {}
    row = next(row for row in found if not lengths or row["length"] == own)
    return {name: row[name] for name in NAMES if name in row}


def _rows(trained: Trained, length: int | None) -> DataModule:
    """The data in rows of `length`, or as in training. Raises UserError for a length that no row can have."""
    if length is None:
        return trained.data()
    data, split = trained.data(seq_len=length), trained.options.split
    if data.config.seq_len != length:
        raise UserError(f"data.seq_len={data.config.seq_len} and lengths are given both: give lengths alone")
    if isinstance(data, Corpus) and length > len(data.stream(split)):
        raise UserError(f"lengths={length}: the {split} split has {len(data.stream(split)):,} tokens only")
    return data


def _blocks(trained: Trained, data: Sequence[DataModule]) -> list[tuple[int, int]] | None:
    """Where the tokens [begin, end) of a sample of `max_tokens` are in the stream of a text: whole rows of the greatest
    length, at least one, evenly spread. None: all tokens, or no text."""
    limit, longest = trained.options.max_tokens, max(data, key=lambda rows: rows.config.seq_len)
    if limit is None or not isinstance(longest, Corpus):
        return None
    size, total = longest.row_length(trained.options.split), len(longest.stream(trained.options.split))
    if limit >= total:
        return None
    return [(i * size, (i + 1) * size) for i in evenly(total // size, limit // size)]


def evenly(total: int, n: int) -> list[int]:
    """n of `total` things, at least one, evenly spread: each in the middle of its share."""
    n = max(1, min(n, total))
    return [(2 * i + 1) * total // (2 * n) for i in range(n)]


def totals(trained: Trained, data: DataModule, blocks: list[tuple[int, int]] | None = None) -> dict[str, Any]:
    """Loss and its exponentials over the rows of a data module, or over `blocks` of its stream, tokens counted."""
    split, length = trained.options.split, data.config.seq_len
    if data.n_samples(split) == 0:
        raise UserError(f"data={data.config.name} has no {split} split")
    batches = _batches(trained, data, blocks)
    sums, right = TokenTotals(), 0
    for samples in tqdm(batches, f"{length:,} tokens", disable=None):
        batch = data.batch(split, samples)
        labels, n_bytes, n_words = batch["labels"], batch["n_bytes"], batch["n_words"]
        if blocks:
            labels = _inside(data, split, samples, blocks, labels)
            n_bytes = n_words = 0
        nll, hits = token_losses(trained.model, batch["input_ids"], labels, batch["cu_seqlens"], trained.piece)
        sums.update(nll.double().sum(), int((labels >= 0).sum()), n_bytes, n_words)
        right += int(hits.sum())
    if blocks:
        stream = data.stream(split)
        amounts = [
            sum(stream.share(starts, end) - stream.share(starts, begin) for begin, end in blocks)
            for starts in (stream.byte_starts, stream.word_starts)
        ]
        sums.update(torch.zeros(()), 0, *amounts)
    values = sums.compute()
    tokens = int(values.pop("tokens"))
    return {**values, "token_accuracy": right / tokens, "tokens": tokens}


def _batches(trained: Trained, data: DataModule, blocks: list[tuple[int, int]] | None) -> list[Sequence[int]]:
    """The rows that some token of the blocks is in; without text, as many whole batches as `max_tokens` has."""
    split, length, limit = trained.options.split, data.config.seq_len, trained.options.max_tokens
    size = data.config.val_batch_size or max(1, min(trained.piece, limit or trained.piece) // length)
    if blocks:
        row = data.row_length(split)
        rows = sorted({i for begin, end in blocks for i in range(begin // row, -(-end // row))})
        return data.batches_of(split, rows, size)
    batches = data.eval_batches(split, size)
    if limit is None or isinstance(data, Corpus):
        return batches
    per_batch = length * max(map(len, batches))
    return [batches[i] for i in evenly(len(batches), limit // per_batch)]


def _inside(data: Corpus, split: str, rows: Sequence[int], blocks: list[tuple[int, int]], labels: Tensor) -> Tensor:
    """The labels of these rows, but for those outside of the blocks."""
    size, total = data.row_length(split), len(data.stream(split))
    places = np.concatenate([np.arange(i * size, min((i + 1) * size, total)) for i in rows])
    begins, ends = np.array(blocks).T
    inside = places < ends[np.searchsorted(begins, places, side="right") - 1]
    inside &= places >= begins[0]
    return labels.masked_fill(~torch.from_numpy(inside).view_as(labels), -1)


def facts(data: DataModule) -> dict[str, Any]:
    return {**data.options(), "fingerprint": data.fingerprint}


def table(found: list[dict[str, Any]]) -> str:
    names = [name for name in NAMES if name in found[0]]
    lines = [f"{'tokens a row':>12} " + "".join(f"{n.replace('_', ' '):>17}" for n in names) + f"{'tokens':>14}"]
    for row in found:
        values = (f"{row[n]:.4f}" if row[n] < 1e6 else f"{row[n]:.4g}" for n in names)
        lines.append(f"{row['length']:>12,} " + "".join(f"{v:>17}" for v in values) + f"{row['tokens']:>14,}")
    return "\n".join(lines)
