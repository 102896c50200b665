"""Text files: finding, hashing, reading them in pieces of bounded size, and dividing them into splits."""

import codecs
import contextlib
import hashlib
import io
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from src.errors import UserError

PIECE = 1 << 18  # characters encoded at once
BLOCK = 1 << 20  # bytes read at once
DIGEST_MEMO = 1 << 26  # bytes: hashes of larger files are kept by path, size and time (about 1 s per GB else)


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


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """An OSError inside becomes a UserError that names the file or folder."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})") from error


def open_binary(path: Path) -> BinaryIO:
    """Open for reading. Raises UserError that names the file."""
    with reading(path):
        return path.open("rb")


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
        with contextlib.suppress(OSError):  # a note only saves time
            memo.mkdir(parents=True, exist_ok=True)
            temporary = note.with_suffix(f".{os.getpid()}")
            temporary.write_text(digest)
            temporary.replace(note)
    return digest


def read(
    part: Slice, encoding_errors: str = "strict", cure: str = "convert it, or set data.encoding_errors=replace"
) -> Iterator[str]:
    """The text of a slice in blocks: UTF-8, a byte order mark dropped, \\r\\n and \\r as \\n.

    Raises UserError that names file, byte and `cure` where it is not UTF-8 and `encoding_errors` is "strict".
    """
    utf8 = codecs.getincrementaldecoder("utf-8")(encoding_errors)
    decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
    with open_binary(part.path) as file:
        begin = part.begin
        if begin == 0 and file.read(3) == codecs.BOM_UTF8:
            begin = 3
        file.seek(begin)
        while True:
            block = file.read(min(BLOCK, part.end - file.tell()))
            try:
                yield decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                at = file.tell() - len(error.object) + error.start
                raise UserError(f"{part.path} is not UTF-8 (byte {at}): {cure}") from error
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
        while len(rest) > 2 * size:
            cut = next(
                (i for i in range(size, size // 2, -1) if rest[i] in " \n" and not rest[i - 1].isspace()),
                size,
            )
            yield rest[:cut]
            rest = rest[cut:]
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
