"""Tokenised splits on disk, memory-mapped: made once for each content and tokenizer.

A cache folder appears under its name in one rename, after everything in it is written (`prepare.py`): a killed
preparation leaves only a folder `….partial`, which the next one of the same content and tokenizer completes. One
process prepares at a time (a file lock, which the system releases when its holder dies); the others wait and find
the result.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from filelock import FileLock

from src.data.common.packing import Stream
from src.data.common.prepare import SPLITS
from src.data.common.tokenizer import SubwordTokenizer, Tokenizer, find_tokenizer, train_bpe
from src.errors import UserError

FORMAT = 3  # of the files, and of how text becomes tokens: part of every key


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
