"""Text files: finding, hashing, reading them in pieces of bounded size, and dividing them into splits."""

import codecs
import contextlib
import glob
import hashlib
import io
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from src.errors import UserError

PIECE = 1 << 15  # characters encoded at once: eight times more take 1.4 times as long (GPT-2, 2 cores)
BLOCK = 1 << 20  # bytes read at once
DIGEST_MEMO = 1 << 26  # bytes: hashes of larger files are kept by path, size and time (about 1 s per GB else)
# What a file that is no UTF-8 text often is, by its first bytes, and what to do with it.
_OTHER_KINDS = {
    b"\x1f\x8b": "compressed by gzip: unpack it",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it",
    b"\xfd7zXZ\0": "compressed by xz: unpack it",
    b"PK\x03\x04": "a zip archive: unpack it",
    b"PAR1": "a Parquet table: data=hub data.path= reads those",
    b"\xff\xfe\0\0": "UTF-32: convert it to UTF-8",
    b"\xff\xfe": "UTF-16: convert it to UTF-8",
    b"\xfe\xff": "UTF-16: convert it to UTF-8",
}
SPLIT_NAMES = {"train": {"train"}, "val": {"valid", "validation", "val", "dev"}, "test": {"test"}}


class DataError(UserError):
    """What the text's files hold is wrong, which reading them again does not change."""


@dataclass(frozen=True)
class Slice:
    """The bytes [begin, end) of a file: one document of a split."""

    path: Path
    begin: int
    end: int


def split_of(digest: str, val_fraction: float = 0.05, test_fraction: float = 0.05) -> str:
    """ "train", "val" or "test", decided by a hexadecimal hash alone, whatever other documents there are."""
    place = int(digest[:16], 16) / 16**16
    if place < val_fraction:
        return "val"
    return "test" if place < val_fraction + test_fraction else "train"


def named_split(name: str) -> str | None:
    """The split that a file's name says: train, valid(ation) or test as a word of it; None for none or several."""
    words = set(re.split(r"[^a-z]+", name.lower()))
    splits = [split for split, names in SPLIT_NAMES.items() if names & words]
    return splits[0] if len(splits) == 1 else None


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """An OSError inside becomes a UserError that names the file or folder; without a number, it is of the content."""
    try:
        yield
    except OSError as error:
        kind = DataError if error.errno is None else UserError
        raise kind(f"{path} cannot be read ({error.strerror or error})") from error


def open_binary(path: Path) -> BinaryIO:
    """Open for reading. Raises UserError that names the file."""
    with reading(path):
        return path.open("rb")


def find(key: str, patterns: list[str], endings: Iterable[str]) -> list[Path]:
    """The files that data.<key>= names, sorted, each once: files, folders (what has one of the endings), patterns."""
    allowed = {f".{ending.lower().removeprefix('.')}" for ending in endings}
    found: dict[Path, Path] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            files = _in_folder(key, path, allowed)
        elif path.is_file():
            files = [path]
        else:
            files = [Path(p) for p in sorted(glob.glob(str(path), recursive=True)) if Path(p).is_file()]
            if not files:
                raise UserError(f"data.{key}={pattern}: no such file or folder, and no file matches it")
        found.update({file.resolve(): file for file in files})
    return sorted(found.values(), key=lambda file: file.as_posix())


def _in_folder(key: str, folder: Path, allowed: set[str]) -> list[Path]:
    everything = [
        path
        for path in folder.rglob("*")
        if not any(part.startswith(".") for part in path.relative_to(folder).parts) and path.is_file()
    ]
    files = [path for path in everything if path.name.lower().endswith(tuple(allowed))]
    if not files:
        kinds = Counter(path.suffix.lower() or "(none)" for path in everything).most_common(4)
        there = ", ".join(f"{n} {kind}" for kind, n in kinds) or "no file at all"
        cure = f"data.extensions={kinds[0][0]} takes the first" if kinds else "give files or another folder"
        raise UserError(
            f"data.{key}={folder}: no {', '.join(sorted(allowed))} file in that folder (it has {there}); {cure}"
        )
    return files


def digest_file(path: Path, memo: Path) -> str:
    """Hash of a file's bytes. For a large file it is kept under `memo` until its size or time changes."""
    with open_binary(path) as file:
        stat = os.fstat(file.fileno())
        address = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
        note = memo / hashlib.sha256(address.encode()).hexdigest()
        if stat.st_size > DIGEST_MEMO and note.is_file():
            return note.read_text()
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if stat.st_size > DIGEST_MEMO:
        keep(note, digest)
    return digest


def keep(note: Path, text: str) -> None:
    """Write a small file, whole or not at all; nothing where its folder cannot be written."""
    with contextlib.suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary = note.with_name(f".{note.name}.{os.getpid()}")
        temporary.write_text(text)
        temporary.replace(note)


def read(part: Slice, encoding_errors: str | None = None) -> Iterator[str]:
    """The text of a slice in blocks: UTF-8, a byte order mark dropped, \\r\\n and \\r as \\n.

    Raises UserError that names file and byte where it is not UTF-8 and `encoding_errors` is not "replace"
    (None: the corpus has no such option), and for a file that is compressed or UTF-16.
    """
    utf8 = codecs.getincrementaldecoder("utf-8")(encoding_errors or "strict")
    decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
    with open_binary(part.path) as file:
        begin, head = part.begin, file.read(8)
        for magic, kind in _OTHER_KINDS.items():
            if head.startswith(magic):  # whatever `encoding_errors`: its bytes are no text
                raise DataError(f"{part.path} is {kind}")
        if begin == 0 and head.startswith(codecs.BOM_UTF8):
            begin = 3
        file.seek(begin)
        while True:
            block = file.read(min(BLOCK, part.end - file.tell()))
            try:
                yield decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                at = file.tell() - len(error.object) + error.start
                option = ", or set data.encoding_errors=replace" if encoding_errors else ""
                raise DataError(f"{part.path} is not UTF-8 (byte {at}): convert it{option}") from error
            if not block:
                return


def pieces(blocks: Iterable[str], size: int = PIECE) -> Iterator[str]:
    """The same text, cut into pieces of about `size` characters where a word ends and white space begins.

    There the word patterns of byte-level tokenizers (GPT-2 and descendants) always begin anew, so the
    tokens are those of the whole text. Nothing for an empty text.
    """
    rest = ""
    for block in blocks:
        rest += block
        begin = 0
        while len(rest) - begin > 2 * size:
            places = range(begin + size, begin + size // 2, -1)
            end = next((i for i in places if rest[i] in " \n" and not rest[i - 1].isspace()), begin + size)
            yield rest[begin:end]
            begin = end
        rest = rest[begin:]
    if rest:
        yield rest


def cut_near(path: Path, target: int, window: int) -> int:
    """A place to cut a UTF-8 file at: the line end nearest to `target` within `window` bytes, else the first
    place from `target` on that is between two characters."""
    begin = max(0, target - window)
    with open_binary(path) as file:
        file.seek(begin)
        around = file.read(target + max(window, 4) - begin)
    middle = target - begin
    ends = [at + 1 for at in (around.rfind(b"\n", 0, middle), around.find(b"\n", middle)) if at >= 0]
    ends = [end for end in ends if abs(end - middle) <= window]
    if ends:
        return begin + min(ends, key=lambda end: abs(end - middle))
    return target + next((i for i, byte in enumerate(around[middle:]) if byte & 0xC0 != 0x80), 0)
