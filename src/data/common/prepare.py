"""Text to tokens on disk: on all cores, in bounded memory, with a bar, continued after a kill.

A thread reads and counts the next batch while this one is encoded (`tokenizers` encodes the pieces of a batch
in parallel), and another writes the one before. Nothing is held per document: every array of the result is a
file that grows at its end.

Every few seconds the files are flushed and `progress.json` says, in one rename, how long they are and how many
pieces they hold. A preparation that finds such a record truncates the files to it and goes on behind them. The
pieces that are done are read again, which from local files is more than ten times faster than tokenising, and
hashed: the record has the hash of their text, and where it is another the preparation begins anew. So the result
is, byte by byte, that of a preparation without interruption.
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from src.data.common.files import PIECE, DataError, pieces
from src.data.common.packing import Stream
from src.data.common.tokenizer import Tokenizer
from src.errors import UserError

Document = str | Iterable[str]
"""A text; or, of one that need not fit into memory, its consecutive parts."""

SPLITS = ("train", "val", "test")
BATCH = 1 << 22  # characters tokenised in parallel at once: about 150 MB of intermediate results
RECORD_SECONDS = 5.0  # of work that a kill may cost
RECORD = "progress.json"
HEADER = 128  # bytes of a .npy header, in which NumPy leaves room for a growing first axis


def build(
    folder: Path,
    documents: Callable[[], Iterable[tuple[str, Document]]],
    tokenizer: Tokenizer,
    total: int | None = None,
) -> None:
    """Tokenise into `folder`, which must not exist; what an earlier call has done of it is kept.

    documents: gives (split, document) in the same order at every call. total: bytes, where known or about,
    for the progress bar. Only one process may work on a folder. An error of the data itself keeps nothing: it would
    come again, and data that is mended has another folder.
    """
    partial = folder.with_name(folder.name + ".partial")
    try:
        try:
            _prepare(partial, folder, documents, tokenizer, total)
        except _OtherText:
            _say(f"{folder.name}: the text is not that of the interrupted preparation, which begins anew")
            shutil.rmtree(partial)
            _prepare(partial, folder, documents, tokenizer, total)
    except DataError:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def flat(documents: Iterable[tuple[str, Document]]) -> Iterator[tuple[str, bool, str]]:
    """(split, first of its document, text): an empty document disappears."""
    for split, document in documents:
        first = True
        for piece in pieces([document] if isinstance(document, str) else document):
            yield split, first, piece
            first = False


class _OtherText(Exception):
    """The pieces that are done are not those that the documents give now."""


@dataclass
class _Record:
    """What the files of a partial folder hold."""

    made_of: dict[str, Any]
    """Names the content, the tokenizer and the way of cutting; a record of others is not used."""
    pieces: int = 0
    text: str = ""
    """Hash of these pieces."""
    lengths: dict[str, dict[str, int]] = field(default_factory=dict)
    """split -> entries of its tokens and of its starts, its bytes, its words."""

    @property
    def n_bytes(self) -> int:
        return sum(length["bytes"] for length in self.lengths.values())


@dataclass
class _Batch:
    """Consecutive pieces, and what the record says once they are written."""

    pieces: list[tuple[str, bool, str, int, int]] = field(default_factory=list)
    """(split, first of its document, text, bytes, words)"""
    size: int = 0
    n_bytes: int = 0
    done: int = 0
    text: str = ""


def _prepare(partial: Path, folder: Path, documents: Callable, tokenizer: Tokenizer, total: int | None) -> None:
    made_of = {"folder": folder.name, "piece": PIECE}
    record = _read_record(partial, made_of, _token_type(tokenizer))
    if record is None:
        shutil.rmtree(partial, ignore_errors=True)
        with _disk(partial):
            partial.mkdir()
        record = _Record(made_of)
    else:
        _say(
            f"{folder.name}: continues an interrupted preparation at {_mb(record.n_bytes)} "
            "(up to there the text is only read)"
        )
    before, start = record.n_bytes, time.perf_counter()
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(_bar(before, total))
        output = stack.enter_context(_Output(partial, tokenizer, record))
        # Threads end before the files are closed. One of each: order is kept.
        reader = stack.enter_context(ThreadPoolExecutor(1))
        writer = stack.enter_context(ThreadPoolExecutor(1))
        written: Future | None = None
        for batch in _ahead(_batches(documents(), record.pieces, record.text), reader):
            encoded = tokenizer.encode_batch([text for _, _, text, _, _ in batch.pieces])
            if written is not None:
                written.result()
            written = writer.submit(output.write, batch, encoded)
            bar.update(batch.n_bytes)
        if written is not None:
            written.result()
        output.finish()
    facts = {split: Stream(partial / split).facts() for split in SPLITS}
    with _disk(partial):
        _write(partial / "facts.json", json.dumps(facts, indent=1))
        os.replace(partial, folder)
    (folder / RECORD).unlink(missing_ok=True)
    n_bytes, seconds = sum(fact["bytes"] for fact in facts.values()), time.perf_counter() - start
    part = f", the last {_mb(n_bytes - before)} of it" if before else ""
    rate = (n_bytes - before) / 1e6 / max(seconds, 1e-9)
    n_tokens = sum(fact["tokens"] for fact in facts.values())
    _say(f"tokenised {_mb(n_bytes)}{part} in {seconds:,.1f} s ({rate:.1f} MB/s): {n_tokens:,} tokens")


def _batches(documents: Iterable[tuple[str, Document]], skip: int, expected: str) -> Iterator[_Batch]:
    """Batches of the pieces after the first `skip`. Raises _OtherText unless their hash is `expected`."""
    digest = hashlib.blake2b(digest_size=16)
    inside = False  # a word that the piece before ended in goes on
    batch, done = _Batch(), 0
    for split, first, text in flat(documents):
        content = text.encode()
        digest.update(f"{split} {first} {len(content)} ".encode() + content)
        done += 1
        if done > skip:
            words = len(text.split()) - (inside and not first and not text[0].isspace())
            batch.pieces.append((split, first, text, len(content), words))
            batch.size += len(text)
            batch.n_bytes += len(content)
        elif done == skip and digest.hexdigest() != expected:
            raise _OtherText
        inside = not text[-1].isspace()
        if batch.size >= BATCH:
            batch.done, batch.text = done, digest.hexdigest()
            yield batch
            batch = _Batch()
    if done < skip:
        raise _OtherText
    if batch.pieces:
        batch.done, batch.text = done, digest.hexdigest()
        yield batch


def _ahead(items: Iterator[_Batch], thread: ThreadPoolExecutor) -> Iterator[_Batch]:
    """The same items, each made in the thread while the one before is used."""
    coming = thread.submit(next, items, None)
    while (item := coming.result()) is not None:
        coming = thread.submit(next, items, None)
        yield item


class _Output:
    """The files of all splits, appended to, and the record of them."""

    def __init__(self, partial: Path, tokenizer: Tokenizer, record: _Record) -> None:
        self.partial, self.record, self.tokenizer = partial, record, tokenizer
        self.at = time.monotonic()

    def __enter__(self) -> "_Output":
        self.splits = {}
        with _disk(self.partial):
            for split in SPLITS:
                self.splits[split] = _SplitFiles(self.partial / split, self.tokenizer, self.record.lengths.get(split))
        return self

    def __exit__(self, *_: object) -> None:
        for files in self.splits.values():
            files.close()

    def write(self, batch: _Batch, encoded: list) -> None:
        with _disk(self.partial):
            for (split, first, _, n_bytes, n_words), ids in zip(batch.pieces, encoded, strict=True):
                self.splits[split].add(first, ids, n_bytes, n_words)
            if time.monotonic() - self.at >= RECORD_SECONDS:
                self._note(batch)
                self.at = time.monotonic()

    def _note(self, batch: _Batch) -> None:
        for files in self.splits.values():
            files.flush()
        lengths = {split: files.lengths() for split, files in self.splits.items()}
        record = _Record(self.record.made_of, batch.done, batch.text, lengths)
        _write(self.partial / RECORD, json.dumps(asdict(record)))

    def finish(self) -> None:
        with _disk(self.partial):
            for files in self.splits.values():
                files.finish()


class _SplitFiles:
    """The four arrays of a `Stream`, growing."""

    def __init__(self, path: Path, tokenizer: Tokenizer, lengths: dict[str, int] | None) -> None:
        lengths = lengths or {"tokens": 0, "starts": 0, "bytes": 0, "words": 0}
        self.dtype = _token_type(tokenizer)
        self.eot = np.array([tokenizer.eot], self.dtype)
        self.n_bytes, self.n_words = lengths["bytes"], lengths["words"]
        self.tokens = _GrowingArray(Path(f"{path}.tokens.npy"), self.dtype, lengths["tokens"])
        self.starts, self.byte_starts, self.word_starts = (
            _GrowingArray(Path(f"{path}.{name}.npy"), np.dtype(np.int64), lengths["starts"])
            for name in ("starts", "bytes", "words")
        )
        self.files = (self.tokens, self.starts, self.byte_starts, self.word_starts)

    def lengths(self) -> dict[str, int]:
        return {
            "tokens": self.tokens.length,
            "starts": self.starts.length,
            "bytes": self.n_bytes,
            "words": self.n_words,
        }

    def add(self, first: bool, ids: list[int], n_bytes: int, n_words: int) -> None:
        if first:
            self._border()
        self.tokens.append(np.asarray(ids, dtype=self.dtype))
        self.n_bytes += n_bytes
        self.n_words += n_words

    def _border(self) -> None:
        for array, amount in (
            (self.starts, self.tokens.length),
            (self.byte_starts, self.n_bytes),
            (self.word_starts, self.n_words),
        ):
            array.append(np.array([amount], np.int64))
        self.tokens.append(self.eot)

    def flush(self) -> None:
        for array in self.files:
            array.flush()

    def finish(self) -> None:
        self._border()
        for array in self.files:
            array.finish()

    def close(self) -> None:
        for array in self.files:
            array.file.close()


class _GrowingArray:
    """A one-dimensional .npy file, appended to behind `length` entries; its header is right after `finish`."""

    def __init__(self, path: Path, dtype: np.dtype, length: int) -> None:
        self.dtype, self.length = dtype, length
        self.file = path.open("r+b" if length else "w+b")
        self._write_header()
        self.file.truncate(HEADER + length * dtype.itemsize)
        self.file.seek(0, os.SEEK_END)

    def _write_header(self) -> None:
        self.file.seek(0)
        shape = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self.file, shape)
        if self.file.tell() != HEADER:
            raise RuntimeError(f"a .npy header of {self.file.tell()} bytes, not {HEADER}")

    def append(self, entries: np.ndarray) -> None:
        self.file.write(entries.tobytes())
        self.length += len(entries)

    def flush(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def finish(self) -> None:
        self._write_header()
        self.flush()


def _token_type(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)


def _read_record(partial: Path, made_of: dict[str, Any], token: np.dtype) -> _Record | None:
    """The record of this folder, if there is one of the same making and the files are at least that long."""
    try:
        record = _Record(**json.loads((partial / RECORD).read_text()))
        for split in SPLITS:
            for name in ("tokens", "starts", "bytes", "words"):
                length = record.lengths[split]["tokens" if name == "tokens" else "starts"]
                size = (partial / f"{split}.{name}.npy").stat().st_size
                if size < HEADER + length * (token.itemsize if name == "tokens" else 8):
                    return None
        return record if record.made_of == made_of and record.pieces else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def _disk(partial: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{partial} cannot be written ({error.strerror or error}): make room or name another data.cache_dir=; "
            "what is done is kept"
        ) from error


def _write(path: Path, text: str) -> None:
    """The whole file or none of it."""
    temporary = path.with_name(f".{path.name}")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _bar(initial: int, total: int | None) -> tqdm:
    return tqdm(
        desc="tokenise",
        initial=initial,
        total=total,
        unit="B",
        unit_scale=True,
        disable=None,  # unless stderr is a terminal
        leave=False,
    )


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.1f} MB"


def _say(message: str) -> None:
    tqdm.write(message, file=sys.stderr)
