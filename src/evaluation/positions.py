"""task=positions: the loss by position, the question that long context is about: does more text before help?

Windows of `length` tokens are cut out of every document that has so many, side by side; each starts with an empty
memory. So every position is averaged over the same windows, and a curve that falls shows a model that uses what it
has read; one that rises behind the trained length shows one that does not bear more.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from src.data.common.corpus import Corpus
from src.data.common.packing import Stream
from src.errors import UserError
from src.evaluation import Report, Trained, figures
from src.evaluation.perplexity import evenly, facts
from src.pieces import token_losses

USES = {"split", "lengths", "max_tokens"}
FIRST = 16  # tokens in the first bucket; two buckets an octave behind it


def evaluate(trained: Trained) -> Report:
    options = trained.options
    data = trained.data()
    if not isinstance(data, Corpus):
        raise UserError(f"data={data.config.name}: task=positions needs a text with long documents (data.name=…)")
    stream = data.stream(options.split)
    length = _length(trained, stream)
    begins = windows(stream, length)
    if options.max_tokens is not None:
        begins = begins[evenly(len(begins), options.max_tokens // length)]
    edges = buckets(length)
    means = np.concatenate([_bucket_means(nll, edges) for nll in _losses(trained, stream, begins, length)])
    loss = means.mean(0)
    error = means.std(0, ddof=1) / len(means) ** 0.5 if len(means) > 1 else np.full_like(loss, np.nan)
    rows = [
        {"begin": int(a), "end": int(b), "loss": float(m), "standard_error": float(e)}
        for a, b, m, e in zip(edges[:-1], edges[1:], loss, error, strict=True)
    ]
    middles = [(a * b) ** 0.5 if a else b / 2 for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]
    inside = [row for row in rows if row["end"] <= trained.trained_length]
    number = f"{len(begins):,} window" + "s" * (len(begins) != 1)
    sample = f"{number} of {length:,} tokens of {options.split}"
    return Report(
        values={"length": length, "windows": len(begins), "positions": rows, "data": facts(data)},
        table=f"loss in nats a token: mean and standard error over {sample} ({len(begins) * length:,} in all)\n"
        + table(rows, trained.trained_length),
        scalars={"last_trained_bucket": (inside or rows)[-1]["loss"], "last_bucket": rows[-1]["loss"]},
        curve={f"loss_{length}": [(int(m), row["loss"]) for m, row in zip(middles, rows, strict=True)]},
        figure=figures.curves(
            {trained.run_dir.name: (middles, loss.tolist())},
            errors={trained.run_dir.name: error.tolist()},
            x="position, tokens",
            y="loss, nats a token",
            title=f"{trained.run_dir.name}, {sample}",
            trained_length=trained.trained_length,
        ),
    )


def windows(stream: Stream, length: int) -> np.ndarray:
    """Where windows of `length` labels begin: as many as fit side by side in each document, none across documents."""
    starts = np.asarray(stream.starts)
    fit = np.diff(starts) // length
    within = np.arange(fit.sum()) - np.repeat(np.cumsum(fit) - fit, fit)
    return np.repeat(starts[:-1], fit) + within * length


def buckets(length: int) -> np.ndarray:
    """Edges 0, 16, 23, 32, …, length."""
    edges = [round(FIRST * 2 ** (i / 2)) for i in range(2 * length.bit_length())]
    return np.array([0, *(edge for edge in edges if edge < length), length])


def table(rows: list[dict], trained_length: int) -> str:
    lines = [f"{'position':>17} {'loss':>8} {'± (s.e.)':>9}"]
    for row in rows:
        mark = "  beyond the trained length" if row["begin"] >= trained_length else ""
        place = f"{row['begin']:,}–{row['end'] - 1:,}"
        error = "–" if np.isnan(row["standard_error"]) else f"{row['standard_error']:.4f}"  # of one window
        lines.append(f"{place:>17} {row['loss']:>8.4f} {error:>9}{mark}")
    return "\n".join(lines)


def _length(trained: Trained, stream: Stream) -> int:
    """The window's length: as asked, or 8 times the trained one, or what the longest document has."""
    lengths, longest = trained.options.lengths, int(np.diff(stream.starts).max(initial=0))
    if len(lengths) > 1:
        raise UserError(f"lengths={lengths}: task=positions takes one length, whose windows show all shorter ones too")
    length = lengths[0] if lengths else min(8 * trained.trained_length, longest)
    if length > longest:
        raise UserError(
            f"lengths={length}: no document of the {trained.options.split} split is so long"
            f" (the longest has {longest:,} tokens)"
        )
    return length


def _losses(trained: Trained, stream: Stream, begins: np.ndarray, length: int) -> Iterator[Tensor]:
    """Of several windows at a time, the loss at every position `[B, length]`."""
    at_once = max(1, trained.piece // length)
    with tqdm(
        total=len(begins) * length, desc=f"windows of {length:,}", unit="tok", unit_scale=True, disable=None
    ) as bar:
        for group in np.split(begins, range(at_once, len(begins), at_once)):
            rows = np.stack([np.asarray(stream.tokens[b : b + length + 1]) for b in group]).astype(np.int64)
            tokens = torch.from_numpy(rows)
            yield token_losses(trained.model, tokens[:, :-1], tokens[:, 1:], None, trained.piece)[0]
            bar.update(len(group) * length)


def _bucket_means(nll: Tensor, edges: np.ndarray) -> np.ndarray:
    """`[B, length]` to the mean of each bucket `[B, buckets]`."""
    sums = np.add.reduceat(nll.double().numpy(), edges[:-1], axis=1)
    return sums / np.diff(edges)
