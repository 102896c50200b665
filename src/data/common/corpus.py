"""The base of every text corpus: a subclass gives documents, this gives batches of next-token prediction."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from torch.utils.data import DataLoader

from src.data import Batch, DataModule, Split
from src.data.common import cache
from src.data.common.lanes import carry_of, lane_rows, lane_spans
from src.data.common.packing import Stream, pack
from src.data.common.prepare import Document, build, flat
from src.data.common.sampling import permutation
from src.data.common.tokenizer import find_tokenizer
from src.errors import UserError

CACHE_DIR = Path(__file__).parents[3] / "data" / "cache"


class Corpus(DataModule):
    """Documents, tokenised once into a memory-mapped cache, in rows of `seq_len` tokens.

    A training epoch is every full row once, in an order drawn from (seed, epoch); sample i is row i mod
    n_rows of epoch i // n_rows. Validation and test are read in order, each token once, their last row
    shorter. A split shorter than one row is one shorter row.
    """

    @dataclass
    class Config(DataModule.Config):
        batch_size: int = 4
        tokenizer: str = "bpe"
        """bpe (byte-level, trained on the training split), bytes, a tokenizer.json, or a Hub name."""
        vocab_size: int = 8192
        """Entries of the tokenizer that bpe trains; the others bring their own."""
        eot: str | None = None
        """End-of-text token of a foreign tokenizer; null: <|endoftext|>, </s>, <eos> or the like."""
        packing: Literal["documents", "concatenate"] = "documents"
        """documents: states and attention stop at document borders; concatenate: they run through a row."""
        carry_state: bool = False
        """Read on in the next step where a row ends inside a document, with the state it left (truncated BPTT)."""
        val_rows: int | None = 128
        """Validation rows that training looks at, evenly spread over the split; null: all. evaluate takes all."""
        cache_dir: str | None = None
        """Where tokens and trained tokenizers are kept; null: data/cache of the repository."""
        tokenizer_bytes: int = 200_000_000
        """Train bpe on about so many bytes of the training split, from its beginning."""

    config: Config

    def __init__(self, config: Config, *, seed: int = 0, micro_batch_size: int | None = None) -> None:
        super().__init__(config, seed=seed, micro_batch_size=micro_batch_size)
        if config.val_rows is not None and config.val_rows < 1:
            raise UserError(f"data.val_rows={config.val_rows}: must be at least 1 (null: all)")
        if config.carry_state and config.packing != "documents":
            raise UserError(f"data.packing={config.packing}: data.carry_state=true needs data.packing=documents")

    # What a subclass writes

    @abstractmethod
    def documents(self, split: Split) -> Iterable[Document]:
        """The split's documents in a fixed order. Asked only where the cache has no tokens yet."""

    @abstractmethod
    def content_hash(self) -> str:
        """Hexadecimal hash of all that `documents` gives for all splits, found without tokenising."""

    def all_documents(self) -> Iterator[tuple[Split, Document]]:
        """Those of all splits, each with its split. A corpus whose splits are read together overrides it."""
        for split in get_args(Split):
            for document in self.documents(split):
                yield split, document

    def size(self) -> int | None:
        """Bytes of all splits, where known without reading or about: for the progress bar."""
        return None

    # Preparation

    @property
    def cache_dir(self) -> Path:
        return Path(self.config.cache_dir).expanduser() if self.config.cache_dir else CACHE_DIR

    @cached_property
    def _content(self) -> str:
        return self.content_hash()[:16]

    @property
    def fingerprint(self) -> str:
        return self._content

    def prepare_data(self) -> None:
        """Train the tokenizer and tokenise, unless the cache has both. Several processes may call it."""
        if self._streams is not None:
            return
        if not self._open():
            with cache.exclusive(self.cache_dir, self._content):
                if self.tokenizer is None:
                    texts = self._training_texts()
                    self.tokenizer = cache.trained_bpe(self._bpe_path(), self.config.vocab_size, texts)
                folder = self._folder()
                if not folder.is_dir():
                    build(folder, self.all_documents, self.tokenizer, self.size())
            self._open()

    def setup(self, stage: str | None = None) -> None:
        """Open the cache (made first where prepare_data has not been called)."""
        self.prepare_data()
        for split in ("train", "val") if stage == "fit" else ():  # the others are asked for by their loader
            self._require(split)
        if stage == "fit" and self.config.carry_state and not self._lane_rows:
            raise UserError(
                f"data.batch_size={self.config.batch_size}: data.carry_state=true reads so many parts of the text side"
                f" by side, but it has {self.n_rows('train')} rows of data.seq_len={self.config.seq_len} only"
            )

    def train_dataloader(self) -> DataLoader:
        self._require("train")
        return super().train_dataloader()

    def _require(self, split: Split) -> None:
        if self.n_rows(split) == 0:
            raise UserError(f"data={self.config.name} has no text in its {split} split")

    def stream(self, split: Split) -> Stream:
        """The split's tokens. After setup(). Raises UserError where it has none."""
        self._require(split)
        return self._streams[split]

    _streams: dict[str, Stream] | None = None

    def _open(self) -> bool:
        """Take tokenizer and tokens from the cache, where they are."""
        if self.tokenizer is None:
            config = self.config
            if config.tokenizer != "bpe":
                self.tokenizer = find_tokenizer(config.tokenizer, config.eot)
            elif self._bpe_path().is_file():
                self.tokenizer = find_tokenizer(str(self._bpe_path()))
            else:
                return False
        self.vocab_size = self.tokenizer.vocab_size
        if self._folder().is_dir():
            self._streams = cache.open_streams(self._folder())
        return self._streams is not None

    def _bpe_path(self) -> Path:
        config = self.config
        return cache.bpe_path(self.cache_dir, self._content, config.vocab_size, config.tokenizer_bytes)

    def _folder(self) -> Path:
        return cache.token_path(self.cache_dir, self.config.name or "text", self._content, self.tokenizer)

    def _training_texts(self) -> Iterator[str]:
        """What bpe is trained on. Raises UserError where there is none."""
        left = self.config.tokenizer_bytes
        if left < 1:
            raise UserError(f"data.tokenizer_bytes={left}: must be at least 1")
        for _, _, text in flat(("train", document) for document in self.documents("train")):
            yield text
            left -= len(text)
            if left <= 0:
                return
        if left == self.config.tokenizer_bytes:
            raise UserError(f"data={self.config.name} has no training text for data.tokenizer=bpe")

    # Batches

    def row_length(self, split: Split) -> int:
        """Tokens of a full row: seq_len, or all of a shorter split."""
        return max(1, min(self.config.seq_len, len(self._streams[split])))

    def n_rows(self, split: Split) -> int:
        """Rows of an epoch: full ones in training (one shorter where there is no full one), else all."""
        length, size = len(self._streams[split]), self.row_length(split)
        return length // size if split == "train" else -(-length // size)

    def n_samples(self, split: Split) -> int:
        n = self.n_rows(split)
        return n if split != "val" or self.config.val_rows is None else min(n, self.config.val_rows)

    @property
    def max_seq_len(self) -> int:
        """Tokens that a state can have behind it: with states carried on, those of a document, or of a lane."""
        longest = super().max_seq_len
        if self.config.carry_state:
            document = int(np.diff(self._streams["train"].starts).max(initial=0))
            return max(longest, min(document, self._lane_rows * self.config.seq_len))
        return longest

    @property
    def _lane_rows(self) -> int:
        return lane_rows(self._streams["train"], self.config.batch_size, self.config.seq_len)

    def batch(self, split: Split, samples: Sequence[int]) -> Batch:
        if split == "train" and self.config.carry_state:
            return self._lanes(samples)
        stream, size, n = self._streams[split], self.row_length(split), self.n_rows(split)
        if split == "train":
            samples = [int(permutation(n, self.seed, i // n)[i % n]) for i in samples]
        elif (taken := self.n_samples(split)) < n:
            samples = [i * n // taken for i in samples]
        rows = [(i * size, min((i + 1) * size, len(stream))) for i in samples]
        return self._packed(stream, rows)

    def _packed(self, stream: Stream, rows: list[tuple[int, int]]) -> Batch:
        input_ids, labels, cu_seqlens = pack(stream, rows, self.config.packing)
        n_bytes, n_words = (
            sum(stream.share(starts, end) - stream.share(starts, begin) for begin, end in rows)
            for starts in (stream.byte_starts, stream.word_starts)
        )
        return Batch(
            input_ids=input_ids, labels=labels, cu_seqlens=cu_seqlens, n_bytes=n_bytes, n_words=n_words, n_pairs=None
        )

    def _lanes(self, samples: Sequence[int]) -> Batch:
        stream, config = self._streams["train"], self.config
        parts, continues = [], []
        for i in samples:
            step, lane = divmod(i, config.batch_size)
            epoch, row = divmod(step, self._lane_rows)
            place = {"lane": lane, "lanes": config.batch_size, "row": row, "seed": self.seed, "epoch": epoch}
            spans, goes_on = lane_spans(stream, seq_len=config.seq_len, **place)
            parts.append(spans)
            continues.append(goes_on)
        batch = self._packed(stream, [span for spans in parts for span in spans])
        batch["carry"] = carry_of([len(spans) for spans in parts], continues, len(batch["cu_seqlens"]) - 1)
        return batch

    def eval_batches(self, split: Split, batch_size: int) -> list[Sequence[int]]:
        return self.batches_of(split, range(self.n_samples(split)), batch_size)

    def batches_of(self, split: Split, samples: Sequence[int], batch_size: int) -> list[Sequence[int]]:
        """These samples, in ascending order, in evaluation batches."""
        batches = [samples[i : i + batch_size] for i in range(0, len(samples), batch_size)]
        all_rows = self.n_samples(split) == self.n_rows(split)  # else the last, shorter one is not among them
        ragged = all_rows and len(self._streams[split]) % self.row_length(split) != 0
        has_last = bool(batches) and batches[-1][-1] == self.n_rows(split) - 1
        if self.config.packing == "concatenate" and ragged and has_last and len(batches[-1]) > 1:
            *rest, last = batches[-1]
            batches[-1:] = [rest, [last]]  # a shorter row does not stack with full ones
        return batches

    def notes(self) -> list[str]:
        tokens, rows, config = len(self._streams["train"]), self.n_rows("train"), self.config
        found = []
        if tokens < config.seq_len:
            found.append(
                f"the train split has {tokens:,} tokens: its one row is shorter than data.seq_len={config.seq_len}"
            )
        if rows < config.batch_size:
            found.append(f"the train split has {rows} rows: a step of data.batch_size={config.batch_size} repeats them")
        return found

    def describe(self) -> dict[str, object]:
        facts = super().describe() | {"tokenizer": self.config.tokenizer}
        for split, stream in self._streams.items():
            facts |= {f"{split}.{key}": value for key, value in stream.facts().items()}
            facts[f"{split}.rows"] = self.n_rows(split)
        return facts
