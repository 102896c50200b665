"""Tokenised splits on disk, memory-mapped: made once for each content and tokenizer.

A cache folder appears under its name in one rename, after everything in it is written: a killed preparation
leaves only a folder `….partial` that nobody reads and the next preparation removes. One process prepares at
a time (a file lock, which the system releases when its holder dies); the others wait and find the result.
"""

import contextlib
import json
import os
import shutil
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from src.data.common.files import pieces
from src.data.common.packing import Stream
from src.data.common.tokenizer import SubwordTokenizer, Tokenizer, find_tokenizer, train_bpe
from src.errors import UserError

Document = str | Iterable[str]
"""A text; or, of one that need not fit into memory, its consecutive parts."""

FORMAT = 2  # of the files, and of how text becomes tokens: part of every key
SPLITS = ("train", "val", "test")
BATCH = 1 << 22  # characters tokenised in parallel at once: about 150 MB of intermediate results


@contextlib.contextmanager
def exclusive(cache_dir: Path, key: str) -> Iterator[None]:
    """Hold the lock of this key. Raises UserError where the folder cannot be written."""
    with contextlib.ExitStack() as held:
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(cache_dir / f"{key}.lock"))
        except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
            raise UserError(
                f"data.cache_dir={cache_dir} cannot be written ({getattr(error, 'strerror', None) or error}): "
                "name another folder"
            ) from error
        yield  # outside the try: an error of the caller's is none of this folder


def bpe_path(cache_dir: Path, content: str, vocab_size: int, max_bytes: int) -> Path:
    return cache_dir / f"bpe-{content}-{vocab_size}-{max_bytes}-v{FORMAT}.json"


def trained_bpe(path: Path, vocab_size: int, texts: Iterable[str]) -> SubwordTokenizer:
    """The BPE kept at `path`, trained on `texts` where there is none. Call it under the lock."""
    if not path.is_file():
        made = train_bpe(texts, vocab_size)
        temporary = path.with_suffix(".partial")
        temporary.write_text(made.core.to_str(), encoding="utf-8")
        temporary.replace(path)
    return find_tokenizer(str(path))


def token_path(cache_dir: Path, name: str, content: str, tokenizer: Tokenizer) -> Path:
    return cache_dir / f"{name}-{content}-{tokenizer.fingerprint}-v{FORMAT}"


def build(folder: Path, documents: dict[str, Iterable[Document]], tokenizer: Tokenizer, sizes: dict) -> None:
    """Tokenise every split into `folder`, which must not exist. Call it under the lock.

    sizes: bytes of each split where known (for the progress bar).
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    facts = {}
    for split in SPLITS:
        facts[split] = _tokenise(partial / split, documents[split], tokenizer, split, sizes.get(split))
    (partial / "facts.json").write_text(json.dumps(facts, indent=1))
    os.replace(partial, folder)


def open_streams(folder: Path) -> dict[str, Stream]:
    """The splits of a finished cache folder."""
    try:
        facts = json.loads((folder / "facts.json").read_text())
        streams = {split: Stream(folder / split) for split in SPLITS}
        for split, stream in streams.items():
            if facts[split] != stream.facts():
                raise ValueError(f"{split} has {stream.facts()}, not {facts[split]}")
        return streams
    except (OSError, ValueError, EOFError, KeyError) as error:
        raise UserError(f"the token cache {folder} is damaged ({error}): remove it") from error


def flat(documents: Iterable[Document]) -> Iterator[tuple[bool, str]]:
    """(first of its document, text): an empty document disappears."""
    for document in documents:
        first = True
        for piece in pieces([document] if isinstance(document, str) else document):
            yield first, piece
            first = False


def _batches(documents: Iterable[Document]) -> Iterator[list[tuple[bool, str]]]:
    batch, size = [], 0
    for first, piece in flat(documents):
        batch.append((first, piece))
        size += len(piece)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _tokenise(
    path: Path, documents: Iterable[Document], tokenizer: Tokenizer, split: str, total: int | None
) -> dict[str, int]:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    eot = np.array([tokenizer.eot], dtype)
    starts, byte_starts, word_starts = array("q"), array("q"), array("q")
    place = n_bytes = n_words = 0
    inside = False  # a word that the piece before ended in goes on
    with (
        open(f"{path}.tokens.npy", "wb") as file,
        tqdm(
            desc=f"tokenise {split}",
            total=total,
            unit="B",
            unit_scale=True,
            disable=None,  # unless stderr is a terminal
            leave=False,
        ) as bar,
    ):
        header = _header(file, dtype, 0)
        for batch in _batches(documents):
            before = n_bytes
            encoded = tokenizer.encode_batch([text for _, text in batch])
            for (first, text), ids in zip(batch, encoded, strict=True):
                if first:
                    starts.append(place)
                    byte_starts.append(n_bytes)
                    word_starts.append(n_words)
                    inside = False
                    file.write(eot.tobytes())
                    place += 1
                file.write(np.asarray(ids, dtype=dtype).tobytes())
                place += len(ids)
                n_bytes += len(text.encode())
                n_words += len(text.split()) - (inside and not text[0].isspace())
                inside = not text[-1].isspace()
            bar.update(n_bytes - before)
        file.write(eot.tobytes())
        file.seek(0)
        if _header(file, dtype, place + 1) != header:
            raise RuntimeError("the length of a .npy header changed with the array's")
        file.flush()
        os.fsync(file.fileno())
    starts.append(place)
    byte_starts.append(n_bytes)
    word_starts.append(n_words)
    np.save(f"{path}.starts.npy", np.frombuffer(starts, dtype=np.int64))
    np.save(f"{path}.bytes.npy", np.frombuffer(byte_starts, dtype=np.int64))
    np.save(f"{path}.words.npy", np.frombuffer(word_starts, dtype=np.int64))
    return Stream(path).facts()


def _header(file, dtype: np.dtype, length: int) -> int:
    """Write a .npy header for `length` entries (NumPy leaves room for a growing first axis); its size."""
    description = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": (length,),
    }
    np.lib.format.write_array_header_1_0(file, description)
    return file.tell()
