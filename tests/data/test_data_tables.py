"""data=hub from local files: tables of every kind, their columns, splits and mistakes."""

import gzip
import hashlib
import random
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from src.data.common import hub
from src.data.common.files import split_of
from src.data.common.rows import columns
from src.errors import UserError
from tests.tables import SPLITS, all_texts, documents_of, module_of, texts_of, write


def test_a_column_that_the_first_row_lacks_is_found(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"id": 1}\n{"text": null}\n{"text": "words", "id": 2}\n')
    assert columns(tmp_path / "a.jsonl") == (["id", "text"], ["text"])


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "A.JSONL"])
def test_every_kind_of_file_gives_the_same_documents(tmp_path, rows, name):
    got = documents_of(module_of(tmp_path, path=[str(write(tmp_path / "in" / name, rows))], val_fraction=0.1))
    for split in SPLITS:
        belongs = [t for t in texts_of(rows) if split_of(hashlib.sha256(t.encode()).hexdigest(), 0.1, 0.01) == split]
        assert got[split] == belongs
    assert got["val"]


def test_text_files_are_one_document_each(tmp_path, rows):
    for i, text in enumerate(texts_of(rows)):
        (tmp_path / f"{i:03}.txt").write_text(text)
    (tmp_path / "empty.txt").write_text("")
    tables = module_of(tmp_path, path=[str(write(tmp_path / "in" / "a.jsonl", rows))], val_fraction=0.1)
    assert documents_of(module_of(tmp_path, path=[str(tmp_path / "*.txt")], val_fraction=0.1)) == documents_of(tables)


def test_splits_by_hash_do_not_depend_on_other_documents(tmp_path, rows, seed):
    options = {"val_fraction": 0.2, "test_fraction": 0.1}
    whole = documents_of(module_of(tmp_path, path=[str(write(tmp_path / "a" / "x.jsonl", rows))], **options))
    sets = [set(whole[split]) for split in SPLITS]
    assert sum(map(len, sets)) == len(set().union(*sets)) == len(texts_of(rows)), "disjoint and complete"
    rng = random.Random(seed)
    fewer = rng.sample(rows, 100)
    fewer += fewer[:10]  # copies of a text are in the same split
    parts = tmp_path / "b"
    write(parts / "1.jsonl", fewer[:50])
    write(parts / "2.parquet", fewer[50:])
    some = documents_of(module_of(tmp_path, path=[str(parts)], **options))
    for split in SPLITS:
        assert set(some[split]) <= set(whole[split])


def test_splits_by_file_or_folder_name(tmp_path, rows):
    write(tmp_path / "names" / "wiki.train.jsonl", rows[:50])
    write(tmp_path / "names" / "wiki-valid.parquet", rows[50:70])
    module = module_of(tmp_path, path=[str(tmp_path / "names")], test_fraction=0.3)
    got = documents_of(module)
    assert got["val"] == texts_of(rows[50:70])
    assert set(got["train"]) | set(got["test"]) == set(texts_of(rows[:50]))
    assert got["test"], "taken from the training split, which has no own one"
    write(tmp_path / "folders" / "train" / "0.jsonl", rows[:50])
    write(tmp_path / "folders" / "test" / "0.jsonl", rows[50:70])
    got = documents_of(module_of(tmp_path, path=[str(tmp_path / "folders")], val_fraction=0.3))
    assert got["test"] == texts_of(rows[50:70])
    got = documents_of(module_of(tmp_path, path=[str(tmp_path / "folders")], val_fraction=0.3, split="hash"))
    assert got["test"] != texts_of(rows[50:70])


def test_the_content_decides_the_cache(tmp_path, rows):
    file = write(tmp_path / "a.jsonl", rows)
    first = module_of(tmp_path, path=[str(file)]).content_hash()
    moved = tmp_path / "elsewhere" / "b.jsonl"
    moved.parent.mkdir()
    moved.write_bytes(file.read_bytes())
    assert module_of(tmp_path, path=[str(moved)]).content_hash() == first
    for options in ({"max_documents": 10}, {"val_fraction": 0.2}, {"test_fraction": 0.0}, {"split": "hash"}):
        assert module_of(tmp_path, path=[str(file)], **options).content_hash() != first
    with file.open("a") as end:
        end.write('{"text": "more"}\n')
    assert module_of(tmp_path, path=[str(file)]).content_hash() != first


def test_the_column(tmp_path):
    file = write(tmp_path / "b.jsonl", [{"id": "x", "page": "p"}, {"id": "x"}, {"id": "x", "page": "q", "more": 1}])
    assert all_texts(module_of(tmp_path, path=[str(file)], column="page")) == ["p", "q"]
    for name in ("c.parquet", "c.jsonl"):
        file = write(tmp_path / name, [{"id": 1, "page": "p"}, {"id": 2, "page": "q"}])
        assert all_texts(module_of(tmp_path, path=[str(file)])) == ["p", "q"], "the only one with text"
    (tmp_path / "a.jsonl").write_text("")  # the first file, which has no columns
    assert all_texts(module_of(tmp_path, path=[str(tmp_path / "*.jsonl")], column="page")) == ["p", "q", "p", "q"]


def test_the_first_documents_only(tmp_path, rows):
    module = module_of(tmp_path, path=[str(write(tmp_path / "a.jsonl", rows))], max_documents=40, val_fraction=0.2)
    assert all_texts(module) == texts_of(rows)[:40]
    assert sum(map(len, documents_of(module).values())) == 40


def test_the_size_is_known_about_where_it_can_be(tmp_path, rows):
    text = sum(len(t.encode()) for t in texts_of(rows))
    for name in ("a.jsonl", "a.parquet"):
        size = module_of(tmp_path, path=[str(write(tmp_path / name, rows))]).size()
        assert text < size < 2 * text
    (tmp_path / "a.txt").write_bytes(b"x" * 77)
    assert module_of(tmp_path, path=[str(tmp_path / "a.txt")]).size() == 77
    assert module_of(tmp_path, path=[str(tmp_path / "*.jsonl")], max_documents=5).size() is None
    assert (
        module_of(tmp_path, path=[str(write(tmp_path / "a.jsonl.zst", rows)), str(tmp_path / "a.txt")]).size() is None
    )


def test_a_missing_package_is_named():
    for error in (ValueError("Compression type zstd not supported"), ImportError("Please pip install zstandard")):
        assert hub.cause(error) == "it is compressed with zstd: pip install zstandard"


def test_half_a_surrogate_pair(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d b"}\n{"text": "\\ud83d\\ude42"}\n')
    assert all_texts(module_of(tmp_path, path=[str(tmp_path / "a.jsonl")])) == ["a\ufffd b", "🙂"]


def _files(folder: Path) -> None:
    """One file of each mistake."""
    (folder / "two.jsonl").write_text('{"a": "x", "b": "y", "n": 1}\n')
    (folder / "one.jsonl").write_text('{"text": "x"}\n{"text": \n')
    (folder / "number.jsonl").write_text('{"text": "x"}\n{"text": 7}\n')
    (folder / "list.jsonl").write_text('["text"]\n')
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 1000)[:-9])
    (folder / "no.parquet").write_bytes(b"PAR1")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "empty.jsonl").write_text("")
    (folder / "word.doc").write_text("x")
    (folder / "good.jsonl").write_text('{"text": "x"}\n' * 3)
    (folder / "test.jsonl").write_text('{"text": "x"}\n')
    (folder / "none").mkdir()
    (folder / "mixed").mkdir()
    (folder / "mixed" / "train.jsonl").write_text('{"text": "x"}\n')
    (folder / "mixed" / "b.jsonl").write_text('{"text": "x"}\n')


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, r"data.hub_id is not set: name a data set of the Hub .* or give local files with data.path="),
        ({"path": ["nowhere"]}, r"data.path=.*nowhere: no such file or folder"),
        ({"path": ["none"]}, r"data.path=.*none: no .*.jsonl.* file in that folder"),
        ({"path": ["word.doc"]}, r"word.doc: cannot be read; give local files with data.path= \(.jsonl"),
        ({"path": ["two.jsonl"]}, r"data.column is not set, .*two.jsonl has no column text: name one of a, b$"),
        ({"path": ["two.jsonl"], "column": "c"}, r"data.column=c: .*two.jsonl has the columns a, b, n"),
        ({"path": ["two.jsonl"], "column": "n"}, r"data.column=n is no text \(.*two.jsonl, row 1 holds a int\)"),
        ({"path": ["one.jsonl"]}, r"one.jsonl, line 2: not JSON, one object a line"),
        ({"path": ["number.jsonl"]}, r"data.column=text is no text \(.*number.jsonl, row 2 holds a int\)"),
        ({"path": ["list.jsonl"]}, r"list.jsonl, row 1: a list, not an object with columns"),
        ({"path": ["cut.jsonl.gz"]}, r"cut.jsonl.gz cannot be read \(Truncated"),
        ({"path": ["no.parquet"]}, r"no.parquet is no Parquet file"),
        ({"path": ["latin.txt"]}, r"latin.txt is not UTF-8 \(byte 3\): convert it$"),
        ({"path": ["empty.jsonl"], "column": "text"}, r"empty.jsonl has no row"),
        ({"path": ["test.jsonl"]}, r"no file's name says train"),
        ({"path": ["mixed"]}, r"the name of train.jsonl says a split, that of b.jsonl does not; .*data.split=hash"),
        ({"path": ["good.jsonl"]}, r"data.val_fraction=0.01: not one document fell into the val split; raise it"),
        ({"path": ["good.jsonl"], "val_fraction": 0.0}, r"data.val_fraction=0: training needs a validation split"),
        ({"path": ["good.jsonl"], "val_fraction": 1.0}, r"data.val_fraction=1.0: must be in \[0, 1\)"),
        ({"path": ["good.jsonl"], "val_fraction": 0.5, "test_fraction": 0.5}, r"val_fraction \+ .* must be below 1"),
        ({"path": ["good.jsonl"], "max_documents": 0}, r"data.max_documents=0: must be at least 1"),
        ({"hub_id": "a b"}, r"'a b' is no .* Hub name \(<owner>/<name>\)"),
    ],
)
def test_mistakes(tmp_path, options, words):
    _files(tmp_path)
    options = options | {"path": [str(tmp_path / name) for name in options.get("path", [])]}
    with pytest.raises(UserError, match=words) as caught:
        module_of(tmp_path, **options).setup("fit")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").glob("*.partial")) == []


def test_a_parquet_column_without_text_is_refused_unread(tmp_path, rows, monkeypatch):
    """By the schemas of all files, also of the last."""
    write(tmp_path / "in" / "a.parquet", rows)
    write(tmp_path / "in" / "b.parquet", [{"text": i, "id": i} for i in range(9)])
    write(tmp_path / "other" / "a.parquet", rows)
    write(tmp_path / "other" / "b.parquet", [{"id": 1}])
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", lambda *_, **__: pytest.fail("was read"))
    for options, words in (
        ({"path": [str(tmp_path / "in")]}, r"data.column=text is no text \(.*b.parquet holds int64\)"),
        ({"path": [str(tmp_path / "in")], "column": "meta"}, r"data.column=meta is no text \(.*a.parquet holds struct"),
        ({"path": [str(tmp_path / "other")]}, r"b.parquet is no Parquet file with a column 'text'"),
    ):
        with pytest.raises(UserError, match=words):
            module_of(tmp_path, **options).setup("fit")
        assert not (tmp_path / "cache").exists() or list((tmp_path / "cache").glob("*.partial")) == []


def test_parquet_texts_of_other_types(tmp_path):
    texts = ["a", None, "b", "a"]
    for kind in (pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())):
        parquet.write_table(pyarrow.table({"text": pyarrow.array(texts).cast(kind)}), tmp_path / "a.parquet")
        assert all_texts(module_of(tmp_path, path=[str(tmp_path / "a.parquet")])) == ["a", "b", "a"]
