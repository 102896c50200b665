"""data=hub: any corpus of the Hugging Face Hub by its name, or tables of text in local files.

    data=hub data.hub_id=HuggingFaceFW/fineweb-edu data.subset=sample-10BT data.max_documents=100000
    data=hub data.path=corpus/          # .jsonl, .json (also .gz, .zst), .parquet; a .txt is one document

A row's text is a document; rows without text are skipped. Presets (configs/data) name some corpora:
data=pg19, data=fineweb_edu, data=long_data_collections.

Validation and test documents are those of the corpus's own splits. Where it has none, they are taken from the
training split by the hash of each document's text alone: disjoint, copies of a text in the same split, and
independent of what else there is.

A corpus of the Hub is that of one commit. data.revision=null is the newest at the first preparation; from then on
data.cache_dir remembers it, so a change on the Hub neither changes runs nor tokenises again. data.revision=main
asks anew at each start.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from src.data import Split
from src.data.common import hub, rows
from src.data.common.corpus import Corpus
from src.data.common.files import (
    SPLIT_NAMES,
    DataError,
    Slice,
    digest_file,
    find,
    keep,
    named_split,
    read,
    reading,
    split_of,
)
from src.data.common.prepare import SPLITS, Document
from src.errors import UserError

LOCAL = "give local files with data.path= (.jsonl, .jsonl.gz, .jsonl.zst, .json, .parquet, .txt)"


class Hub(Corpus):
    """A corpus by its Hub name, or local tables; see the module."""

    @dataclass
    class Config(Corpus.Config):
        hub_id: str | None = None
        """Data set of the Hub: <owner>/<name>."""
        subset: str | None = None
        """Hub configuration, such as sample-10BT; null: the default one."""
        column: str | None = None
        """Column with the text; null: text, or the only one that holds text."""
        revision: str | None = None
        """Commit, branch or tag; null: the newest at the first preparation, the same from then on."""
        data_files: list[str] = field(default_factory=list)
        """Files of the repository to take (patterns allowed); empty: as the repository says."""
        path: list[str] = field(default_factory=list)
        """Local files, folders or patterns instead of the Hub, whose options then do not matter."""
        streaming: bool = True
        """true: rows pass by while they are tokenised, only tokens stay; false: downloaded as a whole first."""
        max_documents: int | None = None
        """Take the first so many documents of each split, for a first look at a large corpus; null: all."""
        split: Literal["auto", "hash"] = "auto"
        """auto: the corpus's own validation and test splits where it has them; hash: parts of the training split."""
        train_split: str = "train"
        """The Hub's name of the training split."""
        val_split: str | None = None
        """Likewise of the validation split; null: validation, valid, val or dev, else by hash."""
        test_split: str | None = None
        """Likewise of the test split; null: test, else by hash."""
        val_fraction: float = 0.01
        """Of the training split, what becomes validation by hash."""
        test_fraction: float = 0.01
        """Of the training split, what becomes test by hash; 0: no test split."""

    config: Config

    def __init__(self, config: Config, *, seed: int = 0, micro_batch_size: int | None = None) -> None:
        super().__init__(config, seed=seed, micro_batch_size=micro_batch_size)
        for key in ("val_fraction", "test_fraction"):
            share = getattr(config, key)
            if not 0 <= share < 1:
                raise UserError(f"data.{key}={share}: must be in [0, 1)")
        if config.val_fraction + config.test_fraction >= 1:
            raise UserError("data.val_fraction + data.test_fraction must be below 1")
        if config.max_documents is not None and config.max_documents < 1:
            raise UserError(f"data.max_documents={config.max_documents}: must be at least 1 (null: all)")

    # What a corpus gives

    def all_documents(self) -> Iterator[tuple[Split, Document]]:
        return self._labelled(SPLITS)

    def documents(self, split: Split) -> Iterator[Document]:
        source = split if split in self._own else "train"
        return (document for label, document in self._labelled([source]) if label == split)

    def content_hash(self) -> str:
        config = self.config
        if not config.path and not config.hub_id:
            raise UserError(f"data.hub_id is not set: name a data set of the Hub (<owner>/<name>), or {LOCAL}")
        facts: list[Any] = [config.split, config.max_documents, config.val_fraction, config.test_fraction]
        if config.path:
            facts += [self._column]
            for split, files in self._files.items():
                facts += [(split, rows.kind(file), self._digest(file)) for file in files]
        else:
            facts += [config.hub_id, self._commit, config.subset, config.data_files, config.column]
            facts += [config.train_split, config.val_split, config.test_split]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def size(self) -> int | None:
        config = self.config
        if config.max_documents is not None:
            return None
        if config.path:
            sizes = [rows.text_size(file, self._column) for files in self._files.values() for file in files]
            return None if None in sizes else sum(sizes)
        known = self._tables["train"].info.splits
        if not known or config.data_files:
            return None
        return sum(known[table.split].num_bytes or 0 for table in self._tables.values() if table.split in known) or None

    def describe(self) -> dict[str, object]:
        source = {} if self.config.path else {"source": f"{self.config.hub_id}@{self._commit}"}
        return super().describe() | source

    # Splits

    def _require(self, split: Split) -> None:
        if self.n_rows(split) == 0 and "train" != split not in self._own:
            share = getattr(self.config, f"{split}_fraction")
            raise UserError(
                f"data.{split}_fraction={share}: not one document fell into the {split} split; raise it"
                " (copies of a text fall together)"
            )
        super()._require(split)

    @property
    def _own(self) -> Iterable[str]:
        """The splits that the corpus comes with."""
        return self._files if self.config.path else self._tables

    def _labelled(self, sources: Iterable[str]) -> Iterator[tuple[Split, Document]]:
        """The documents of these splits of the corpus, each with the split that it is put into."""
        shares = {s: 0.0 if s in self._own else getattr(self.config, f"{s}_fraction") for s in ("val", "test")}
        if "val" not in self._own and shares["val"] == 0:
            raise DataError("data.val_fraction=0: training needs a validation split, and this corpus has none")
        for source in sources:
            if source not in self._own:
                continue
            for document, digest in islice(self._documents(source), self.config.max_documents):
                if source == "train" and any(shares.values()):
                    digest = digest or hashlib.sha256(document.encode()).hexdigest()
                    yield split_of(digest, shares["val"], shares["test"]), document
                else:
                    yield source, document

    def _documents(self, source: str) -> Iterator[tuple[Document, str | None]]:
        """(document, hash of its text where that is known) of a split of the corpus."""
        if not self.config.path:
            yield from ((text, None) for text in self._hub_texts(source) if text)
            return
        for file in self._files[source]:
            if rows.kind(file) == "txt":
                with reading(file):
                    size = file.stat().st_size
                if size:
                    yield read(Slice(file, 0, size)), self._digest(file)
            else:
                yield from ((text, None) for text in rows.texts(file, self._column) if text)

    # Local files

    @cached_property
    def _files(self) -> dict[str, list[Path]]:
        """The local files of each split, by their names where these say one; all of them in "train" otherwise."""
        files = find("path", self.config.path, (*rows.TABLES, ".txt"))
        for file in files:
            if rows.kind(file) is None:
                raise UserError(f"data.path={file}: cannot be read; {LOCAL}")
        named = {file: _named_split(file) for file in files if self.config.split == "auto"}
        unnamed = [file for file in files if named.get(file) is None]
        if len(unnamed) == len(files):
            return {"train": files}
        if unnamed:
            one = next(file for file in files if file not in unnamed)
            raise UserError(
                f"data.path: the name of {one.name} says a split, that of {unnamed[0].name} does not; "
                "name all of them (train, valid, test), or set data.split=hash"
            )
        found = {split: [file for file in files if named[file] == split] for split in SPLITS}
        if not found["train"]:
            raise UserError(
                f"data.path={','.join(self.config.path)}: no file's name says train (data.split=hash takes all)"
            )
        return {split: files for split, files in found.items() if files}

    @cached_property
    def _column(self) -> str | None:
        """The column of the local tables; None where there are none."""
        tables = [file for files in self._files.values() for file in files if rows.kind(file) != "txt"]
        for file in tables:
            names, texts = rows.columns(file)
            if names:
                column = rows.choose_column(names, texts, self.config.column, str(file))
                for table in tables:  # before any of them is read
                    rows.check_column(table, column)
                return column
        if tables:
            raise UserError(f"data.path={','.join(self.config.path)}: {tables[0].name} has no row")
        return None

    def _digest(self, file: Path) -> str:
        return digest_file(file, self.cache_dir / "digests")

    # The Hub

    @property
    def _origin(self) -> str:
        return f"data.hub_id={self.config.hub_id}"

    @cached_property
    def _commit(self) -> str:
        config = self.config
        if re.fullmatch(r"[0-9a-f]{40}", config.revision or ""):
            return config.revision
        note = self.cache_dir / "hub" / quote(f"{config.hub_id}@{config.revision or ''}", safe="@")
        known = note.read_text() if note.is_file() else None
        if known and config.revision is None:
            return known
        found = hub.commit(config.hub_id, config.revision)
        if found is None:
            known = known or hub.downloaded_commit(config.hub_id, config.revision)
            if known is None:
                raise UserError(
                    f"{self._origin}: the Hub cannot be reached; {LOCAL}, or the commit of an earlier download with "
                    "data.revision="
                )
            return known
        keep(note, found)
        return found

    @cached_property
    def _tables(self) -> dict[str, Any]:
        """The splits that the Hub has, as tables of `datasets`."""
        config = self.config
        tables = hub.load(
            self._origin,
            config.hub_id,
            LOCAL if config.subset else f"give data.subset=, or {LOCAL}",
            subset=config.subset,
            commit=self._commit,
            data_files=config.data_files or None,
            streaming=config.streaming,
        )
        found = {}
        for split in SPLITS if config.split == "auto" else ("train",):
            name = getattr(config, f"{split}_split")
            usual = next((known for known in tables if known in SPLIT_NAMES[split]), None)
            if name is None and usual is not None:
                name = usual
            if name is not None:
                if name not in tables:
                    raise UserError(f"data.{split}_split={name}: {config.hub_id} has the splits {', '.join(tables)}")
                found[split] = tables[name]
        return found

    def _hub_texts(self, source: str) -> Iterator[str]:
        table, config = self._tables[source], self.config
        features = table.features or {}
        strings = [
            name for name, kind in features.items() if getattr(kind, "dtype", None) in ("string", "large_string")
        ]
        column = rows.choose_column(list(table.column_names), strings, config.column, config.hub_id)
        kind = getattr(features.get(column), "dtype", None)
        if column in features and column not in strings and kind != "null":
            raise DataError(f"data.column={column} is no text ({config.hub_id} holds {kind or 'nested values'} there)")
        number = 0
        try:
            for batch in table.select_columns([column]).iter(batch_size=rows.ROWS):
                for value in batch[column]:
                    number += 1
                    yield rows.as_text(value, column, f"row {number}")
        except UserError:
            raise
        except Exception as error:  # of the network, the format or the disk: each in its own class
            raise UserError(
                f"{self._origin}: reading stopped at row {number + 1} ({hub.cause(error)}); what is done is kept, "
                "the next start continues"
            ) from error


def _named_split(file: Path) -> str | None:
    """What the file's name says, else its folder's, which must then be no more than that."""
    folder = next((split for split, names in SPLIT_NAMES.items() if file.parent.name.lower() in names), None)
    return named_split(file.name) or folder
