"""data=niah: needles in a haystack, the eight retrieval tasks of RULER (Hsieh et al. 2024) with an own wording.

A needle is the sentence "The code of gentle-river is 4821763."; a question at the end asks for codes.

    task        haystack                     keys   values a key   asked
    single_1    one line repeated            1      1 number       1
    single_2    text                         1      1 number       1
    single_3    text                         1      1 uuid         1
    multikey_1  text                         4      1 number       1
    multikey_2  lines that are needles       all    1 number       1
    multikey_3  the same, keys are uuids     all    1 uuid         1
    multivalue  text                         1      4 numbers      1 key
    multiquery  text                         4      1 number       4

The text is a corpus's (`data.haystack=`), its splits are the splits here. An example is exactly `length` tokens with
the last end-of-text (src/data/common/needle_examples.py) and a pure function of (seed, split, task, length, number).
Depths are drawn without replacement from 40 points; a needle stands at the next border of a sentence or line, which in
a short example can be far off (`Example.depth`).

A training row is `seq_len` tokens: seq_len // length examples one after the other, the last takes the rest, so
nothing is padded. Row i has length `lengths[i mod their number]`; tasks take turns. Before these come `short_rows` rows
of the least length: most examples to a row, so that looking up is learnt soonest.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
import torch

from src.data import IGNORE, Batch, DataModule, Split
from src.data.common import needles
from src.data.common.corpus import Corpus
from src.data.common.needle_examples import Example, ExampleMaker
from src.data.common.packing import padded_borders
from src.data.common.tokenizer import find_tokenizer
from src.errors import UserError
from src.options import nearest, type_hints, unknown_key
from src.registry import DATA, build_options

SHARED = ("tokenizer", "vocab_size", "eot", "cache_dir")  # options that the corpus is given
ROW_OPTIONS = ("packing", "carry_state", "val_rows")  # of a corpus that is trained on: a haystack has no rows


class Niah(DataModule):
    """Needles in a haystack; see the module."""

    @dataclass
    class Config(DataModule.Config):
        seq_len: int = 1024
        """Tokens of a training row."""
        batch_size: int = 8
        tasks: list[str] = field(default_factory=lambda: list(needles.TASKS))
        """Needle tasks, which take turns."""
        lengths: list[int] = field(default_factory=list)
        """Tokens of a training example, row by row in turn; empty: data.seq_len."""
        short_rows: int = 0
        """Training rows of the least of these lengths that come before all others; a step takes data.batch_size."""
        val_lengths: list[int] = field(default_factory=list)
        """Tokens of a validation example; empty: those of training."""
        test_lengths: list[int] = field(default_factory=list)
        """Tokens of a test example; empty: those of validation."""
        val_examples: int = 16
        """Validation examples of each task and length."""
        test_examples: int = 16
        """Test examples of each task and length."""
        loss: Literal["answer", "all"] = "answer"
        """Where training takes the loss: the answer's tokens, or all. Validation always takes the answer's."""
        haystack: str = "prose"
        """The corpus that the text comes from: any data= that is one."""
        haystack_options: dict[str, Any] = field(default_factory=dict)
        """Its options, as data.haystack_options.path=novels/."""
        tokenizer: str = "bpe"
        """bpe (byte-level, trained on the haystack's training split), bytes, a tokenizer.json, or a Hub name."""
        vocab_size: int = 8192
        """Entries of the tokenizer that bpe trains; the others bring their own."""
        eot: str | None = None
        """End-of-text token of a foreign tokenizer; null: <|endoftext|>, </s>, <eos> or the like."""
        cache_dir: str | None = None
        """Where tokens and trained tokenizers are kept; null: data/cache of the repository."""

    config: Config

    def __init__(self, config: Config, *, seed: int = 0, micro_batch_size: int | None = None) -> None:
        super().__init__(config, seed=seed, micro_batch_size=micro_batch_size)
        if not config.tasks:
            raise UserError(f"data.tasks=[]: name at least one of {', '.join(needles.TASKS)}")
        for task in config.tasks:
            check_task(task, "data.tasks")
        train = config.lengths or [config.seq_len]
        val = config.val_lengths or train
        self.lengths: dict[str, list[int]] = {"train": train, "val": val, "test": config.test_lengths or val}
        for key in ("lengths", "val_lengths", "test_lengths", "val_examples", "test_examples"):
            value = getattr(config, key)
            for number in value if isinstance(value, list) else [value]:
                if number < 1:
                    raise UserError(f"data.{key}={number}: must be at least 1")
        if config.short_rows < 0:
            raise UserError(f"data.short_rows={config.short_rows}: must be at least 0")
        if max(train) > config.seq_len:
            raise UserError(f"data.lengths={max(train)}: longer than a row of data.seq_len={config.seq_len}")
        self.corpus = _corpus(config, seed)

    _maker: ExampleMaker | None = None

    @property
    def longest(self) -> int:
        return max(self.lengths["train"])

    # Preparation

    def prepare_data(self) -> None:
        """Tokenise the haystack, unless the cache has it. Raises UserError for a length without room for a task."""
        if self._maker is not None:
            return
        config, corpus = self.config, self.corpus
        if config.tokenizer != "bpe":
            corpus.tokenizer = find_tokenizer(config.tokenizer, config.eot)
            self._check_lengths(self._new_maker())  # before a large corpus is tokenised
        try:
            corpus.prepare_data()
        except UserError as error:
            raise UserError(_renamed(error, type(corpus))) from error
        maker = self._new_maker()
        self._check_lengths(maker)
        self.tokenizer, self.vocab_size, self._maker = corpus.tokenizer, corpus.vocab_size, maker
        facts = [corpus.fingerprint, self.tokenizer.fingerprint, needles.VERSION, self.seed, self.lengths]
        options = ("seq_len", "tasks", "loss", "short_rows", "val_examples", "test_examples")
        facts += [getattr(config, key) for key in options]
        self.fingerprint = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def setup(self, stage: str | None = None) -> None:
        """Open the cache (made first where prepare_data has not been called)."""
        self.prepare_data()

    def _new_maker(self) -> ExampleMaker:
        return ExampleMaker(self.corpus.tokenizer, self.corpus.stream, self.seed)

    def _check_lengths(self, maker: ExampleMaker) -> None:
        for split, lengths in self.lengths.items():
            key = "lengths" if split == "train" else f"{split}_lengths"
            key = key if getattr(self.config, key) else "seq_len"  # a split without its own is the training's
            maker.check(self.config.tasks, min(lengths), f"data.{key}")

    # Examples

    def smallest(self, task: str) -> int:
        """The least length that has room for every example of this task. After setup()."""
        check_task(task, "task")
        return self._maker.smallest(task)

    def example(self, split: Split, task: str, length: int, number: int, depth: float | None = None) -> Example:
        """One example of any task and length; `depth` in [0, 1] places the first asked needle (null: drawn).

        Raises UserError for an unknown task, a depth outside and a length without room. After setup().
        """
        check_task(task, "task")
        if depth is not None and not 0 <= depth <= 1:
            raise UserError(f"depth={depth}: must be in [0, 1]")
        self._maker.check([task], length, "length")
        drawn = self._maker.draw(split, task, length, number, depth)
        return Example(drawn.prompt.tolist(), drawn.answer.tolist(), drawn.references, drawn.depth, task)

    def train_examples(self, row: int) -> list[tuple[str, int, int]]:
        """(task, length, number) of the examples of a training row, whose lengths add up to `seq_len`."""
        lengths, tasks, seq_len = self.lengths["train"], self.config.tasks, self.config.seq_len
        short = self.config.short_rows
        if row < short:
            turn, place, length = row, len(lengths), min(lengths)
        else:
            turn, place = divmod(row - short, len(lengths))
            length = lengths[place]
        places = len(lengths) + (short > 0)
        n = seq_len // length
        examples = []
        for i in range(turn * n, turn * n + n):
            number, task = divmod(i, len(tasks))
            # The place keeps examples apart where a length is listed twice.
            examples.append((tasks[task], length, number * places + place))
        task, _, number = examples[-1]
        examples[-1] = (task, length + seq_len % length, number)
        return examples

    def eval_example(self, split: Split, sample: int) -> tuple[str, int, int]:
        """(task, length, number) of a validation or test sample: by length, then task, then number."""
        group, number = divmod(sample, self._per_group(split))
        length, task = divmod(group, len(self.config.tasks))
        return self.config.tasks[task], self.lengths[split][length], number

    def _per_group(self, split: Split) -> int:
        return self.config.val_examples if split == "val" else self.config.test_examples

    def haystack_tokens(self, split: Split) -> int:
        """Tokens of the split's text: a longer example repeats it. After setup(); UserError where it has none."""
        return len(self.corpus.stream(split))

    # Batches

    def n_samples(self, split: Split) -> int:
        return len(self.lengths[split]) * len(self.config.tasks) * self._per_group(split)

    def eval_batches(self, split: Split, batch_size: int) -> list[Sequence[int]]:
        """Batches of one task and length, with at most `batch_size` training rows' tokens (one example at least)."""
        size, batches = self._per_group(split), []
        for begin in range(0, self.n_samples(split), size):
            length = self.eval_example(split, begin)[1]
            step = max(1, batch_size * self.config.seq_len // length)
            batches += [range(i, min(i + step, begin + size)) for i in range(begin, begin + size, step)]
        return batches

    def batch(self, split: Split, samples: Sequence[int]) -> Batch:
        """The examples of these rows (training) or samples, one after the other in one row."""
        if split == "train":
            wanted = [example for row in samples for example in self.train_examples(row)]
        else:
            wanted = [self.eval_example(split, sample) for sample in samples]
        everything = split == "train" and self.config.loss == "all"
        input_ids, labels, starts, place = [], [], [], 0
        for task, length, number in wanted:
            drawn = self._maker.draw(split, task, length, number)
            ids = np.concatenate([drawn.prompt, drawn.answer, [self.tokenizer.eot]])
            target = np.full(length, IGNORE, dtype=np.int64)
            begin = 0 if everything else len(drawn.prompt) - 1
            end = length - 1 if everything else begin + len(drawn.answer)
            target[begin:end] = ids[begin + 1 : end + 1]
            input_ids.append(ids)
            labels.append(target)
            starts.append(place)
            place += length
        return Batch(
            input_ids=torch.from_numpy(np.concatenate(input_ids))[None],
            labels=torch.from_numpy(np.concatenate(labels))[None],
            cu_seqlens=padded_borders(np.array(starts), place),
            n_bytes=None,
            n_words=None,
            n_pairs=None,
            examples=True,
        )

    def describe(self) -> dict[str, object]:
        facts = super().describe() | {"tokenizer": self.config.tokenizer, "haystack": self.config.haystack}
        facts["tasks"] = ", ".join(self.config.tasks)
        for split, lengths in self.lengths.items():
            facts[split] = f"{'/'.join(map(str, lengths))} tokens"
            facts[f"{split}.haystack tokens"] = self.haystack_tokens(split)
        if self.config.short_rows:
            facts["train"] = f"{self.config.short_rows:,} rows of {min(self.lengths['train'])}, then {facts['train']}"
        return facts


def check_task(task: str, key: str) -> None:
    """Raises UserError, which names the option `key`, for a task that there is not."""
    if task not in needles.TASKS:
        raise UserError(f"{key}={task}: unknown{nearest(task, needles.TASKS)} (allowed: {', '.join(needles.TASKS)})")


def _corpus(config: Niah.Config, seed: int) -> Corpus:
    known = DATA.names()
    if config.haystack not in known:
        raise UserError(
            f"data.haystack={config.haystack}: unknown{nearest(config.haystack, known)} (any data= that is a text"
            f" corpus, as prose, text, wikitext are; there are {', '.join(known)})"
        )
    cls = DATA.get(config.haystack)
    if not issubclass(cls, Corpus):
        raise UserError(f"data.haystack={config.haystack}: is no text corpus (as prose, text, wikitext are)")
    for key in SHARED:
        if key in config.haystack_options:
            raise UserError(f"data.haystack_options.{key}: set data.{key}")
    where = "data.haystack_options"
    own = haystack_keys(cls)
    for key in config.haystack_options:
        if key not in own:
            raise UserError(unknown_key(f"{where}.{key}", [f"{where}.{k}" for k in own], own, where))
    shared = {key: getattr(config, key) for key in SHARED}
    options = build_options(cls, {**config.haystack_options, **shared}, where)
    return cls(options, seed=seed)


def haystack_keys(cls: type[Corpus]) -> list[str]:
    """The options of a corpus that say which text it is."""
    rows = {*SHARED, *ROW_OPTIONS, *(f.name for f in fields(DataModule.Config))}
    return [key for key in type_hints(cls.Config) if key not in rows]


def _renamed(error: UserError, cls: type[Corpus]) -> str:
    """The message with the corpus's own options by the names that they have here."""
    own = [field.name for field in fields(cls.Config) if field.name not in SHARED]
    return re.sub(rf"\bdata\.({'|'.join(own)})\b", r"data.haystack_options.\1", str(error))
