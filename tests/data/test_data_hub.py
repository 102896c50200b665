"""data=hub by name: the Hub is replaced by local data sets of `datasets`."""

import hashlib
import time
from pathlib import Path

import pytest

from src.config import compose
from src.data.common import hub
from src.data.common.files import split_of
from src.data.hub import Hub
from src.errors import UserError
from tests.tables import all_texts, documents_of, module_of, texts_of, write

COMMIT = "0123456789" * 4


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
    write(tmp_path / "repository" / "train-0.parquet", rows[:60])
    write(tmp_path / "repository" / "train-1.parquet", rows[60:100])
    write(tmp_path / "repository" / "validation-0.parquet", rows[100:130])
    return _FakeHub(monkeypatch, tmp_path / "repository")


@pytest.mark.parametrize("streaming", [True, False])
def test_a_corpus_by_name(tmp_path, fake, rows, streaming):
    module = module_of(tmp_path, hub_id="some/corpus", streaming=streaming, test_fraction=0.2)
    got = documents_of(module)
    assert got["val"] == texts_of(rows[100:130])
    belongs = [split_of(hashlib.sha256(t.encode()).hexdigest(), 0, 0.2) for t in texts_of(rows[:100])]
    for split in ("train", "test"):
        assert got[split] == [t for t, s in zip(texts_of(rows[:100]), belongs, strict=True) if s == split]
    first = fake.loaded[0]
    assert (first["hub_id"], first["revision"]) == ("some/corpus", COMMIT)
    assert bool(list((tmp_path / "datasets").rglob("*.arrow"))) is not streaming
    assert fake.asked == [None]


def test_once_prepared_the_hub_is_not_asked(tmp_path, fake):
    first = module_of(tmp_path, hub_id="some/corpus")
    first.setup("fit")
    fake.asked.clear()
    fake.loaded.clear()
    fake.commit = None  # and no network
    second = module_of(tmp_path, hub_id="some/corpus")
    second.setup("fit")
    assert second.fingerprint == first.fingerprint
    assert second.describe()["source"] == f"some/corpus@{COMMIT}"
    assert not fake.asked
    assert not fake.loaded


def test_revisions(tmp_path, fake):
    newest = module_of(tmp_path, hub_id="some/corpus")
    assert newest._commit == COMMIT
    fake.commit = "f" * 40
    assert module_of(tmp_path, hub_id="some/corpus")._commit == COMMIT, "remembered"
    assert module_of(tmp_path, hub_id="some/corpus", revision="main")._commit == "f" * 40, "asked anew"
    fake.asked.clear()
    assert module_of(tmp_path, hub_id="some/corpus", revision="e" * 40)._commit == "e" * 40
    assert not fake.asked
    fake.commit = None
    assert module_of(tmp_path, hub_id="some/corpus", revision="main")._commit == "f" * 40, "the last answer"
    reference = tmp_path / "hub" / "datasets--other--corpus" / "refs" / "main"
    reference.parent.mkdir(parents=True)
    reference.write_text("d" * 40)
    assert module_of(tmp_path, hub_id="other/corpus")._commit == "d" * 40, "an earlier download"


def test_the_options_of_a_hub_corpus_decide_the_cache(tmp_path, fake):
    first = module_of(tmp_path, hub_id="some/corpus").content_hash()
    for options in ({"subset": "x"}, {"column": "text"}, {"data_files": ["a"]}, {"revision": "e" * 40}):
        assert module_of(tmp_path, hub_id="some/corpus", **options).content_hash() != first
    assert module_of(tmp_path, hub_id="some/corpus", streaming=False).content_hash() == first
    assert not fake.loaded


def test_a_download_of_another_commit_is_not_taken_for_it(tmp_path, fake):
    fake.downloaded = "c" * 40  # what `datasets` gives offline, whichever revision is asked for
    with pytest.raises(UserError, match=f"what is downloaded of some/corpus is commit {'c' * 40}, not {COMMIT}"):
        module_of(tmp_path, hub_id="some/corpus").setup("fit")


def test_one_file_of_a_repository(tmp_path, fake, rows):
    module = module_of(tmp_path, hub_id="some/corpus", data_files=["train-1.parquet"], val_fraction=0.3)
    assert all_texts(module) == texts_of(rows[60:100])


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
        module_of(tmp_path, hub_id="some/corpus", **options).setup("fit")
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
            module_of(tmp_path, hub_id="some/corpus").setup("fit")
    assert documents_of(module_of(tmp_path, hub_id="some/corpus"))["val"] == texts_of(rows[100:130])


def test_no_network_is_one_quick_error_that_names_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", "http://127.0.0.1:9")
    start = time.perf_counter()
    for options in ({}, {"revision": COMMIT}):
        with pytest.raises(UserError, match=r"data.hub_id=some/corpus: the Hub cannot be reached.*data.path="):
            module_of(tmp_path, hub_id="some/corpus", **options).setup("fit")
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("preset", ["pg19", "fineweb_edu", "long_data_collections"])
def test_presets_work_from_local_files(tmp_path, preset, rows):
    file = write(tmp_path / "in" / "a.jsonl.zst", rows)
    config = compose([f"data={preset}", f"data.path={file}", "data.val_fraction=0.1", "data.tokenizer=bytes"]).data
    assert config.hub_id
    config.cache_dir = str(tmp_path / "cache")
    assert sum(map(len, documents_of(Hub(config)).values())) == len(texts_of(rows))
