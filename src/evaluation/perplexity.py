"""task=perplexity: the loss of next-token prediction, its exponentials, and how they change with the length.

A split is cut into rows of each length, as in training, so all lengths see the same tokens, with more or less text
before them. Rows beyond the trained length show what the model makes of more.
"""

from typing import Any

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
    data = [_rows(trained, length) for length in dict.fromkeys(trained.options.lengths or [None])]
    found = [{"length": rows.config.seq_len, **totals(trained, rows)} for rows in data]
    first = found[0]
    report = Report(
        values={**{k: v for k, v in first.items() if k != "length"}, "lengths": found, "data": facts(data[0])},
        table=table(found),
        scalars={name: first[name] for name in NAMES if name in first},
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


def totals(trained: Trained, data: DataModule) -> dict[str, Any]:
    """Loss and its exponentials over the rows of a data module, tokens counted."""
    split, length = trained.options.split, data.config.seq_len
    if data.n_samples(split) == 0:
        raise UserError(f"data={data.config.name} has no {split} split")
    limit = trained.options.max_tokens
    at_once = max(1, min(trained.piece, limit or trained.piece) // length)
    batches = some(data.eval_batches(split, data.config.val_batch_size or at_once), length, limit)
    sums, right = TokenTotals(), 0
    for samples in tqdm(batches, f"{length:,} tokens", disable=None):
        batch = data.batch(split, samples)
        nll, hits = token_losses(trained.model, batch["input_ids"], batch["labels"], batch["cu_seqlens"], trained.piece)
        n_tokens = int((batch["labels"] >= 0).sum())
        sums.update(nll.double().sum(), n_tokens, batch["n_bytes"], batch["n_words"])
        right += int(hits.sum())
    values = sums.compute()
    tokens = int(values.pop("tokens"))
    return {**values, "token_accuracy": right / tokens, "tokens": tokens}


def some(batches: list, length: int, max_tokens: int | None) -> list:
    """Batches of about `max_tokens` in all, evenly spread; all of them without a limit."""
    per_batch = length * max(len(samples) for samples in batches)
    n = len(batches) if max_tokens is None else min(len(batches), max(1, max_tokens // per_batch))
    return [batches[i * len(batches) // n] for i in range(n)]


def facts(data: DataModule) -> dict[str, Any]:
    return {**data.options(), "fingerprint": data.fingerprint}


def table(found: list[dict[str, Any]]) -> str:
    names = [name for name in NAMES if name in found[0]]
    lines = [f"{'tokens a row':>12} " + "".join(f"{n.replace('_', ' '):>17}" for n in names) + f"{'tokens':>14}"]
    for row in found:
        values = (f"{row[n]:.4f}" if row[n] < 1e6 else f"{row[n]:.4g}" for n in names)
        lines.append(f"{row['length']:>12,} " + "".join(f"{v:>17}" for v in values) + f"{row['tokens']:>14,}")
    return "\n".join(lines)
