"""data=wikitext: articles, local files, the Hub replaced by a stand-in."""

import sys
import time
from types import ModuleType

import pytest

from src.data.wikitext import REVISION, WikiText, articles
from src.errors import UserError

FIRST = " \n = First = \n \n Text . \n \n = = Part = = \n \n = 5 = \n More . \n \n = = = Deep = = = \n \n"
SECOND = " = Second = 2nd ( film ) = \n \n Text @-@ of the second . \n"


def _module(tmp_path, **options) -> WikiText:
    defaults = dict(name="wikitext", cache_dir=str(tmp_path / "cache"), tokenizer="bytes")
    return WikiText(WikiText.Config(**(defaults | options)))


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "wikitext"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        (folder / f"wiki.{split}.raw").write_text(FIRST + SECOND.replace("Text", split))
    (folder / "README.txt").write_text("not a split")
    return folder


def test_articles_begin_at_titles_only():
    assert list(articles((FIRST + SECOND).splitlines(keepends=True))) == [FIRST, SECOND]
    assert list(articles(["no title\n"])) == ["no title\n"]
    assert list(articles([" \n", " \n"])) == []


def test_local_folder(tmp_path, folder):
    module = _module(tmp_path, path=[str(folder)])
    module.setup("fit")
    assert list(module.documents("val")) == [FIRST, SECOND.replace("Text", "valid")]
    facts = module.describe()
    assert [facts[f"{split}.documents"] for split in ("train", "val", "test")] == [2, 2, 2]
    assert facts["test.bytes"] == len((folder / "wiki.test.raw").read_bytes())


@pytest.mark.parametrize("name", ["train.txt", "wiki.train.tokens", "en-train-01.txt"])
def test_names_and_single_files(tmp_path, name):
    (tmp_path / name).write_text(FIRST)
    (tmp_path / "validation.txt").write_text(SECOND)
    module = _module(tmp_path, path=[str(tmp_path / name), str(tmp_path / "validation.txt")])
    module.setup("fit")
    assert module.describe()["val.bytes"] == len(SECOND)
    assert module.describe()["test.documents"] == 0


def test_parquet_as_the_hub_has_it_gives_the_same_text(tmp_path, folder):
    import pyarrow
    from pyarrow import parquet

    hub = tmp_path / "hub" / "wikitext-2-raw-v1"
    hub.mkdir(parents=True)
    for split, name in (("train", "train"), ("valid", "validation"), ("test", "test")):
        lines = (folder / f"wiki.{split}.raw").read_text().splitlines(keepends=True)
        rows = ["" if line == " \n" else line for line in lines]
        parquet.write_table(pyarrow.table({"text": rows}), hub / f"{name}-00000-of-00001.parquet")
    module = _module(tmp_path, path=[str(tmp_path / "hub")])
    assert list(module.documents("val")) == list(_module(tmp_path, path=[str(folder)]).documents("val"))
    (hub / "train-00000-of-00001.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"train-00000-of-00001.parquet is no Parquet file"):
        list(module.documents("train"))


def test_a_set_without_training_split_evaluates_but_does_not_train(tmp_path, folder):
    (folder / "wiki.train.raw").unlink()
    module = _module(tmp_path, path=[str(folder)])
    module.setup("validate")
    assert len(list(module.val_dataloader())) == 1
    for attempt in (lambda: module.setup("fit"), module.train_dataloader):
        with pytest.raises(UserError, match="data=wikitext has no text in its train split"):
            attempt()
    with pytest.raises(UserError, match=r"no training text for data.tokenizer=bpe"):
        _module(tmp_path, path=[str(folder)], tokenizer="bpe").setup()


def test_mistaken_paths(tmp_path):
    with pytest.raises(UserError, match=r"data.path=/nowhere: no such file or folder"):
        _module(tmp_path, path=["/nowhere"]).setup()
    (tmp_path / "story.txt").write_text("text")
    with pytest.raises(UserError, match="no file named train, valid or test"):
        _module(tmp_path, path=[str(tmp_path)]).setup()


def test_a_file_that_cannot_be_read_is_named(tmp_path, folder):
    file = folder / "wiki.valid.raw"
    file.unlink()
    file.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"wiki.valid.raw cannot be read \(No such file"):
        _module(tmp_path, path=[str(folder)]).setup("fit")


def test_no_network_is_one_quick_error_that_names_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", "http://127.0.0.1:9")
    start = time.perf_counter()
    with pytest.raises(UserError, match=r"Hub cannot be reached for Salesforce/wikitext; give data.path="):
        _module(tmp_path).setup()
    assert time.perf_counter() - start < 10
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir() and path.suffix != ".partial"]


def test_the_hub_is_asked_once_for_one_revision(tmp_path, monkeypatch):
    asked = []

    class Rows(list):
        def iter(self, batch_size):
            yield {"text": list(self)}

    class Builder:
        hash = REVISION

        def download_and_prepare(self):
            pass

        def as_dataset(self):
            splits = ("train", "validation", "test")
            return {split: Rows(["", " = Title = \n", "", f" {split} \n"]) for split in splits}

    def load_dataset_builder(hub_id, *, name, revision, data_files):
        asked.append((hub_id, name, revision, data_files))
        return Builder()

    stand_in = ModuleType("datasets")
    stand_in.load_dataset_builder, stand_in.disable_progress_bars = load_dataset_builder, lambda: None
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    monkeypatch.setattr("src.data.common.hub.reachable", lambda kind, name: True)
    module = _module(tmp_path, version="wikitext-103-raw-v1")
    module.setup("fit")
    assert set(asked) == {("Salesforce/wikitext", "wikitext-103-raw-v1", REVISION, None)}
    assert module.tokenizer.decode(module._streams["val"].tokens[1:-1]) == " \n = Title = \n \n validation \n"
    asked.clear()
    monkeypatch.setattr("src.data.common.hub.reachable", lambda kind, name: pytest.fail("asked again"))
    _module(tmp_path, version="wikitext-103-raw-v1").setup("fit")
    assert not asked
