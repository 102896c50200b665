"""A trained model as the lm-evaluation-harness sees one. Imports `lm_eval`: only `task=lm_eval` imports this.

Log-likelihoods: all (context, continuation) pairs packed into rows, none padded. Generation: prompts read
together, then token by token with their states. Nothing is ever cut off: the model takes any length.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import lm_eval
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table
from tqdm import tqdm

from src.data import IGNORE
from src.data.common.tokenizer import load_tokenizer
from src.errors import UserError
from src.evaluation import Trained
from src.generation import Sampling, generate_rows
from src.options import nearest, one_line, show
from src.pieces import token_losses

VERSION = lm_eval.__version__
ROWS = 64
"""Prompts that are continued at once, at most."""
MAX_NEW_TOKENS = 256
"""Where a task does not say how many."""
KNOWN = {"until", "max_gen_toks", "do_sample", "num_beams", "temperature", "top_k", "top_p"}
"""Of a task's `generation_kwargs`."""


def run(trained: Trained, resamplings: int) -> dict[str, Any]:
    """What `lm_eval.simple_evaluate` gives."""
    options = trained.options
    manager = Tasks(include_path=options.task_path)
    unknown = [name for name in options.tasks if name not in manager.all_tasks]
    if unknown:
        near = nearest(unknown[0], manager.all_tasks)
        raise UserError(f"tasks={unknown[0]}: neither lm-eval nor task_path has such a task{near}")
    return lm_eval.simple_evaluate(
        Harness(trained),
        tasks=options.tasks,
        task_manager=manager,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        bootstrap_iters=resamplings,
        log_samples=False,
    )


def table(found: dict[str, Any]) -> str:
    """The harness's own table, of groups of tasks too."""
    parts = [make_table(found)] + ([make_table(found, "groups")] if found.get("groups") else [])
    return "\n".join(part.strip("\n") for part in parts)


class Tasks(TaskManager):
    """Whatever goes wrong while tasks are read and their data fetched is one line."""

    def load(self, task_list: Any) -> Any:
        try:
            loaded = super().load(task_list)
        except Exception as error:  # tasks are code: anything may come
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise UserError(f"tasks={show(task_list)} cannot be loaded ({reason})") from error
        for name, task in loaded["tasks"].items():
            if getattr(task, "UNSAFE_CODE", False):
                raise UserError(f"tasks={name}: runs programs that the model writes, which is not done here")
        return loaded


class Harness(TemplateLM):
    """Contexts begin after an end-of-text token, as documents did in training."""

    def __init__(self, trained: Trained) -> None:
        super().__init__()
        self.trained = trained
        self.text = load_tokenizer(trained.run_dir)

    @property
    def eot_token_id(self) -> int:
        return self.text.eot

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        ids = self.text.encode(string)
        return ids if add_special_tokens is False else [self.text.eot, *ids]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        before, after = super()._encode_pair(context, continuation)
        if not after:  # a token reaches over the border: without this the continuation would cost nothing
            return self.tok_encode(context), self.tok_encode(continuation, add_special_tokens=False)
        return before, after

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)  # tokenising needs no bar

    def _loglikelihood_tokens(self, requests: Sequence[tuple], **_: Any) -> list[tuple[float, bool]]:
        return self.score([(before, after) for _, before, after in requests])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts: each is one document of any length, its state carried from piece to piece."""
        texts = [self.text.encode(request.args[0]) for request in requests]
        return [total for total, _ in self.score([([self.text.eot], ids) for ids in texts])]

    def score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """For ids before and after: the log-likelihood of those after, and whether greedy decoding gives them."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        # What is scored at a place is the next token, so the last one is not read.
        lengths = [len(before) + len(after) - 1 for before, after in pairs]
        with tqdm(total=sum(lengths), desc="log-likelihoods", unit=" tokens", disable=None) as bar:
            for group in packs(lengths, self.trained.piece):
                ids, labels, ends = [], [], [0]
                for n in group:
                    before, after = pairs[n]
                    ids += [*before, *after][:-1]
                    labels += [IGNORE] * (len(before) - 1) + after
                    ends.append(len(ids))
                nll, right = token_losses(
                    self.trained.model,
                    torch.tensor([ids]),
                    torch.tensor([labels]),
                    torch.tensor(ends, dtype=torch.int32),
                    self.trained.piece,
                )
                for n, begin, end in zip(group, ends[:-1], ends[1:], strict=True):
                    own = slice(end - len(pairs[n][1]), end)
                    assert begin <= own.start
                    found[n] = (-float(nll[0, own].double().sum()), bool(right[0, own].all()))
                bar.update(len(ids))
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text before the first of a request's stop strings, end-of-text, or its number of tokens."""
        alike = defaultdict(list)
        settings = [wishes(request.args[1]) for request in requests]
        for n, (sampling, _, _) in enumerate(settings):
            alike[tuple(vars(sampling).items())].append(n)
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        found = [""] * len(requests)
        with tqdm(total=len(requests), desc="texts", disable=None) as bar:
            for numbers in alike.values():
                for group in packs([len(prompts[n]) for n in numbers], self.trained.piece, ROWS):
                    rows = [numbers[i] for i in group]
                    texts = self.continue_rows(rows, [prompts[n] for n in rows], [settings[n] for n in rows])
                    for n, text in zip(rows, texts, strict=True):
                        found[n] = text
                    bar.update(len(rows))
        return found

    def continue_rows(
        self, numbers: list[int], prompts: list[list[int]], settings: list[tuple[Sampling, list[str], int]]
    ) -> list[str]:
        """Prompts with the same sampling; request `n` draws with the run's seed + n."""
        ids: list[list[int]] = [[] for _ in prompts]
        texts, ended = [""] * len(prompts), set()
        for row, token in generate_rows(
            self.trained.model,
            prompts,
            max(most for _, _, most in settings),
            settings[0][0],
            seed=[self.trained.run.seed + n for n in numbers],
            stop=self.text.eot,
            ended=ended,
            piece=self.trained.piece,
        ):
            if token is None:
                continue
            _, until, most = settings[row]
            ids[row].append(token)
            texts[row] = self.text.decode(ids[row])
            places = [place for stop in until if (place := texts[row].find(stop)) >= 0]
            if places:
                texts[row] = texts[row][: min(places)]
            if places or len(ids[row]) == most:
                ended.add(row)
        return texts


def packs(lengths: Sequence[int], budget: int, most: int | None = None) -> Iterator[list[int]]:
    """Numbers of the lengths, the longest first, in groups of at most `budget` in all (or one) and `most` members."""
    group: list[int] = []
    total = 0
    for n in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        if group and (total + lengths[n] > budget or len(group) == most):
            yield group
            group, total = [], 0
        group.append(n)
        total += lengths[n]
    if group:
        yield group


def wishes(given: dict[str, Any]) -> tuple[Sampling, list[str], int]:
    """How a task wants its text: sampling, stop strings, number of tokens. Raises UserError for what is unknown."""
    known = dict(given)
    for alias in ("max_new_tokens", "max_tokens", "max_completion_tokens"):
        if alias in known:
            known.setdefault("max_gen_toks", known.pop(alias))
    odd = sorted(set(known) - KNOWN) or ["num_beams"] * (known.get("num_beams", 1) != 1)
    if odd:
        raise UserError(f"generation_kwargs: {odd[0]}={show(known[odd[0]])} of the task is not supported")
    temperature = float(known.get("temperature") or 0)
    if known.get("do_sample") is False:
        temperature = 0.0
    elif known.get("do_sample") and "temperature" not in known:
        temperature = 1.0
    until = known.get("until") or []
    sampling = Sampling(temperature, known.get("top_k") or None, float(known.get("top_p", 1.0)))
    most = int(known.get("max_gen_toks", MAX_NEW_TOKENS))
    if most < 1:
        raise UserError(f"generation_kwargs: max_gen_toks={most} of the task must be at least 1")
    return sampling, [until] if isinstance(until, str) else [stop for stop in until if stop], most
