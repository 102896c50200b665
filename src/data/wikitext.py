"""data=wikitext: WikiText-2 and WikiText-103 (Merity et al. 2017), raw or tokenised, articles as documents.

From the Hub (`Salesforce/wikitext` at a fixed revision: 8 MB or 310 MB of Parquet), or from local files
where there is no network: data.path= a folder or files whose names say train, valid(ation) or test
(wiki.train.raw, …tokens, train-00000-of-00001.parquet, test.txt). Articles begin at their ` = Title = `
lines. Licence: CC BY-SA 3.0.

The raw sets hold the original text; in the tokenised ones rare words are <unk> and punctuation is set
apart, so their perplexities do not compare.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Literal

from src.data import Split
from src.data.common.corpus import Corpus
from src.data.common.files import Slice, digest_file, named_split, read, reading
from src.data.common.hub import load
from src.data.common.rows import texts
from src.errors import UserError

HUB = "Salesforce/wikitext"
REVISION = "b08601e04326c79dfdd32d625aee71d232d685c3"  # so that the content is known without asking the Hub
HUB_SPLITS = {"train": "train", "val": "validation", "test": "test"}
SUFFIXES = {".raw", ".tokens", ".txt", ".parquet"}
TITLE = re.compile(r" = (?!= ).*(?<! =) = ")


class WikiText(Corpus):
    """Wikipedia's good and featured articles; see the module."""

    @dataclass
    class Config(Corpus.Config):
        version: Literal["wikitext-2-raw-v1", "wikitext-103-raw-v1", "wikitext-2-v1", "wikitext-103-v1"] = (
            "wikitext-2-raw-v1"
        )
        """Which of the sets (Hub configuration)."""
        path: list[str] = field(default_factory=list)
        """Local files or folders instead of the Hub."""

    config: Config

    @cached_property
    def _files(self) -> dict[str, list[Path]]:
        """The local files of each split; empty lists for the Hub."""
        found: dict[str, list[Path]] = {split: [] for split in HUB_SPLITS}
        for name in [self.config.path] if isinstance(self.config.path, str) else self.config.path:
            path = Path(name).expanduser()
            if not path.exists():
                raise UserError(f"data.path={name}: no such file or folder")
            if (path / self.config.version).is_dir():
                path = path / self.config.version
            with reading(path):
                files = sorted(path.iterdir()) if path.is_dir() else [path]
            for file in files:
                split = _split_of(file)
                if split:
                    found[split].append(file)
        if self.config.path and not any(found.values()):
            raise UserError(
                f"data.path={','.join(self.config.path)}: no file named train, valid or test with the ending "
                f"{', '.join(sorted(SUFFIXES))}"
            )
        return found

    def documents(self, split: Split) -> Iterator[str]:
        if self.config.path:
            return articles(line for file in self._files[split] for line in _lines(file))
        return articles(_hub_lines(self.config.version, split))

    def content_hash(self) -> str:
        content = hashlib.sha256()
        if not self.config.path:
            content.update(f"{HUB}@{REVISION}/{self.config.version}".encode())
        for split, files in self._files.items():
            for file in files:
                content.update(f"{split} {digest_file(file, self.cache_dir / 'digests')}\n".encode())
        return content.hexdigest()


def articles(lines: Iterable[str]) -> Iterator[str]:
    """Lines (with their ends) joined into articles, cut before each ` = Title = ` between blank lines.

    Elsewhere such a line is not a title: equations in the text look the same.
    """
    article: list[str] = []
    blank, text = True, False  # the line before is blank; the article is not
    for line, following in pairwise(chain(lines, [""])):
        if blank and text and not following.strip() and TITLE.fullmatch(line.rstrip("\n")):
            yield "".join(article)
            article, text = [], False
        article.append(line)
        blank = not line.strip()
        text |= not blank
    if text:
        yield "".join(article)


def _split_of(file: Path) -> str | None:
    return named_split(file.stem) if file.suffix in SUFFIXES else None


def _lines(file: Path) -> Iterator[str]:
    if file.suffix == ".parquet":
        yield from map(_line, texts(file, "text"))
        return
    rest = ""
    with reading(file):
        size = file.stat().st_size
    for block in read(Slice(file, 0, size)):
        *lines, rest = (rest + block).split("\n")
        yield from (line + "\n" for line in lines)
    if rest:
        yield rest


def _hub_lines(version: str, split: str) -> Iterator[str]:
    remedy = "give data.path= a folder with the files wiki.train.raw, wiki.valid.raw and wiki.test.raw"
    tables = load("data=wikitext", HUB, remedy, subset=version, commit=REVISION)
    for batch in tables[HUB_SPLITS[split]].iter(batch_size=1000):
        yield from map(_line, batch["text"])


def _line(row: str) -> str:
    """A row of the Hub's table as the line of the original file, whose blank lines hold one space."""
    return row or " \n"
