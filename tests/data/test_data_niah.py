"""data=niah: exact lengths, needles where they are asked, and rows of several examples."""

import pickle
import random
import re
from collections import Counter

import numpy as np
import pytest
import torch

from src.data.common import needles
from src.data.common.needles import TASKS
from tests.needles import asked_keys, parts

TEXT = [task for task, kind in TASKS.items() if kind.haystack == "text"]
FACT = re.compile(r"The code of ([a-z0-9-]+) is ([a-f0-9-]+)\.")
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
SPLITS = ("train", "val", "test")


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@pytest.mark.parametrize("task", TASKS)
def test_an_example_of_every_length(niah, seed, task, tokenizer):
    module, kind = niah(tokenizer=tokenizer), TASKS[task]
    rng = random.Random(seed)
    least = module.smallest(task)
    lengths = [least, least + 1, 1024, *(int(least * 2 ** rng.uniform(0, 6)) for _ in range(4)), 131_072]
    for length in lengths:
        split, number = rng.choice(SPLITS), rng.randrange(10**6)
        example = module.example(split, task, length, number)
        assert len(example.prompt_ids) + len(example.answer_ids) + 1 == length, (length, split, number)
        hay, what, answer = parts(module, example)
        assert answer == " " + ", ".join(example.references)
        facts = FACT.findall(hay)
        keys = [key for key, _ in facts]
        asked = asked_keys(what)
        assert len(asked) == len(set(asked)) == kind.n_queries
        by_key = {key: [v for k, v in facts if k == key] for key in asked}
        assert [value for key in asked for value in by_key[key]] == example.references  # also: in their order
        assert len(example.references) == len(set(example.references)) == kind.n_answers
        assert all(re.fullmatch(UUID if kind.value == "uuid" else r"[1-9]\d{6}", v) for _, v in facts)
        if kind.haystack == "needles":
            assert set(Counter(keys).values()) == {1}
            rest = FACT.sub("", hay).replace("\n", "")  # the first line is cut
            assert len(rest) < 90
            assert length < 4000 or len(keys) > length / 100
        else:
            assert Counter(keys) == dict.fromkeys(keys, kind.n_values)
            assert len(set(keys)) == kind.n_keys
        assert all(re.fullmatch(UUID if kind.key == "uuid" else r"[a-z]+-[a-z]+", key) for key in keys)


@pytest.mark.parametrize("task", TASKS)
def test_the_needle_is_where_it_is_asked_for(niah, task):
    module = niah()  # bytes: a character of the needle is a token
    for length in (1024, 30_000):
        for depth in (0.0, 0.2, 0.5, 0.77, 1.0):
            example = module.example("test", task, length, 5, depth)
            assert example.depth == pytest.approx(depth, abs=0.2 if length == 1024 else 0.01)
            hay, what, _ = parts(module, example)
            size, inserted = len(hay.encode()), sum(len(m[0]) + 1 for m in FACT.finditer(hay))
            places = [m.start() for m in re.finditer(f"The code of {asked_keys(what)[0]} is".encode(), hay.encode())]
            assert len(places) == TASKS[task].n_values
            if TASKS[task].haystack == "needles":
                inserted = len(FACT.search(hay)[0]) + 1
            # Of several needles others may stand before it.
            spare = inserted / (size - inserted) + 0.01
            shares = [place / (size - inserted) for place in places]
            assert min(abs(share - example.depth) for share in shares) <= spare


def test_needles_stand_between_sentences(niah):
    for tokenizer in ("bytes", "bpe"):
        module = niah(tokenizer=tokenizer)
        for number in range(50):
            example = module.example("train", "multikey_1", 3000, number)
            hay = parts(module, example)[0]
            places = [m.start() for m in FACT.finditer(hay)]
            assert all(re.search(r"(^|[.!\n]) $", hay[:p]) or m.end() == len(hay)
                       for p, m in zip(places, FACT.finditer(hay), strict=True))  # fmt: skip
            assert hay[0] in " \n"  # the text begins with a sentence


def test_lines_in_parts_are_those_at_once_and_never_the_asked_one(niah):
    maker, address = niah()._maker, (0, 1, list(TASKS).index("multikey_2"), 1024, 7)  # as of the draw below
    whole = maker._distractors(TASKS["multikey_2"], 0, 50, address)
    parts = [maker._distractors(TASKS["multikey_2"], i, n, address) for i, n in ((0, 20), (20, 1), (21, 29))]
    lines = [FACT.search(maker.tokenizer.decode(line)).groups() for line in whole]
    assert [line.tolist() for part in parts for line in part] == [line.tolist() for line in whole]
    assert len(set(lines)) == 50
    assert maker.draw("val", "multikey_2", 1024, 7).references[0] not in {value for _, value in lines}


def test_drawn_depths_are_forty_points(niah):
    module = niah()
    depths = Counter(round(39 * module.example("val", "single_1", 30_000, i).depth) for i in range(800))
    assert set(depths) == set(range(40))
    assert max(depths.values()) < 20 + 6 * 20**0.5
    values = needles.distinct(40, 4, 1, 2)
    assert len(set(values)) == 4
    assert values[:2] == needles.distinct(40, 2, 1, 2)


def test_distinct_is_uniform(seed):
    draws = np.array([needles.distinct(6, 6, seed, i) for i in range(6000)])
    assert (np.sort(draws, axis=1) == np.arange(6)).all()
    for place in range(6):
        assert np.abs(np.bincount(draws[:, place], minlength=6) - 1000).max() < 6 * 1000**0.5


def test_words_are_distinct():
    for words in (needles.ADJECTIVES, needles.NOUNS):
        assert len(words) == len(set(words)) >= 128
        assert all(re.fullmatch("[a-z]+", word) for word in words)
    assert needles.N_WORD_KEYS > 131_072 / 5


def test_a_split_has_its_own_haystack(niah):
    module = niah()
    for split, word in zip(SPLITS, ("apple", "stone", "cloud"), strict=True):
        texts = [parts(module, module.example(split, "single_2", 40_000, i))[0].lower() for i in range(3)]
        counts = {w: sum(text.count(f"{w} ") for text in texts) for w in ("apple", "stone", "cloud")}
        others = sum(n for w, n in counts.items() if w != word)
        assert counts[word] > 100 * (1 + others)  # the needle's key may say one


def test_an_example_is_a_function_of_its_address(niah):
    module = niah(seed=3)
    copy = pickle.loads(pickle.dumps(module))
    first = {task: module.example("val", task, 2000, 7) for task in TASKS}
    for task in reversed(TASKS):
        assert copy.example("val", task, 2000, 7) == first[task] == module.example("val", task, 2000, 7)
        others = [niah(seed=4).example("val", task, 2000, 7), module.example("train", task, 2000, 7),
                  module.example("val", task, 2000, 8)]  # fmt: skip
        assert all(other.references != first[task].references for other in others)
    parallel = niah(seed=3, num_workers=1, val_examples=3)
    for ours, theirs in zip(niah(seed=3, val_examples=3).val_dataloader(), parallel.val_dataloader(), strict=True):
        assert torch.equal(ours["input_ids"], theirs["input_ids"])


@pytest.mark.parametrize("content", ["word " * 3000, "x" * 15_000, "a b.\n" * 4, "é" * 5000])
def test_a_corpus_without_sentences_or_shorter_than_the_haystack(niah, tmp_path, content):
    path = tmp_path / "one.txt"
    path.write_text(content * 3)
    options = {"path": [str(path)], "val_fraction": 0.2, "test_fraction": 0.2, "split": "tail"}
    module = niah(haystack_options=options)
    for depth in (0.0, 0.3, 1.0):
        example = module.example("val", "single_2", 5000, 1, depth)
        assert len(example.prompt_ids) + len(example.answer_ids) + 1 == 5000
        assert example.depth == pytest.approx(depth, abs=0.03)
        assert example.references[0] in module.tokenizer.decode(example.prompt_ids)
