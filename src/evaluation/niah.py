"""task=niah: needles found, by length and depth, with training on `data=niah` or without.

Two scores of the same prompts. `exact`: by teacher forcing, every token of the answer is the likeliest one after the
prompt and the tokens before it. `found`: the model generates greedily, and the share of the asked values that stands in
what it says (case ignored) counts, as in RULER. The prompt is read once for both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from src.data.common.corpus import Corpus
from src.data.common.needles import TASKS, contained
from src.data.niah import Niah
from src.errors import UserError
from src.evaluation import Report, Trained, figures
from src.evaluation.perplexity import facts
from src.model import LanguageModel
from src.ops.state import ModelState
from src.pieces import prefill
from src.registry import DATA

USES = {"split", "lengths", "examples", "depths", "tasks"}
EXAMPLES = 10  # of each cell
SPARE = 8  # tokens that a generated answer may be longer than the right one


class Score(NamedTuple):
    """Of one example."""

    exact: bool
    found: float


def evaluate(trained: Trained) -> Report:
    options = trained.options
    data = _data(trained)
    lengths = options.lengths or [trained.trained_length * m for m in (1, 2, 4, 8)]
    tasks = options.tasks or data.config.tasks
    depths = np.linspace(0, 1, options.depths).tolist() if options.depths > 1 else [0.5]
    for task in tasks:
        if max(lengths) < data.smallest(task):
            raise UserError(f"lengths={lengths}: {task} needs at least {data.smallest(task)} tokens")
    cells = [
        (task, length, depth)
        for task in tasks for length in sorted(lengths) if length >= data.smallest(task) for depth in depths
    ]  # fmt: skip
    rows = []
    for task, length, depth in tqdm(cells, "needles", unit="cell", disable=None):
        scores = list(cell_scores(trained, data, task, length, depth, options.examples or EXAMPLES))
        exact, found = (float(np.mean([getattr(score, name) for score in scores])) for name in Score._fields)
        rows.append(
            {"task": task, "length": length, "depth": depth, "exact": exact, "found": found, "examples": len(scores)}
        )
    means = {f"{name}/{task}": _mean(rows, name, task=task) for task in tasks for name in Score._fields}
    return Report(
        values={"cells": rows, **means, "data": facts(data)},
        table="\n\n".join(table(rows, task, trained.trained_length) for task in tasks),
        scalars=means,
        curve={
            f"{name}_by_length/{task}": [(t, _mean(rows, name, task=task, length=t)) for t in sorted(lengths)]
            for task in tasks for name in Score._fields
        },
        figure=_figure(rows, tasks, sorted(lengths), depths, trained),
    )  # fmt: skip


def cell_scores(trained: Trained, data: Niah, task: str, length: int, depth: float, examples: int) -> Iterator[Score]:
    """The examples of one task, length and depth, as many at once as a forward pass takes."""
    at_once = max(1, trained.piece // length)
    for first in range(0, examples, at_once):
        numbers = range(first, min(first + at_once, examples))
        drawn = [data.example(trained.options.split, task, length, n, depth) for n in numbers]
        logits, state = prefill(trained.model, [example.prompt_ids for example in drawn], trained.piece)
        answers = [example.answer_ids for example in drawn]
        exact = forced(trained.model, logits, state, answers)
        texts = greedy(trained.model, logits, state, max(map(len, answers)) + SPARE, data.tokenizer.eot)
        for example, right, ids in zip(drawn, exact, texts, strict=True):
            yield Score(right, contained(data.tokenizer.decode(ids), example.references))


@torch.inference_mode()
def forced(model: LanguageModel, logits: Tensor, state: ModelState, answers: Sequence[Sequence[int]]) -> list[bool]:
    """Whether each answer is what greedy choice gives token by token, after prompts with these last `logits [N, V]`."""
    device = logits.device
    right = logits.argmax(-1) == torch.tensor([answer[0] for answer in answers], device=device)
    rest = [answer[:-1] for answer in answers]
    ends = torch.tensor([0, *map(len, rest)]).cumsum(0)
    if ends[-1]:
        ids = torch.tensor([[token for part in rest for token in part]], device=device)
        hits = model.step(ids, state, ends.int().to(device))[0][0].argmax(-1)
        wanted = torch.tensor([token for answer in answers for token in answer[1:]], device=device)
        wrong = torch.zeros_like(ends[1:], device=device)
        owner = torch.repeat_interleave(ends.diff()).to(device)
        right &= wrong.index_add_(0, owner, (hits != wanted).long()) == 0
    return right.tolist()


@torch.inference_mode()
def greedy(model: LanguageModel, logits: Tensor, state: ModelState, tokens: int, eot: int) -> list[list[int]]:
    """Up to `tokens` most probable tokens after each of N prompts, end-of-text and what follows left out."""
    state = state.for_decoding(tokens)
    chosen = [logits.argmax(-1)]
    for _ in range(tokens - 1):
        step, state = model.step(chosen[-1][:, None], state)
        chosen.append(step[:, -1].argmax(-1))
    rows = torch.stack(chosen, 1).tolist()
    return [row[: row.index(eot)] if eot in row else row for row in rows]


def table(rows: list[dict[str, Any]], task: str, trained_length: int) -> str:
    """`found` by length (lines) and depth (columns), and the means of both scores."""
    rows = [row for row in rows if row["task"] == task]
    depths = sorted({row["depth"] for row in rows})
    head = "".join(f"{f'{depth:.0%}':>7}" for depth in depths)
    lines = [f"{task}: needles found, by depth", f"{'tokens':>8} {head}   {'found':>7}{'exact':>7}"]
    for length in sorted({row["length"] for row in rows}):
        line = "".join(f"{_mean(rows, 'found', length=length, depth=depth):>7.0%}" for depth in depths)
        means = "".join(f"{_mean(rows, name, length=length):>7.1%}" for name in ("found", "exact"))
        mark = "  beyond the trained length" if length > trained_length else ""
        lines.append(f"{length:>8,} {line}   {means}{mark}")
    return "\n".join(lines)


def _mean(rows: list[dict[str, Any]], name: str, **where: Any) -> float:
    chosen = [row[name] for row in rows if all(row[key] == value for key, value in where.items())]
    return float(np.mean(chosen)) if chosen else float("nan")


def _data(trained: Trained) -> Niah:
    """The run's needles; of a run on a text, needles in that text."""
    run, options = trained.run.data, trained.options
    name = options.data.get("name", "niah")
    if not issubclass(DATA.get(name), Niah):  # before it is prepared, which can take minutes
        raise UserError(f"data.name={name}: task=niah measures data.name=niah")
    changes: dict[str, Any] = {"tasks": options.tasks} if options.tasks else {}
    if run.name != "niah":
        if not issubclass(DATA.get(run.name), Corpus):
            raise UserError(f"task=niah: run {trained.run_dir.name} was trained on data={run.name}, which is no text")
        own = {f.name for f in fields(run)} - {f.name for f in fields(Niah.Config)} - {"val_rows"}
        changes |= {"name": "niah", "seq_len": max(options.lengths or [trained.trained_length])}
        changes |= {"haystack": run.name, "haystack_options": {key: getattr(run, key) for key in sorted(own)}}
    return trained.data(**changes)


def _figure(rows: list[dict[str, Any]], tasks: list[str], lengths: list[int], depths: list[float], trained: Trained):
    """The heat map: depth (lines) by length (columns), the mean over the tasks where there are several."""
    cells = np.array([[_mean(rows, "found", length=t, depth=depth) for t in lengths] for depth in depths])
    what = tasks[0] if len(tasks) == 1 else "all tasks" if len(tasks) == len(TASKS) else ", ".join(tasks)
    title = f"{trained.run_dir.name}: needles found ({what})"
    return figures.heat_map(
        cells,
        columns=lengths,
        rows=[f"{d:.0%}" for d in depths],
        x="length, tokens (dashed: where training ended)",
        y="depth",
        title=title,
        trained_columns=sum(length <= trained.trained_length for length in lengths),
    )
