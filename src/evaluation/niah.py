"""task=niah: needles found, by length and depth, with training on `data=niah` or without.

Two scores of the same prompts. `exact`: by teacher forcing, every token of the answer is the likeliest one after the
prompt and the tokens before it. `found`: the model generates greedily, and the share of the asked values that stands in
what it says (case ignored) counts, as in RULER. The prompt is read once for both.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from src.data.common.corpus import Corpus
from src.data.common.needle_examples import TooShort
from src.data.common.needles import TASKS, contained
from src.data.niah import Niah, check_task, haystack_keys
from src.errors import UserError
from src.evaluation import Report, Trained, figures
from src.evaluation.perplexity import facts
from src.model import LanguageModel
from src.ops.state import ModelState
from src.options import show
from src.pieces import prefill
from src.registry import DATA

USES = {"split", "lengths", "examples", "depths", "tasks"}
EXAMPLES = 10  # of each cell
SPARE = 8  # tokens that a generated answer may be longer than the right one
FAR = 0.1  # a mean depth that differs by more from the asked one is said
INSTEAD = dict.fromkeys(("seq_len", "lengths", "val_lengths", "test_lengths"), "lengths") | {"tasks": "tasks"}


class Score(NamedTuple):
    """Of one example."""

    exact: bool
    found: float


def evaluate(trained: Trained) -> Report:
    options = trained.options
    data = _data(trained)
    lengths, tasks = _lengths(trained), list(dict.fromkeys(data.config.tasks))
    depths = np.linspace(0, 1, options.depths).tolist() if options.depths > 1 else [0.5]
    text = any(TASKS[task].haystack == "text" for task in tasks)
    haystack = data.haystack_tokens(options.split) if text else None
    cells = [(task, length, depth) for task in tasks for length in lengths for depth in depths]
    rows = []
    examples = options.examples or EXAMPLES
    for task, length, depth in tqdm(cells, "needles", unit="cell", disable=None):
        # Other examples at every depth: a mean over depths is then one of as many needles as are counted.
        first = depths.index(depth) * examples
        scored = list(cell_scores(trained, data, task, length, depth, range(first, first + examples)))
        scores, real = zip(*scored, strict=True)
        row = {"task": task, "length": length, "depth": depth, "mean_depth": float(np.mean(real))}
        means = {name: float(np.mean([getattr(score, name) for score in scores])) for name in Score._fields}
        rows.append({**row, **means, "examples": len(scores)})
    means = {f"{name}/{task}": _mean(rows, name, task=task) for task in tasks for name in Score._fields}
    tables = [table(rows, task, trained.trained_length) for task in tasks]
    if haystack is not None and haystack < lengths[-1]:
        tables.append(f"the {options.split} haystack has {haystack:,} tokens: longer examples repeat it")
    return Report(
        values={"cells": rows, **means, "haystack_tokens": haystack, "data": facts(data)},
        table="\n\n".join(tables),
        scalars=means,
        curve={
            f"{name}_by_length/{task}": [(t, _mean(rows, name, task=task, length=t)) for t in lengths]
            for task in tasks for name in Score._fields
        },
        figure=_figure(rows, tasks, lengths, depths, trained),
    )  # fmt: skip


def cell_scores(
    trained: Trained, data: Niah, task: str, length: int, depth: float, numbers: Sequence[int]
) -> Iterator[tuple[Score, float]]:
    """Score and real depth of these examples of one task, length and depth, as many at once as a forward pass takes."""
    at_once = max(1, trained.piece // length)
    for first in range(0, len(numbers), at_once):
        some = numbers[first : first + at_once]
        drawn = [data.example(trained.options.split, task, length, n, depth) for n in some]
        logits, state = prefill(trained.model, [example.prompt_ids for example in drawn], trained.piece)
        answers = [example.answer_ids for example in drawn]
        exact = forced(trained.model, logits, state, answers)
        texts = greedy(trained.model, logits, state, max(map(len, answers)) + SPARE, data.tokenizer.eot)
        for example, right, ids in zip(drawn, exact, texts, strict=True):
            yield Score(right, contained(data.tokenizer.decode(ids), example.references)), example.depth


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
    for length in sorted({row["length"] for row in rows}):
        far = [row for row in rows if row["length"] == length and abs(row["mean_depth"] - row["depth"]) > FAR]
        if far:
            pairs = ", ".join(f"{row['mean_depth']:.0%} for {row['depth']:.0%}" for row in far)
            lines.append(f"at {length:,} tokens the needle could not stand where it was asked: on average at {pairs}")
    return "\n".join(lines)


def _mean(rows: list[dict[str, Any]], name: str, **where: Any) -> float:
    chosen = [row[name] for row in rows if all(row[key] == value for key, value in where.items())]
    return float(np.mean(chosen))


def _lengths(trained: Trained) -> list[int]:
    return sorted(set(trained.options.lengths or [trained.trained_length * m for m in (1, 2, 4, 8)]))


def _data(trained: Trained) -> Niah:
    """The run's needles; of a run on a text, needles in that text. At the lengths that are measured."""
    run, options, given = trained.run.data, trained.options, dict(trained.options.data)
    name = given.get("name", "niah")
    if not issubclass(DATA.get(name), Niah):  # before it is prepared, which can take minutes
        raise UserError(f"data.name={name}: task=niah measures data.name=niah")
    for key, instead in INSTEAD.items():
        if key in given:
            raise UserError(f"data.{key}={show(given[key])}: task=niah takes {instead}: give {instead} alone")
    lengths = _lengths(trained)
    changes: dict[str, Any] = {"seq_len": lengths[-1], "lengths": lengths, "val_lengths": [], "test_lengths": []}
    for task in options.tasks:
        check_task(task, "tasks")
    if options.tasks:
        changes["tasks"] = list(dict.fromkeys(options.tasks))
    if run.name == "niah":
        corpus, own = run.haystack, run.haystack_options
    elif issubclass(DATA.get(run.name), Corpus):
        corpus, own = run.name, {key: getattr(run, key) for key in haystack_keys(DATA.get(run.name))}
        changes |= {"name": "niah", "eot": run.eot, "cache_dir": run.cache_dir}
    else:
        raise UserError(f"task=niah: run {trained.run_dir.name} was trained on data={run.name}, which is no text")
    changes["haystack"] = given.get("haystack", corpus)
    own = own if changes["haystack"] == corpus else {}  # another corpus has other options
    asked = given.get("haystack_options", {})
    if isinstance(asked, Mapping):  # what else it may be is refused where the options are built
        given["haystack_options"] = {**own, **asked}
    try:
        return replace(trained, options=replace(options, data=given)).data(**changes)
    except TooShort as error:
        what = f"lengths={show(options.lengths)}" if options.lengths else f"trained length {trained.trained_length}"
        raise UserError(
            f"{what}: {error.reason}, not {error.length}: leave out the task (tasks=) or the length (lengths=)"
        ) from error


def _figure(rows: list[dict[str, Any]], tasks: list[str], lengths: list[int], depths: list[float], trained: Trained):
    """A heat map for each task: depth (lines) by length (columns)."""
    sample = figures.sample(trained.options.split, [row["examples"] for row in rows])
    found = {
        task: np.array([[_mean(rows, "found", task=task, length=t, depth=depth) for t in lengths] for depth in depths])
        for task in tasks
    }
    return figures.heat_maps(
        found,
        columns=lengths,
        rows=[f"{d:.0%}" for d in depths],
        x="length, tokens",
        y="depth",
        title=f"{trained.run_dir.name}: needles found\n{sample}",
        share="needles found",
        trained_columns=sum(length <= trained.trained_length for length in lengths),
    )
