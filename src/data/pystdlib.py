"""data=pystdlib: the Python sources of the interpreter's standard library, a corpus that every machine has.

About 11 MB and 730 files (Python 3.11): without test folders, site-packages and what programs generated.
Documents are files; a file's split (90 / 5 / 5 %) is decided by the SHA-256 of its relative POSIX path, so it
is the same wherever and whichever the interpreter is. Licence: PSF License (the sources are read in place).
"""

import hashlib
import io
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from src.data import Split
from src.data.common.corpus import Corpus
from src.data.common.files import reading, split_of
from src.errors import UserError

SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
# Written by programs: the language reference as one string of 757 kB, which would be most of the split that
# it falls into, and the build paths of one machine.
SKIPPED |= {"pydoc_data"}
GENERATED = "_sysconfigdata"


class PyStdlib(Corpus):
    """Python source code; see the module."""

    root = Path(sysconfig.get_path("stdlib"))

    @cached_property
    def _files(self) -> list[str]:
        """Relative POSIX paths, sorted."""
        found = []
        for folder, folders, names in os.walk(self.root):
            folders[:] = [f for f in folders if f not in SKIPPED and not f.startswith("config-")]
            found += [
                Path(folder, name).relative_to(self.root).as_posix()
                for name in names
                if name.endswith(".py") and not name.startswith(GENERATED)
            ]
        if not found:
            raise UserError(f"data=pystdlib: no Python sources in {self.root} (a zipped library?): use data=text")
        return sorted(found)

    @staticmethod
    def split_of(path: str) -> Split:
        return split_of(hashlib.sha256(path.encode()).hexdigest())

    def _source(self, path: str) -> bytes:
        with reading(self.root / path):
            return (self.root / path).read_bytes()

    def documents(self, split: Split) -> Iterator[str]:
        for path in self._files:
            if self.split_of(path) == split:
                yield decode(self._source(path))

    def size(self) -> int:
        total = 0
        for path in self._files:
            with reading(self.root / path):
                total += (self.root / path).stat().st_size
        return total

    def content_hash(self) -> str:
        content = hashlib.sha256()
        for path in self._files:
            source = self._source(path)
            content.update(f"{path}\0{len(source)}\0".encode() + source)
        return content.hexdigest()


def decode(source: bytes) -> str:
    """Text of a Python source in its declared encoding (PEP 263); what does not decode becomes U+FFFD."""
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(source).readline)[0]
    except SyntaxError:  # an unknown coding cookie, or none and not UTF-8
        encoding = "utf-8"
    text = source.decode(encoding, errors="replace")
    return text.replace("\r\n", "\n").replace("\r", "\n")
