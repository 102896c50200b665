"""task=mqar: associative recall by length and number of pairs, the lengths beyond training included."""

import torch
from tqdm import tqdm

from src.data.mqar import MQAR, Kind
from src.errors import UserError
from src.evaluation import Report, Trained, figures
from src.evaluation.perplexity import facts
from src.metrics import RecallTotals, accuracies, recall_matrix, recall_rows, recall_table
from src.pieces import token_losses

USES = {"split", "lengths", "examples"}
EXAMPLES = 1000  # of each cell


def evaluate(trained: Trained) -> Report:
    options = trained.options
    if trained.run.data.name != "mqar" or options.data.get("name", "mqar") != "mqar":
        raise UserError(f"task=mqar: run {trained.run_dir.name} was trained on data={trained.run.data.name}, not mqar")
    data = trained.data()
    own = data.kinds[options.split]
    kinds = cells(own, options.lengths, options.examples or EXAMPLES, data.vocab_size)
    data = trained.data(**{options.split: [str(kind) for kind in kinds]})
    sums = measure(trained, data)
    rows = recall_rows(sums)
    matrix, lengths, pairs = recall_matrix(rows)
    sample = figures.sample(options.split, [row["sequences"] for row in rows])
    return Report(
        values={**accuracies(sums), "recall": rows, "data": facts(data)},
        table=recall_table(rows, trained.trained_length),
        scalars=accuracies(sums),
        figure=figures.heat_map(
            matrix,
            columns=pairs,
            rows=lengths,
            x="pairs",
            y="length, tokens",
            title=f"{trained.run_dir.name}: recall by length and pairs\n{sample}",
            share="accuracy",
            trained_rows=sum(t <= trained.trained_length for t in lengths),
        ),
    )


def cells(own: list[Kind], lengths: list[int], examples: int, vocab_size: int) -> list[Kind]:
    """The run's own kinds; behind the longest of them 2, 4 and 8 times the length, with as many and with more pairs.

    With `lengths`: each of them with every number of pairs that the run knows and that fits.
    """
    pairs = sorted({kind.n_pairs for kind in own})
    if lengths:
        found = [(t, n) for t in lengths for n in pairs if 4 * n <= t]
        if not found:
            raise UserError(f"lengths={lengths}: {pairs[0]} pairs and their queries need {4 * pairs[0]} tokens")
    else:
        longest = max(own, key=lambda kind: (kind.seq_len, kind.n_pairs))
        found = [(kind.seq_len, kind.n_pairs) for kind in own]
        found += [(m * longest.seq_len, f * longest.n_pairs) for m in (2, 4, 8) for f in (1, m)]
    known = {(kind.seq_len, kind.n_pairs): min(kind.examples, examples) for kind in own}
    fits = [cell for cell in dict.fromkeys(found) if cell[1] <= vocab_size // 2 - 1]
    return [Kind(t, n, known.get((t, n), examples)) for t, n in fits]


def measure(trained: Trained, data: MQAR) -> dict[tuple[int, int], tuple[float, int]]:
    """By (length, pairs): the sum of the sequences' accuracies, and the sequences."""
    split, totals = trained.options.split, RecallTotals()
    longest = max(kind.seq_len for kind in data.kinds[split])
    for samples in tqdm(data.eval_batches(split, max(1, trained.piece // longest)), "recall", disable=None):
        batch = data.batch(split, samples)
        labels = batch["labels"]
        _, right = token_losses(trained.model, batch["input_ids"], labels, None, trained.piece)
        places = (labels.flatten() >= 0).nonzero().flatten()
        rows = torch.div(places, labels.shape[1], rounding_mode="floor")
        totals.update(right.flatten()[places], rows, len(labels), labels.shape[1], batch["n_pairs"])
    return totals.compute()
