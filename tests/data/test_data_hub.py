"""data=hub: local tables of every kind, and the Hub replaced by local data sets of `datasets`."""

import gzip
import hashlib
import json
import random
import time
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from src.config import compose
from src.data.common import hub
from src.data.common.files import split_of
from src.data.hub import Hub
from src.errors import UserError

SPLITS = ("train", "val", "test")
COMMIT = "0123456789" * 4


def _module(tmp_path: Path, **options) -> Hub:
    defaults = dict(name="hub", cache_dir=str(tmp_path / "cache"), tokenizer="bytes")
    return Hub(Hub.Config(**(defaults | options)))


def _documents(module: Hub) -> dict[str, list[str]]:
    """What the splits hold, from the tokens."""
    module.setup("fit")
    found = {}
    for split in SPLITS:
        stream = module._streams[split]
        ends = stream.starts.tolist()
        parts = zip(ends, ends[1:], strict=False)
        found[split] = [module.tokenizer.decode(stream.tokens[begin + 1 : end]) for begin, end in parts]
    return found


def _all(module: Hub) -> list[str]:
    return [document for _, document in module.all_documents()]


@pytest.fixture
def rows(seed: int) -> list[dict]:
    """Rows of a table; some without text. No two texts are the same."""
    rng = random.Random(seed)
    made = [{"text": f"{i} é " + "word\n" * rng.randrange(1, 60), "id": i, "meta": {"a": [i]}} for i in range(150)]
    made.insert(rng.randrange(150), {"text": "", "id": -1, "meta": {"a": [0]}})
    made.insert(rng.randrange(150), {"text": None, "id": -2, "meta": {"a": [0]}})
    return made


def _jsonl(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _write(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=40)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(_jsonl(rows[:70])) + gzip.compress(_jsonl(rows[70:])))
    elif path.suffix == ".zst":
        with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
            file.write(_jsonl(rows))
    else:
        path.write_bytes(json.dumps(rows, indent=1).encode() if path.suffix == ".json" else _jsonl(rows))
    return path


def _texts(rows: list[dict]) -> list[str]:
    return [row["text"] for row in rows if row["text"]]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "A.JSONL"])
def test_every_kind_of_file_gives_the_same_documents(tmp_path, rows, name):
    got = _documents(_module(tmp_path, path=[str(_write(tmp_path / "in" / name, rows))], val_fraction=0.1))
    for split in SPLITS:
        belongs = [t for t in _texts(rows) if split_of(hashlib.sha256(t.encode()).hexdigest(), 0.1, 0.01) == split]
        assert got[split] == belongs
    assert got["val"]


def test_text_files_are_one_document_each(tmp_path, rows):
    for i, text in enumerate(_texts(rows)):
        (tmp_path / f"{i:03}.txt").write_text(text)
    (tmp_path / "empty.txt").write_text("")
    tables = _module(tmp_path, path=[str(_write(tmp_path / "in" / "a.jsonl", rows))], val_fraction=0.1)
    assert _documents(_module(tmp_path, path=[str(tmp_path / "*.txt")], val_fraction=0.1)) == _documents(tables)


def test_splits_by_hash_do_not_depend_on_other_documents(tmp_path, rows, seed):
    options = {"val_fraction": 0.2, "test_fraction": 0.1}
    whole = _documents(_module(tmp_path, path=[str(_write(tmp_path / "a" / "x.jsonl", rows))], **options))
    sets = [set(whole[split]) for split in SPLITS]
    assert sum(map(len, sets)) == len(set().union(*sets)) == len(_texts(rows)), "disjoint and complete"
    rng = random.Random(seed)
    fewer = rng.sample(rows, 100)
    fewer += fewer[:10]  # copies of a text are in the same split
    parts = tmp_path / "b"
    _write(parts / "1.jsonl", fewer[:50])
    _write(parts / "2.parquet", fewer[50:])
    some = _documents(_module(tmp_path, path=[str(parts)], **options))
    for split in SPLITS:
        assert set(some[split]) <= set(whole[split])


def test_splits_by_file_or_folder_name(tmp_path, rows):
    _write(tmp_path / "names" / "wiki.train.jsonl", rows[:50])
    _write(tmp_path / "names" / "wiki-valid.parquet", rows[50:70])
    module = _module(tmp_path, path=[str(tmp_path / "names")], test_fraction=0.3)
    got = _documents(module)
    assert got["val"] == _texts(rows[50:70])
    assert set(got["train"]) | set(got["test"]) == set(_texts(rows[:50]))
    assert got["test"], "taken from the training split, which has no own one"
    _write(tmp_path / "folders" / "train" / "0.jsonl", rows[:50])
    _write(tmp_path / "folders" / "test" / "0.jsonl", rows[50:70])
    got = _documents(_module(tmp_path, path=[str(tmp_path / "folders")], val_fraction=0.3))
    assert got["test"] == _texts(rows[50:70])
    got = _documents(_module(tmp_path, path=[str(tmp_path / "folders")], val_fraction=0.3, split="hash"))
    assert got["test"] != _texts(rows[50:70])


def test_the_content_decides_the_cache(tmp_path, rows):
    file = _write(tmp_path / "a.jsonl", rows)
    first = _module(tmp_path, path=[str(file)]).content_hash()
    moved = tmp_path / "elsewhere" / "b.jsonl"
    moved.parent.mkdir()
    moved.write_bytes(file.read_bytes())
    assert _module(tmp_path, path=[str(moved)]).content_hash() == first
    for options in ({"max_documents": 10}, {"val_fraction": 0.2}, {"test_fraction": 0.0}, {"split": "hash"}):
        assert _module(tmp_path, path=[str(file)], **options).content_hash() != first
    with file.open("a") as end:
        end.write('{"text": "more"}\n')
    assert _module(tmp_path, path=[str(file)]).content_hash() != first


def test_the_column(tmp_path):
    file = _write(tmp_path / "b.jsonl", [{"id": "x", "page": "p"}, {"id": "x"}, {"id": "x", "page": "q", "more": 1}])
    assert _all(_module(tmp_path, path=[str(file)], column="page")) == ["p", "q"]
    for name in ("c.parquet", "c.jsonl"):
        file = _write(tmp_path / name, [{"id": 1, "page": "p"}, {"id": 2, "page": "q"}])
        assert _all(_module(tmp_path, path=[str(file)])) == ["p", "q"], "the only one with text"
    (tmp_path / "a.jsonl").write_text("")  # the first file, which has no columns
    assert _all(_module(tmp_path, path=[str(tmp_path / "*.jsonl")], column="page")) == ["p", "q", "p", "q"]


def test_the_first_documents_only(tmp_path, rows):
    module = _module(tmp_path, path=[str(_write(tmp_path / "a.jsonl", rows))], max_documents=40, val_fraction=0.2)
    assert _all(module) == _texts(rows)[:40]
    assert sum(map(len, _documents(module).values())) == 40


def test_the_size_is_known_about_where_it_can_be(tmp_path, rows):
    text = sum(len(t.encode()) for t in _texts(rows))
    for name in ("a.jsonl", "a.parquet"):
        size = _module(tmp_path, path=[str(_write(tmp_path / name, rows))]).size()
        assert text < size < 2 * text
    (tmp_path / "a.txt").write_bytes(b"x" * 77)
    assert _module(tmp_path, path=[str(tmp_path / "a.txt")]).size() == 77
    assert _module(tmp_path, path=[str(tmp_path / "*.jsonl")], max_documents=5).size() is None
    assert _module(tmp_path, path=[str(_write(tmp_path / "a.jsonl.zst", rows)), str(tmp_path / "a.txt")]).size() is None


def test_a_missing_package_is_named():
    for error in (ValueError("Compression type zstd not supported"), ImportError("Please pip install zstandard")):
        assert hub.cause(error) == "it is compressed with zstd: pip install zstandard"


def test_half_a_surrogate_pair(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d b"}\n{"text": "\\ud83d\\ude42"}\n')
    assert _all(_module(tmp_path, path=[str(tmp_path / "a.jsonl")])) == ["a\ufffd b", "🙂"]


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
        _module(tmp_path, **options).setup("fit")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").glob("*.partial")) == []


def test_a_parquet_column_without_text_is_refused_unread(tmp_path, rows, monkeypatch):
    """By the schemas of all files, also of the last."""
    _write(tmp_path / "in" / "a.parquet", rows)
    _write(tmp_path / "in" / "b.parquet", [{"text": i, "id": i} for i in range(9)])
    _write(tmp_path / "other" / "a.parquet", rows)
    _write(tmp_path / "other" / "b.parquet", [{"id": 1}])
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", lambda *_, **__: pytest.fail("was read"))
    for options, words in (
        ({"path": [str(tmp_path / "in")]}, r"data.column=text is no text \(.*b.parquet holds int64\)"),
        ({"path": [str(tmp_path / "in")], "column": "meta"}, r"data.column=meta is no text \(.*a.parquet holds struct"),
        ({"path": [str(tmp_path / "other")]}, r"b.parquet is no Parquet file with a column 'text'"),
    ):
        with pytest.raises(UserError, match=words):
            _module(tmp_path, **options).setup("fit")
        assert not (tmp_path / "cache").exists() or list((tmp_path / "cache").glob("*.partial")) == []


def test_parquet_texts_of_other_types(tmp_path):
    texts = ["a", None, "b", "a"]
    for kind in (pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())):
        parquet.write_table(pyarrow.table({"text": pyarrow.array(texts).cast(kind)}), tmp_path / "a.parquet")
        assert _all(_module(tmp_path, path=[str(tmp_path / "a.parquet")])) == ["a", "b", "a"]


# The Hub


class _FakeHub:
    """Answers for the Hub: one commit, and a local folder as the repository."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        import datasets

        self.asked: list[str | None] = []
        self.loaded: list[dict] = []
        self.commit: str | None = COMMIT
        self.downloaded: str | None = None
        real = datasets.load_dataset_builder

        def commit(name, revision):
            self.asked.append(revision)
            return self.commit

        def load_dataset_builder(hub_id, **options):
            self.loaded.append({"hub_id": hub_id} | options)
            cache = str(folder.parent / "datasets")
            builder = real(str(folder), cache_dir=cache, **(options | {"revision": None}))
            builder.hash = self.downloaded or options["revision"]
            return builder

        monkeypatch.setattr(hub, "commit", commit)
        monkeypatch.setattr(hub, "reachable", lambda kind, name: self.commit is not None)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder.parent / "hub"))
        monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)


@pytest.fixture
def fake(tmp_path, monkeypatch, rows) -> _FakeHub:
    _write(tmp_path / "repository" / "train-0.parquet", rows[:60])
    _write(tmp_path / "repository" / "train-1.parquet", rows[60:100])
    _write(tmp_path / "repository" / "validation-0.parquet", rows[100:130])
    return _FakeHub(monkeypatch, tmp_path / "repository")


@pytest.mark.parametrize("streaming", [True, False])
def test_a_corpus_by_name(tmp_path, fake, rows, streaming):
    module = _module(tmp_path, hub_id="some/corpus", streaming=streaming, test_fraction=0.2)
    got = _documents(module)
    assert got["val"] == _texts(rows[100:130])
    belongs = [split_of(hashlib.sha256(t.encode()).hexdigest(), 0, 0.2) for t in _texts(rows[:100])]
    for split in ("train", "test"):
        assert got[split] == [t for t, s in zip(_texts(rows[:100]), belongs, strict=True) if s == split]
    first = fake.loaded[0]
    assert (first["hub_id"], first["revision"]) == ("some/corpus", COMMIT)
    assert bool(list((tmp_path / "datasets").rglob("*.arrow"))) is not streaming
    assert fake.asked == [None]


def test_once_prepared_the_hub_is_not_asked(tmp_path, fake):
    first = _module(tmp_path, hub_id="some/corpus")
    first.setup("fit")
    fake.asked.clear()
    fake.loaded.clear()
    fake.commit = None  # and no network
    second = _module(tmp_path, hub_id="some/corpus")
    second.setup("fit")
    assert second.fingerprint == first.fingerprint
    assert second.describe()["source"] == f"some/corpus@{COMMIT}"
    assert not fake.asked
    assert not fake.loaded


def test_revisions(tmp_path, fake):
    newest = _module(tmp_path, hub_id="some/corpus")
    assert newest._commit == COMMIT
    fake.commit = "f" * 40
    assert _module(tmp_path, hub_id="some/corpus")._commit == COMMIT, "remembered"
    assert _module(tmp_path, hub_id="some/corpus", revision="main")._commit == "f" * 40, "asked anew"
    fake.asked.clear()
    assert _module(tmp_path, hub_id="some/corpus", revision="e" * 40)._commit == "e" * 40
    assert not fake.asked
    fake.commit = None
    assert _module(tmp_path, hub_id="some/corpus", revision="main")._commit == "f" * 40, "the last answer"
    reference = tmp_path / "hub" / "datasets--other--corpus" / "refs" / "main"
    reference.parent.mkdir(parents=True)
    reference.write_text("d" * 40)
    assert _module(tmp_path, hub_id="other/corpus")._commit == "d" * 40, "an earlier download"


def test_the_options_of_a_hub_corpus_decide_the_cache(tmp_path, fake):
    first = _module(tmp_path, hub_id="some/corpus").content_hash()
    for options in ({"subset": "x"}, {"column": "text"}, {"data_files": ["a"]}, {"revision": "e" * 40}):
        assert _module(tmp_path, hub_id="some/corpus", **options).content_hash() != first
    assert _module(tmp_path, hub_id="some/corpus", streaming=False).content_hash() == first
    assert not fake.loaded


def test_a_download_of_another_commit_is_not_taken_for_it(tmp_path, fake):
    fake.downloaded = "c" * 40  # what `datasets` gives offline, whichever revision is asked for
    with pytest.raises(UserError, match=f"what is downloaded of some/corpus is commit {'c' * 40}, not {COMMIT}"):
        _module(tmp_path, hub_id="some/corpus").setup("fit")


def test_one_file_of_a_repository(tmp_path, fake, rows):
    module = _module(tmp_path, hub_id="some/corpus", data_files=["train-1.parquet"], val_fraction=0.3)
    assert _all(module) == _texts(rows[60:100])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"subset": "absent"},
            r"data.hub_id=some/corpus: some/corpus cannot be loaded \(.*'absent' not found.*default",
        ),
        ({"train_split": "all"}, r"data.train_split=all: some/corpus has the splits train, validation"),
        ({"val_split": "dev"}, r"data.val_split=dev: some/corpus has the splits train, validation"),
        ({"column": "body"}, r"data.column=body: some/corpus has the columns text, id, meta"),
        ({"column": "id"}, r"data.column=id is no text \(some/corpus holds int64 there\)"),
        ({"data_files": ["absent.parquet"]}, r"some/corpus cannot be loaded \(.*absent.parquet"),
    ],
)
def test_mistakes_about_a_hub_corpus(tmp_path, fake, options, words):
    with pytest.raises(UserError, match=words) as caught:
        _module(tmp_path, hub_id="some/corpus", **options).setup("fit")
    assert "\n" not in str(caught.value)


def test_a_network_that_goes_away_costs_nothing_that_is_done(tmp_path, fake, rows, monkeypatch):
    import datasets

    real = datasets.IterableDataset.iter

    def failing(self, batch_size):
        for i, batch in enumerate(real(self, batch_size=20)):
            if i == 2:
                raise ConnectionError("gone\naway")
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(datasets.IterableDataset, "iter", failing)
        with pytest.raises(UserError, match=r"reading stopped at row 41 \(gone away\); .*the next start continues"):
            _module(tmp_path, hub_id="some/corpus").setup("fit")
    assert _documents(_module(tmp_path, hub_id="some/corpus"))["val"] == _texts(rows[100:130])


def test_no_network_is_one_quick_error_that_names_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", "http://127.0.0.1:9")
    start = time.perf_counter()
    for options in ({}, {"revision": COMMIT}):
        with pytest.raises(UserError, match=r"data.hub_id=some/corpus: the Hub cannot be reached.*data.path="):
            _module(tmp_path, hub_id="some/corpus", **options).setup("fit")
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("preset", ["pg19", "fineweb_edu", "long_data_collections"])
def test_presets_work_from_local_files(tmp_path, preset, rows):
    file = _write(tmp_path / "in" / "a.jsonl.zst", rows)
    config = compose([f"data={preset}", f"data.path={file}", "data.val_fraction=0.1", "data.tokenizer=bytes"]).data
    assert config.hub_id
    config.cache_dir = str(tmp_path / "cache")
    assert sum(map(len, _documents(Hub(config)).values())) == len(_texts(rows))
