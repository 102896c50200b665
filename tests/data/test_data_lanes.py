"""Rows that continue each other: what a lane reads, and what it says about the states before it."""

import random

import numpy as np
import pytest

from src.data.common.lanes import lane_rows, lane_spans
from src.data.text import Text
from src.errors import UserError


@pytest.fixture
def corpus(tmp_path, seed) -> Text:
    """Documents from one line to several rows of 16 tokens."""
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text(f"{i} " * random.choice([1, 5, 40, 90]))
    config = Text.Config(
        name="text", path=[str(tmp_path / "*.txt")], tokenizer="bytes", seq_len=16, batch_size=3, carry_state=True,
        cache_dir=str(tmp_path / "cache"), split="tail",
    )  # fmt: skip
    data = Text(config, seed=seed)
    data.setup()
    return data


def test_an_epoch_reads_every_label_once(corpus):
    stream, lanes = corpus.stream("train"), 3
    rows = lane_rows(stream, lanes, 16)
    assert rows == len(stream) // 48
    seen = np.zeros(len(stream), dtype=int)
    for epoch in (0, 1):
        before = seen.copy()
        for lane in range(lanes):
            for row in range(rows):
                place = {"lane": lane, "lanes": lanes, "row": row, "seed": corpus.seed, "epoch": epoch}
                spans, _ = lane_spans(stream, seq_len=16, **place)
                assert sum(end - begin for begin, end in spans) == 16
                for begin, end in spans:
                    seen[begin:end] += 1
                    assert len(stream.borders(begin, end)) == 0
        assert ((seen - before) <= 1).all()
        assert (seen - before).sum() == rows * 48


def test_documents_go_on_in_their_lane(corpus):
    """The rows of a lane, one after the other, are whole documents from their first row on."""
    stream = corpus.stream("train")
    starts = set(stream.starts.tolist())
    rows = lane_rows(stream, 3, 16)
    for lane in range(3):
        place = None
        for row in range(rows):
            spans, continues = lane_spans(stream, lane=lane, lanes=3, row=row, seq_len=16, seed=corpus.seed, epoch=2)
            if continues:
                assert spans[0][0] == place
            elif row:
                assert spans[0][0] in starts
                assert place in starts  # the document before was read to its end
            assert all(begin in starts for begin, _ in spans[1:])
            place = spans[-1][1]


def test_batches_say_which_state_each_document_continues(corpus):
    rows = lane_rows(corpus.stream("train"), 3, 16)
    for step in range(2 * rows):
        batch = corpus.batch("train", range(3 * step, 3 * step + 3))
        lane, fresh, last = batch["carry"]
        ends = batch["cu_seqlens"].tolist()
        assert len(lane) == len(ends) - 1
        firsts = [ends.index(place) for place in (0, 16, 32)]
        assert [ends[j + 1] for j in last.tolist()] == [16, 32, 48]
        going_on = sorted(set(range(len(lane))) - set(fresh.tolist()))
        assert set(going_on) <= set(firsts)
        assert [firsts.index(document) for document in going_on] == lane[going_on].tolist()
        if step % rows == 0:
            assert not going_on
        part = corpus.batch("train", range(3 * step + 1, 3 * step + 3))  # another rank's, or micro-batch's
        assert part["input_ids"].flatten().tolist() == batch["input_ids"].flatten()[16:].tolist()
        assert part["carry"].lane.max() <= 1


def test_longest_document_decides_the_levels(corpus):
    longest = int(np.diff(corpus.stream("train").starts).max())
    assert corpus.max_seq_len == min(longest, 16 * lane_rows(corpus.stream("train"), 3, 16)) > 16
    corpus.config.batch_size = 8  # short lanes: no state ever has the longest document behind it
    lane = 16 * lane_rows(corpus.stream("train"), 8, 16)
    assert corpus.max_seq_len == max(16, min(longest, lane))


def test_too_little_text_for_the_lanes(tmp_path):
    (tmp_path / "a.txt").write_text("short " * 20)
    options = {"path": [str(tmp_path / "a.txt")], "tokenizer": "bytes", "cache_dir": str(tmp_path), "carry_state": True}
    data = Text(Text.Config(name="text", seq_len=16, batch_size=50, **options))
    with pytest.raises(UserError, match=r"data.batch_size=50: .*has 6 rows"):
        data.setup("fit")
    with pytest.raises(UserError, match=r"data.packing=concatenate: .*needs data.packing=documents"):
        Text(Text.Config(name="text", packing="concatenate", **options))
