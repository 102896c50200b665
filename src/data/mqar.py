"""data=mqar: multi-query associative recall (Arora et al. 2023), the task that separates sequence mixers.

An example of length T with N pairs, over a vocabulary of V tokens:

    k1 v1 k2 v2 … kN vN | fill … k2 … fill … k1 …
                               ↑ label v2    ↑ label v1

N distinct keys of [1, V/2), N distinct values of [V/2, V), pairs in the first 2N places. Of the S = (T -
2N) / 2 slots after them, N are drawn without replacement with probability ∝ i^(a-1), i = 1 … S; key j is
asked at place 2N + 2·slot_j, and there, at the query itself, is the label: its value. Every other place has
no loss, and holds a random token (or 0). Metric: the mean over sequences of a sequence's accuracy, by N.

A training set is a fixed number of examples, seen once an epoch in the same order, kind by kind; `fresh`
makes every example new. An example is a pure function of (seed, split, kind, number). Source: Zoology,
`multiquery_ar`.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch

from src.data import IGNORE, Batch, DataModule, Split
from src.data.common.sampling import hash_uniform
from src.errors import UserError


class Kind(NamedTuple):
    """Examples of one shape."""

    seq_len: int
    n_pairs: int
    examples: int

    def __str__(self) -> str:
        return ":".join(map(str, self))


PUBLISHED_TRAIN = ["64:4:100000", "128:8:20000", "256:16:20000", "256:32:20000", "256:64:20000"]
PUBLISHED_TEST = [
    f"{t}:{n}:1000" for t, n in [(64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256)]
]
STREAMS = {"train": 0, "val": 1, "test": 2}


class MQAR(DataModule):
    """Multi-query associative recall; see the module."""

    @dataclass
    class Config(DataModule.Config):
        seq_len: int = 64
        """Places of an example (single kind)."""
        n_pairs: int = 4
        """Key–value pairs of an example (single kind)."""
        examples: int = 100_000
        """Training examples of an epoch (single kind)."""
        batch_size: int = 256
        mixture: list[str] = field(default_factory=list)
        """Training kinds seq_len:n_pairs:examples in their order instead of the single one; or: published."""
        val: list[str] = field(default_factory=list)
        """Validation kinds, likewise; empty: 1000 examples of each training kind."""
        test: list[str] = field(default_factory=list)
        """Test kinds, likewise; empty: those of validation; published: up to 1024 places with 256 pairs."""
        vocab_size: int = 8192
        """Keys and values halve it."""
        power: float = 0.01
        """a of the slots' law i^(a-1): small asks soon after the pairs, 1 asks anywhere."""
        fill: Literal["random", "zeros"] = "random"
        """What stands in unused places."""
        fresh: bool = False
        """Never repeat a training example; false: every epoch has the same ones."""

    config: Config

    def __init__(self, config: Config, *, seed: int = 0, micro_batch_size: int | None = None) -> None:
        super().__init__(config, seed=seed, micro_batch_size=micro_batch_size)
        self.vocab_size = config.vocab_size
        single = [f"{config.seq_len}:{config.n_pairs}:{config.examples}"]
        train = self._kinds("mixture", config.mixture or single, PUBLISHED_TRAIN)
        val = self._kinds("val", config.val, PUBLISHED_TEST) or [kind._replace(examples=1000) for kind in train]
        test = self._kinds("test", config.test, PUBLISHED_TEST) or val
        self.kinds: dict[str, list[Kind]] = {"train": train, "val": val, "test": test}
        # Optimizer steps of each training kind in an epoch; the last may take some examples twice.
        self._steps = np.array([-(-kind.examples // config.batch_size) for kind in train])
        facts = (self.kinds, config.vocab_size, config.power, config.fill, config.fresh, seed)
        self.fingerprint = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def _kinds(self, key: str, texts: list[str], published: list[str]) -> list[Kind]:
        texts = [texts] if isinstance(texts, str) else texts
        kinds = []
        for text in published if texts == ["published"] else texts:
            if not re.fullmatch(r"\d+:\d+:\d+", text):
                raise UserError(f"data.{key}={text}: expected seq_len:n_pairs:examples (64:4:1000), or: published")
            kinds.append(Kind(*map(int, text.split(":"))))
            self._check(kinds[-1])
        return kinds

    def _check(self, kind: Kind) -> None:
        keys = self.vocab_size // 2 - 1
        if kind.n_pairs < 1 or kind.examples < 1:
            raise UserError(f"mqar {kind}: needs at least one pair and one example")
        if 4 * kind.n_pairs > kind.seq_len:
            raise UserError(
                f"mqar {kind}: {kind.n_pairs} pairs and their queries need at least "
                f"{4 * kind.n_pairs} places, not {kind.seq_len}"
            )
        if kind.n_pairs > keys:
            raise UserError(
                f"mqar {kind}: {kind.n_pairs} pairs need data.vocab_size of at least {2 * kind.n_pairs + 2}, "
                f"not {self.vocab_size} ({keys} keys)"
            )

    @property
    def longest(self) -> int:
        return max(kind.seq_len for kind in self.kinds["train"])

    @property
    def steps_per_epoch(self) -> int:
        return int(self._steps.sum())

    def n_samples(self, split: Split) -> int:
        return sum(kind.examples for kind in self.kinds[split])

    def notes(self) -> list[str]:
        unused = ", ".join(
            f"data.{key}={getattr(self.config, key)}"
            for key in ("n_pairs", "examples")
            if self.config.mixture and getattr(self.config, key) != getattr(self.Config, key)
        )
        return [f"{unused} not used: the kinds of data.mixture say their own"] if unused else []

    def eval_batches(self, split: Split, batch_size: int) -> list[Sequence[int]]:
        batches, begin = [], 0
        for kind in self.kinds[split]:
            end = begin + kind.examples
            batches += [range(i, min(i + batch_size, end)) for i in range(begin, end, batch_size)]
            begin = end
        return batches

    def batch(self, split: Split, samples: Sequence[int]) -> Batch:
        place, numbers = (self._train_place if split == "train" else self._eval_place)(split, samples)
        kind = self.kinds[split][place]
        input_ids, labels = self.draw(kind, np.asarray(numbers), STREAMS[split], place)
        return Batch(
            input_ids=input_ids, labels=labels, cu_seqlens=None, n_bytes=None, n_words=None, n_pairs=kind.n_pairs
        )

    def _train_place(self, split: Split, samples: Sequence[int]) -> tuple[int, list[int]]:
        """The kind of these samples (of one step) and their numbers among its examples."""
        size = self.config.batch_size
        epoch, step = divmod(samples[0] // size, self.steps_per_epoch)
        place = int(np.searchsorted(np.cumsum(self._steps), step, side="right"))
        step -= int(self._steps[:place].sum())
        numbers = [step * size + i % size for i in samples]
        if self.config.fresh:
            return place, [epoch * int(self._steps[place]) * size + n for n in numbers]
        return place, [n % self.kinds["train"][place].examples for n in numbers]

    def _eval_place(self, split: Split, samples: Sequence[int]) -> tuple[int, list[int]]:
        ends = np.cumsum([kind.examples for kind in self.kinds[split]])
        place = int(np.searchsorted(ends, samples[0], side="right"))
        begin = int(ends[place]) - self.kinds[split][place].examples
        return place, [i - begin for i in samples]

    def draw(self, kind: Kind, numbers: np.ndarray, *stream: int) -> tuple[torch.Tensor, torch.Tensor]:
        """input_ids and labels [B, T] of the examples with these numbers; about 4 ms for 256 × 256."""
        t, n, v = kind.seq_len, kind.n_pairs, self.vocab_size
        address = (self.seed, *stream, numbers[:, None])
        keys = 1 + _distinct(v // 2 - 1, n, (*address, 0))
        values = v // 2 + _distinct(v - v // 2, n, (*address, 1))
        n_slots = (t - 2 * n) // 2
        # The n smallest of exponential variables E_i / p_i, in order, are draws without replacement
        # with probabilities p (Efraimidis & Spirakis 2006).
        weights = np.arange(1, n_slots + 1) ** (self.config.power - 1.0)
        times = -np.log(hash_uniform(*address, 2, np.arange(n_slots))) / weights
        queries = 2 * n + 2 * np.argsort(times, axis=1)[:, :n]
        input_ids = np.zeros((len(numbers), t), dtype=np.int64)
        if self.config.fill == "random":
            input_ids[:] = hash_uniform(*address, 3, np.arange(t)) * v
        input_ids[:, 0 : 2 * n : 2] = keys
        input_ids[:, 1 : 2 * n : 2] = values
        labels = np.full_like(input_ids, IGNORE)
        np.put_along_axis(input_ids, queries, keys, axis=1)
        np.put_along_axis(labels, queries, values, axis=1)
        return torch.from_numpy(input_ids), torch.from_numpy(labels)

    def describe(self) -> dict[str, object]:
        kinds = {split: ", ".join(map(str, kinds)) for split, kinds in self.kinds.items()}
        return super().describe() | kinds | {"steps_per_epoch": self.steps_per_epoch}


def _distinct(n_choices: int, n: int, address: tuple) -> np.ndarray:
    """[B, n]: n distinct numbers of range(n_choices) in each row, uniformly (Fisher–Yates, rows at once)."""
    uniform = hash_uniform(*address, np.arange(n))
    rows = np.arange(len(uniform))
    deck = np.tile(np.arange(n_choices, dtype=np.int32), (len(uniform), 1))
    for i in range(n):
        j = i + (uniform[:, i] * (n_choices - i)).astype(np.int64)
        deck[rows, j], deck[:, i] = deck[:, i].copy(), deck[rows, j]
    return deck[:, :n].astype(np.int64)
