"""data=text: your own text, from one file to thousands. data.path= names files, folders or patterns.

A file is a document. Splits are disjoint by construction, in one of two ways (data.split):

    files   a file belongs to one split, decided by the hash of its content alone: neither its name nor its
            neighbours matter, and copies of a file are in the same split.
    tail    every file is cut into a training part, then a validation part, then a test part.

"auto" takes files where there are a hundred or more and each split gets one, tail otherwise.
Validation and test text of your own: data.val_path=, data.test_path=.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from src.data import Split
from src.data.common.corpus import Corpus
from src.data.common.files import Slice, cut_near, digest_file, find, read, split_of
from src.data.common.rows import kind
from src.errors import UserError

FEW = 100  # files: by hash, 5 % of fewer would often be none
SPLITS = ("train", "val", "test")


class Text(Corpus):
    """Local text files; see the module."""

    @dataclass
    class Config(Corpus.Config):
        path: list[str] = field(default_factory=list)
        """Text: files, folders, patterns (data/**/*.txt), or several of them (a,b)."""
        val_path: list[str] = field(default_factory=list)
        """Validation text, likewise; empty: a part of data.path."""
        test_path: list[str] = field(default_factory=list)
        """Test text, likewise; empty: a part of data.path."""
        extensions: list[str] = field(default_factory=lambda: [".txt", ".text", ".md", ".rst", ".tex"])
        """What is taken from a folder."""
        split: Literal["auto", "files", "tail"] = "auto"
        """What a split taken from data.path is: whole files, or the end of each file."""
        val_fraction: float = 0.05
        """The validation split's share of data.path."""
        test_fraction: float = 0.05
        """The test split's share of data.path; 0: no test split."""
        encoding_errors: Literal["strict", "replace"] = "strict"
        """Bytes that are not UTF-8: strict is an error that names the file, replace makes them U+FFFD."""

    config: Config

    @cached_property
    def _slices(self) -> dict[str, list[Slice]]:
        config = self.config
        own = {split: find(key, getattr(config, key), config.extensions) for split, key in _KEYS.items()}
        if not own["train"]:
            raise UserError("data.path is not set: name a text file, a folder or a pattern")
        _check_apart(own)
        _check_tables(own, config.extensions)
        shares = {}
        for split in ("val", "test"):
            share = getattr(config, f"{split}_fraction")
            if not 0 <= share < 1:
                raise UserError(f"data.{split}_fraction={share}: must be in [0, 1)")
            shares[split] = 0.0 if own[split] else share
        if sum(shares.values()) >= 1:
            raise UserError("data.val_fraction + data.test_fraction must be below 1")
        if not own["val"] and shares["val"] == 0:
            raise UserError("data.val_fraction=0: training needs a validation split; give data.val_path")
        slices = {split: [Slice(p, 0, p.stat().st_size) for p in files] for split, files in own.items()}
        for split, parts in self._divide(slices.pop("train"), shares).items():
            slices[split] = parts + slices.get(split, [])
        slices = {split: [part for part in slices[split] if part.end > part.begin] for split in SPLITS}
        for split in SPLITS:
            if not slices[split] and (split != "test" or shares["test"] or own["test"]):
                raise UserError(_too_little(split, config, sorted({*own["train"], *own[split]})))
        return slices

    def _divide(self, whole: list[Slice], shares: dict[str, float]) -> dict[str, list[Slice]]:
        """The splits of data.path: whole files, or the parts of each."""
        needed = [split for split in ("val", "test") if shares[split]]
        if self.config.split == "files" or (self.config.split == "auto" and len(whole) >= FEW and needed):
            by_file: dict[str, list[Slice]] = {split: [] for split in SPLITS}
            for part in whole:
                by_file[split_of(self._digest(part.path), shares["val"], shares["test"])].append(part)
            if self.config.split == "files" or all(by_file[split] for split in needed):
                return by_file
        tails: dict[str, list[Slice]] = {split: [] for split in SPLITS}
        for part in whole:
            size, first = part.end, 1 - sum(shares.values())
            # A cut moves to a line's end by at most a quarter of the smaller split, so no split loses all.
            window = min(1 << 16, int(size * min(shares[split] for split in needed) / 4)) if needed else 0
            cuts = [0]
            for target in (round(size * first), round(size * (first + shares["val"]))):
                cuts.append(cut_near(part.path, target, window) if target < size else size)
            for split, begin, end in zip(SPLITS, cuts, [*cuts[1:], size], strict=True):
                tails[split].append(Slice(part.path, begin, end))
        return tails

    def _digest(self, path: Path) -> str:
        return digest_file(path, self.cache_dir / "digests")

    def documents(self, split: Split) -> Iterator[Iterator[str]]:
        for part in self._slices[split]:
            yield read(part, self.config.encoding_errors)

    def size(self) -> int:
        return sum(part.end - part.begin for parts in self._slices.values() for part in parts)

    def content_hash(self) -> str:
        content = hashlib.sha256(self.config.encoding_errors.encode())
        for split, parts in self._slices.items():
            for part in parts:
                content.update(f"{split} {self._digest(part.path)} {part.begin} {part.end}\n".encode())
        return content.hexdigest()


_JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_KEYS = {"train": "path", "val": "val_path", "test": "test_path"}


def _check_apart(own: dict[str, list[Path]]) -> None:
    seen: dict[Path, str] = {}
    for split, files in own.items():
        for file in files:
            other = seen.setdefault(file.resolve(), split)
            if other != split:
                raise UserError(f"{file} is in both data.{_KEYS[other]} and data.{_KEYS[split]}")


def _check_tables(own: dict[str, list[Path]], wanted: list[str]) -> None:
    """Raises UserError for a file of rows, whose keys and quotes would be trained on, unless its ending is `wanted`."""
    for split, files in own.items():
        for file in files:
            table = kind(file) == "parquet" or file.name.lower().endswith(_JSON_LINES)
            if table and not file.name.endswith(tuple(wanted)):
                raise UserError(f"data.{_KEYS[split]}={file}: a table, not a text; data=hub data.path= reads its texts")


def _too_little(split: str, config: Text.Config, files: list[Path]) -> str:
    if not any(file.stat().st_size for file in files):
        return f"{files[0]} is empty" if len(files) == 1 else f"all {len(files)} files are empty"
    where = ", ".join(config.path if split == "train" else getattr(config, _KEYS[split]) or config.path)
    remedy = "" if split == "train" else f"; give data.{_KEYS[split]}"
    return f"data.path={where}: too little text for a {split} split{remedy}"
