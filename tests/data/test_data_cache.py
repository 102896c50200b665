"""The token cache: keyed by content and tokenizer, made once, by one process or several."""

import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest

from src.data.common import cache
from src.data.common.prepare import build
from src.data.common.tokenizer import ByteTokenizer
from src.data.text import Text
from src.errors import UserError


def _module(folder: Path, **options) -> Text:
    defaults = dict(name="text", path=[str(folder / "a.txt")], cache_dir=str(folder / "cache"), vocab_size=300)
    return Text(Text.Config(**(defaults | options)))


def _caches(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "cache").iterdir() if path.is_dir())


@pytest.fixture
def folder(tmp_path, prose):
    (tmp_path / "a.txt").write_text(prose(50_000))
    return tmp_path


def test_second_start_reads_no_document(folder, monkeypatch):
    first = _module(folder)
    first.setup()
    monkeypatch.setattr(Text, "documents", lambda *_: pytest.fail("tokenised again"))
    second = _module(folder)
    second.setup()
    assert second.describe() == first.describe()
    assert second.tokenizer.fingerprint == first.tokenizer.fingerprint
    assert isinstance(second._streams["train"].tokens, np.memmap)
    assert second._streams["train"].tokens.dtype == np.uint16


def test_content_and_tokenizer_decide_the_key(folder, prose):
    for options in ({}, {"tokenizer": "bytes"}, {"vocab_size": 280}, {"val_fraction": 0.1}):
        _module(folder, **options).setup()
    assert len(_caches(folder)) == 4
    os.utime(folder / "a.txt")
    _module(folder).setup()
    assert len(_caches(folder)) == 4
    changed = (folder / "a.txt").read_text()[:-1] + "#"
    before = _module(folder).fingerprint
    (folder / "a.txt").write_text(changed)
    _module(folder).setup()
    assert len(_caches(folder)) == 5
    assert _module(folder).fingerprint != before


def test_the_corpus_may_lie_elsewhere(folder):
    first = _module(folder)
    first.setup()
    moved = folder / "moved" / "b.txt"
    moved.parent.mkdir()
    (folder / "a.txt").rename(moved)
    second = _module(folder, path=[str(moved)])
    second.setup()
    assert len(_caches(folder)) == 1


def _prepare(folder: Path, results) -> None:
    module = _module(folder)
    module.setup()
    results.put((module.tokenizer.fingerprint, module.describe()))


def test_processes_that_prepare_at_once_agree(folder):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_prepare, args=(folder, results)) for _ in range(3)]
    for process in processes:
        process.start()
    got = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert got[0] == got[1] == got[2]
    assert len(_caches(folder)) == 1


@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
def test_a_damaged_cache_is_named(folder, damage):
    module = _module(folder)
    module.setup()
    file = next(_caches(folder)[0].glob("train.tokens.npy"))
    content = file.read_bytes()
    if damage == "other":
        np.save(file, np.zeros(3, np.uint16))
    else:
        file.write_bytes(content[: len(content) // 2] if damage == "cut" else b"")
    with pytest.raises(UserError, match=r"is damaged.*remove it"):
        _module(folder).setup()


def test_a_cache_folder_that_cannot_be_written(folder):
    with pytest.raises(UserError, match=r"data.cache_dir=.*a.txt.cache cannot be written"):
        _module(folder, cache_dir=str(folder / "a.txt" / "cache")).setup()


def test_large_vocabularies_take_four_bytes(folder):
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size = 1 << 17
    build(folder / "out", lambda: [("train", "ab")], tokenizer)
    streams = cache.open_streams(folder / "out")
    assert streams["train"].tokens.dtype == np.uint32
    assert streams["train"].tokens.tolist() == [256, 97, 98, 256]
    assert len(streams["val"]) == 0


def test_errors_of_the_caller_are_not_those_of_the_folder(folder):
    with pytest.raises(FileNotFoundError), cache.exclusive(folder / "cache", "key"):
        (folder / "absent").read_bytes()


def test_waiting_for_the_lock_ends_with_its_holder(folder):
    (folder / "cache").mkdir()
    module = _module(folder)
    context = multiprocessing.get_context("fork")
    held = context.Event()

    def hold():
        with cache.exclusive(module.cache_dir, module.fingerprint):
            held.set()
            time.sleep(60)

    process = context.Process(target=hold)
    process.start()
    assert held.wait(30)
    process.kill()
    start = time.perf_counter()
    module.setup()
    assert time.perf_counter() - start < 20
    process.join(10)
