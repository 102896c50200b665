"""Preparation: whole or not at all, the same after any kill, in bounded memory."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from src.data.common import cache, prepare
from src.data.common.files import PIECE, DataError
from src.data.common.prepare import build
from src.data.common.tokenizer import ByteTokenizer
from src.errors import UserError

FORK = multiprocessing.get_context("fork")


def _documents(seed: int, n: int) -> list[tuple[str, str | list[str]]]:
    """Documents of all kinds, their splits mixed: short, empty, longer than a piece, in parts."""
    rng = random.Random(seed)
    words = ["a", "Übung", "token,", "漢字漢字", "🙂", "x" * 40, " ", "\n"]
    documents = []
    for _ in range(n):
        size = rng.choice([0, 1, 5, 50, 500, 3 * PIECE // 4]) // 4
        parts = [" ".join(rng.choices(words, k=size)) for _ in range(rng.choice([1, 1, 3]))]
        split = rng.choice(["train", "train", "val", "test"])
        documents.append((split, parts if rng.random() < 0.5 else "".join(parts)))
    return documents


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class _Dying(ByteTokenizer):
    """Kills its own process after some batches."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def encode_batch(self, texts):
        if self.left == 0:
            time.sleep(0.05)  # the batch before is being written
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        return super().encode_batch(texts)


def _killed(folder: Path, documents: list, batches: int) -> None:
    process = FORK.Process(target=build, args=(folder, lambda: documents, _Dying(batches)))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


@pytest.fixture
def small(monkeypatch) -> None:
    """Many batches and a record after each."""
    monkeypatch.setattr(prepare, "BATCH", 1 << 14)
    monkeypatch.setattr(prepare, "RECORD_SECONDS", 0.0)


def test_killed_again_and_again_it_is_the_uninterrupted_one(tmp_path, seed, small, capfd):
    documents = _documents(seed, 120)
    build(tmp_path / "whole", lambda: documents, ByteTokenizer())
    rng, kills = random.Random(seed), 0
    while not (tmp_path / "out").exists() and kills < 3:
        _killed(tmp_path / "out", documents, rng.randrange(2, 8))
        kills += 1
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()].count("out") == 0
    partial = tmp_path / "out.partial"
    done = json.loads((partial / "progress.json").read_text())["pieces"]
    assert done > 0
    for path in partial.glob("*.npy"):  # what was written after the record is cut off
        with path.open("ab") as file:
            file.write(b"half a token" * rng.randrange(3))
    capfd.readouterr()

    class Counting(ByteTokenizer):
        encoded = 0

        def encode_batch(self, texts):
            self.encoded += len(texts)
            return super().encode_batch(texts)

    tokenizer = Counting()
    build(tmp_path / "out", lambda: documents, tokenizer)
    assert tokenizer.encoded == len(list(prepare.flat(documents))) - done
    assert "continues an interrupted preparation at" in capfd.readouterr().err
    assert not partial.exists()
    whole, resumed = _content(tmp_path / "whole"), _content(tmp_path / "out")
    assert whole.keys() == resumed.keys()
    assert all(whole[name] == resumed[name] for name in whole)


SCRIPT = """
import sys
from pathlib import Path
from src.data.common import prepare
from src.data.text import Text
prepare.BATCH, prepare.RECORD_SECONDS = 1 << 15, 0.0
folder, out = sys.argv[1:]
Text(Text.Config(name="text", path=[folder], cache_dir=out, vocab_size=300)).prepare_data()
"""


@pytest.mark.slow
def test_a_process_killed_at_random_moments(tmp_path, seed, prose):
    """Through the whole path: from files, with a trained tokenizer, killed from outside."""
    (tmp_path / "corpus").mkdir()
    for i in range(3):
        (tmp_path / "corpus" / f"{i}.txt").write_text(prose(600_000))

    def start(out: str) -> subprocess.Popen:
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "corpus"), str(tmp_path / out)]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])

    def finished(out: str) -> Path | None:
        return next((path for path in (tmp_path / out).glob("text-*") if path.suffix == ""), None)

    whole = start("whole")
    assert "tokenised" in whole.communicate(timeout=120)[1]
    rng, kills = random.Random(seed), 0
    for _ in range(6):
        process = start("killed")
        record = f"text-*.partial/{prepare.RECORD}"
        while process.poll() is None and not list((tmp_path / "killed").glob(record)):
            time.sleep(0.002)
        time.sleep(rng.random() * 0.1)
        process.kill()
        process.communicate(timeout=60)
        kills += process.returncode == -signal.SIGKILL
        if finished("killed"):
            break
    assert kills
    if not finished("killed"):
        last = start("killed")
        assert "continues an interrupted preparation" in last.communicate(timeout=120)[1]
    assert _content(finished("killed")) == _content(finished("whole"))


def test_another_text_under_the_same_name_begins_anew(tmp_path, seed, small, capfd):
    documents = _documents(seed, 60)
    _killed(tmp_path / "out", documents, 3)
    changed = [(split, document if isinstance(document, str) else list(document)) for split, document in documents]
    changed[0] = ("val", "another first document")
    build(tmp_path / "out", lambda: changed, ByteTokenizer())
    assert "begins anew" in capfd.readouterr().err
    build(tmp_path / "whole", lambda: changed, ByteTokenizer())
    assert _content(tmp_path / "out") == _content(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["no record", "half a record", "short file", "another key", "fewer documents"])
def test_a_record_that_does_not_fit_is_not_trusted(tmp_path, seed, small, damage, capfd):
    # A short first one: alone it is fewer pieces than any record holds, whatever the others are.
    documents = [("train", "the first document"), *_documents(seed, 60)]
    _killed(tmp_path / "out", documents, 3)
    partial = tmp_path / "out.partial"
    record = partial / prepare.RECORD
    if damage == "no record":
        record.unlink()
    elif damage == "half a record":
        record.write_text(record.read_text()[:40])
    elif damage == "short file":
        (partial / "train.tokens.npy").write_bytes(b"")
    elif damage == "another key":
        partial.rename(tmp_path / "other.partial")
        (tmp_path / "other.partial").rename(partial)
        record.write_text(record.read_text().replace('"out"', '"other"'))
    else:
        documents = documents[:1]
    build(tmp_path / "out", lambda: documents, ByteTokenizer())
    said = capfd.readouterr().err
    # Fewer documents are noticed only when they have been read.
    assert ("begins anew" in said) == ("continues" in said) == (damage == "fewer documents")
    build(tmp_path / "whole", lambda: documents, ByteTokenizer())
    assert _content(tmp_path / "out") == _content(tmp_path / "whole")


@pytest.mark.parametrize("cut", [0, 1])
def test_a_cut_file_of_a_large_vocabulary_is_noticed(tmp_path, seed, small, cut, capfd):
    """Tokens of four bytes: a file that holds half of the recorded ones is not filled up with zeros."""

    class Large(ByteTokenizer):
        vocab_size = 1 << 17

    class Failing(Large):
        left = 3

        def encode_batch(self, texts):
            self.left -= 1
            if self.left < 0:
                time.sleep(0.05)
                raise UserError("enough")
            return super().encode_batch(texts)

    documents = _documents(seed, 60)
    with pytest.raises(UserError, match="enough"):
        build(tmp_path / "out", lambda: documents, Failing())
    partial = tmp_path / "out.partial"
    lengths = json.loads((partial / prepare.RECORD).read_text())["lengths"]
    split = max(lengths, key=lambda split: lengths[split]["tokens"])
    assert lengths[split]["tokens"] > 2
    os.truncate(partial / f"{split}.tokens.npy", prepare.HEADER + 4 * lengths[split]["tokens"] - cut)
    capfd.readouterr()
    build(tmp_path / "out", lambda: documents, Large())
    assert ("continues" in capfd.readouterr().err) == (cut == 0)
    build(tmp_path / "whole", lambda: documents, Large())
    assert _content(tmp_path / "out") == _content(tmp_path / "whole")


def test_an_error_of_the_data_keeps_nothing(tmp_path, seed, small):
    documents = _documents(seed, 60)
    _killed(tmp_path / "out", documents, 3)
    assert (tmp_path / "out.partial").is_dir(), "of a kill"

    def wrong():
        yield from documents
        raise DataError("row 7 is no text")

    with pytest.raises(DataError, match="row 7"):
        build(tmp_path / "out", wrong, ByteTokenizer())
    assert list(tmp_path.iterdir()) == []


def test_an_error_while_reading_keeps_what_is_done(tmp_path, seed, small):
    documents = _documents(seed, 120)

    def failing():
        yield from documents[:100]
        raise UserError("the network is gone")

    with pytest.raises(UserError, match="the network is gone"):
        build(tmp_path / "out", failing, ByteTokenizer())
    assert (tmp_path / "out.partial" / prepare.RECORD).is_file()
    build(tmp_path / "out", lambda: documents, ByteTokenizer())
    build(tmp_path / "whole", lambda: documents, ByteTokenizer())
    assert _content(tmp_path / "out") == _content(tmp_path / "whole")


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare._SplitFiles, "add", full)
    with pytest.raises(UserError, match=r"out.partial cannot be written \(No space left on device\)"):
        build(tmp_path / "out", lambda: [("train", "text")], ByteTokenizer())


def test_one_line_says_what_was_done(tmp_path, capfd):
    build(tmp_path / "out", lambda: [("train", "ab " * 1000), ("val", "é")], ByteTokenizer())
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("tokenised 0.0 MB in ")
    assert line.endswith(" MB/s): 3,004 tokens")


def test_splits_that_come_mixed_are_those_that_come_in_turn(tmp_path, seed):
    documents = _documents(seed, 60)
    build(tmp_path / "mixed", lambda: documents, ByteTokenizer())
    build(tmp_path / "sorted", lambda: sorted(documents, key=lambda pair: pair[0]), ByteTokenizer())
    assert _content(tmp_path / "mixed") == _content(tmp_path / "sorted")


def test_documents_larger_than_a_batch_stream_through(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "BATCH", 1 << 12)
    largest = 0

    def parts():
        for _ in range(40_000):
            yield "word " * 10

    class Watching(ByteTokenizer):
        def encode_batch(self, texts):
            nonlocal largest
            largest = max(largest, sum(map(len, texts)))
            return super().encode_batch(texts)

    build(tmp_path / "out", lambda: [("train", parts())], Watching())
    stream = cache.open_streams(tmp_path / "out")["train"]
    assert (stream.n_documents, stream.n_bytes, len(stream)) == (1, 2_000_000, 2_000_001)
    assert largest < 2 * PIECE + prepare.BATCH


def test_words_are_counted_across_pieces(tmp_path):
    """A word longer than a piece is cut; documents end words."""
    long = "x" * (5 * PIECE)
    documents = [f"a {long} b", "c", iter(["d e", "e ", " f\n", "g"])]
    build(tmp_path / "out", lambda: [("train", document) for document in documents], ByteTokenizer())
    assert cache.open_streams(tmp_path / "out")["train"].word_starts.tolist() == [0, 3, 4, 8]


def _peak(path: Path, n: int, results) -> None:
    import resource

    prepare.BATCH = 1 << 18

    def documents():
        for i in range(n):
            yield ("train", "val")[i % 2], f"{i} some words of a short document "

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    build(path, documents, ByteTokenizer())
    results.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """Of 400,000 more documents nothing stays: four numbers of 8 bytes each would be 12 MB."""
    peaks = []
    for n in (100_000, 500_000):
        results = FORK.Queue()
        process = FORK.Process(target=_peak, args=(tmp_path / str(n), n, results))
        process.start()
        peaks.append(results.get(timeout=120))
        process.join(60)
    assert len(np.load(tmp_path / "500000" / "train.starts.npy", mmap_mode="r")) == 250_001
    assert peaks[1] - peaks[0] < 6_000, f"KiB above the start: {peaks}"
