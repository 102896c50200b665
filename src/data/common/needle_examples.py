"""Examples of the needle tasks with an exact number of tokens.

    EOT instruction haystack-with-needles question beginning-of-answer | answer | EOT
    ────────────────────────────── prompt ────────────────────────────┘

Everything is put together in token space: each sentence is tokenised alone (they meet at white space, where the word
patterns of tokenizers begin anew), the haystack is as many tokens of a stream as are left.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from src.data import Split
from src.data.common import needles
from src.data.common.haystack import Haystack, insert, nearest_of
from src.data.common.needles import TASKS, Task
from src.data.common.packing import Stream
from src.data.common.sampling import hash_uniform
from src.data.common.tokenizer import Tokenizer
from src.errors import UserError

STREAMS = {"train": 0, "val": 1, "test": 2}
SAMPLES = 512  # examples measured for the smallest length, of which
ENOUGH = 0.95  # this share fits with another line
DEPTHS = 40  # points from 0 to 1 that depths are drawn from
LONGEST = {"number": 7, "uuid": 36}  # characters; a tokenizer makes at most one token of each


class Example(NamedTuple):
    """One example: prompt, answer and a last end-of-text are `length` tokens."""

    prompt_ids: list[int]
    """From end-of-text to the beginning of the answer."""
    answer_ids: list[int]
    """The values, in the order of the question or of their appearance."""
    references: list[str]
    """The values as text; `needles.contained` scores a generated one against them."""
    depth: float
    """Where the first asked needle stands: the share of the haystack before it."""
    task: str


class Drawn(NamedTuple):
    """An example whose prompt is an array (int64)."""

    prompt: np.ndarray
    answer: np.ndarray
    references: list[str]
    depth: float


class TooShort(UserError):
    """A length without room for a task: `key` is the option that asked for it, `least` the smallest possible one,
    `fitting` the other tasks, those that have room."""

    def __init__(self, key: str, length: int, task: str, least: int, fitting: Sequence[str]) -> None:
        self.length, self.task, self.least = length, task, least
        others = f"; there is room for {', '.join(fitting)}" if fitting else ""
        super().__init__(f"{key}={length}: {self.reason}{others}")

    @property
    def reason(self) -> str:
        needed = "instruction, needles, question and answer"
        if TASKS[self.task].haystack == "needles":
            needed = "instruction, the needle and another line, question and answer"
        return f"{self.task} needs at least {self.least} tokens with this tokenizer ({needed})"


class ExampleMaker:
    """Draws examples for one tokenizer; `stream` gives the tokens of a split."""

    def __init__(self, tokenizer: Tokenizer, stream: Callable[[Split], Stream], seed: int) -> None:
        self.tokenizer, self.stream, self.seed = tokenizer, stream, seed
        self._heads: dict[str, np.ndarray] = {}
        self._smallest: dict[str, int] = {}

    @cached_property
    def haystack(self) -> Haystack:
        return Haystack(self.tokenizer)

    def smallest(self, task: str) -> int:
        """The length from which on every example of the task has room for instruction, needles and question.

        Where the haystack is of needles, also for another line: without, there is nothing to mistake the asked one for.
        """
        if task not in self._smallest:
            kind = TASKS[task]
            value = LONGEST[kind.value] + 1
            key, extra = ("", LONGEST["uuid"] + 1) if kind.key == "uuid" else (self._longest_key, 0)
            n_queries = kind.n_queries
            needle, tail = self._encode(_needle(kind, key, ""), _tail(kind, [key] * n_queries))
            self._smallest[task] = (
                len(self._head(task))
                + kind.n_needles * (len(needle) + extra + value)
                + len(tail)
                + 2 * n_queries * extra  # the question says its keys twice
                + kind.n_answers * (value + 1)  # a comma after each
            )
            if kind.haystack == "needles" and kind.key == "word":
                self._smallest[task] += len(needle) + value
            elif kind.haystack == "needles":
                self._smallest[task] = max(self._smallest[task], self._with_a_line(task))
        return self._smallest[task]

    def _with_a_line(self, task: str) -> int:
        """Tokens of an example and another line, as drawn: few of many need more, and `_lines` then takes a short line.

        Two times the longest possible UUID would be far more than examples have.
        """
        kind = TASKS[task]
        keys, values = (needles.KINDS[what](SAMPLES, i) for i, what in enumerate((kind.key, kind.value)))
        lines = self._encode(*[_needle(kind, *pair) for pair in zip(keys, values, strict=True)])
        tails = self._encode(*[_tail(kind, [key]) for key in keys])
        answers = self._encode(*[needles.answer([value]) for value in values])
        others = [*lines[1:], lines[0]]
        sizes = [sum(map(len, parts)) for parts in zip(lines, tails, answers, others, strict=True)]
        return len(self._head(task)) + int(np.quantile(sizes, ENOUGH, method="higher")) + 1

    def check(self, tasks: Sequence[str], length: int, key: str) -> None:
        """Raises TooShort for a length below `smallest` of one of the tasks; `key` is the option that asked for it."""
        largest = max(tasks, key=self.smallest)  # one error says what all tasks need
        if length < (least := self.smallest(largest)):
            raise TooShort(key, length, largest, least, [task for task in tasks if self.smallest(task) <= length])

    def draw(self, split: Split, task: str, length: int, number: int, depth: float | None = None) -> Drawn:
        """A pure function of its arguments and the seed. depth: of the first asked needle, the others are drawn."""
        kind = TASKS[task]
        address = (self.seed, STREAMS[split], list(TASKS).index(task), length, number)
        keys = needles.KINDS[kind.key](kind.n_keys, *address, 0)
        values = needles.KINDS[kind.value](kind.n_needles, *address, 1)
        owners = [key for key in keys for _ in range(kind.n_values)]
        depths = [i / (DEPTHS - 1) for i in needles.distinct(DEPTHS, kind.n_needles, *address, 2)]
        if depth is not None:
            depths[0] = depth
        head = self._head(task)
        pieces = self._encode(*[_needle(kind, *pair) for pair in zip(owners, values, strict=True)])
        tail, answer = self._encode(_tail(kind, keys[: kind.n_queries]), needles.answer(values[: kind.n_answers]))
        n = length - len(head) - sum(map(len, pieces)) - len(tail) - len(answer) - 1
        if n < 0:
            raise UserError(f"length={length}: an example of {task} needs {length - n} tokens with this tokenizer")
        if kind.haystack == "text":
            where = float(hash_uniform(*address, 3))
            hay = self.haystack.cut(self.stream(split), n, where)
            places = self.haystack.places(hay, depths)
        else:
            hay, starts = self._lines(kind, n, len(pieces[0]), address)
            places = [nearest_of(starts, d * n) for d in depths]
        filled, order = insert(hay, places, pieces)
        if kind.n_values > 1:
            values = [values[i] for i in order]
            (answer,) = self._encode(needles.answer(values))
        return Drawn(
            np.concatenate([head, filled, tail]), answer, values[: kind.n_answers], places[0] / n if n else 0.0
        )

    def _lines(self, kind: Task, n: int, size: int, address: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """n tokens of lines (the first is cut), and where lines begin and end. size: about that of a line."""
        if kind.haystack == "noise":
            (line,) = self._encode(f"\n{needles.NOISE}")
            lines = [line] * -(-n // len(line))
        else:
            lines = []
            while (left := n - sum(map(len, lines))) > 0:
                few = not lines and n < 2 * size  # then some to choose from
                lines += self._distractors(kind, len(lines), 64 if few else left // size + 8, address)
            whole = [i for i, line in enumerate(lines) if len(line) <= n]
            if whole and len(lines[-1]) > n:  # no room for the last: another one is whole
                lines[-1], lines[whole[-1]] = lines[whole[-1]], lines[-1]
        ends = np.cumsum([len(line) for line in lines], dtype=np.int64)
        tokens = np.concatenate([np.zeros(0, dtype=np.int64), *lines])
        spare = len(tokens) - n
        starts = np.concatenate([[0], ends]) - spare
        return tokens[spare:], starts[starts >= 0]

    def _distractors(self, kind: Task, begin: int, n: int, address: tuple[int, ...]) -> list[np.ndarray]:
        """Needles begin … begin + n - 1 with other keys and values than the asked one's."""
        end = kind.n_needles + begin + n
        if kind.key == "word" and end > needles.N_WORD_KEYS:
            raise UserError(f"length={address[3]}: more lines than the {needles.N_WORD_KEYS} different keys")
        drawn = (needles.KINDS[what](end, *address, i)[-n:] for i, what in enumerate((kind.key, kind.value)))
        return self._encode(*[_needle(kind, *pair) for pair in zip(*drawn, strict=True)])

    def _head(self, task: str) -> np.ndarray:
        if task not in self._heads:
            kind = TASKS[task]
            text = needles.instruction(kind) + ("" if kind.haystack == "text" else "\n")
            self._heads[task] = np.concatenate([[self.tokenizer.eot], *self._encode(text)])
        return self._heads[task]

    def _encode(self, *texts: str) -> list[np.ndarray]:
        return [np.asarray(ids, dtype=np.int64) for ids in self.tokenizer.encode_batch(texts)]

    @cached_property
    def _longest_key(self) -> str:
        sizes = [
            [len(ids) for ids in self._encode(*[form.format(word) for word in words])]
            for words, form in ((needles.ADJECTIVES, " {}"), (needles.NOUNS, "-{}"))
        ]
        adjective, noun = (int(np.argmax(of)) for of in sizes)
        return f"{needles.ADJECTIVES[adjective]}-{needles.NOUNS[noun]}"


def _needle(kind: Task, key: str, value: str) -> str:
    """In a text it follows a sentence, else it is a line."""
    return (" " if kind.haystack == "text" else "\n") + needles.needle(key, value)


def _tail(kind: Task, keys: list[str]) -> str:
    return "\n" + "\n".join(needles.question(keys, kind.n_values))
