"""data=niah: exact lengths, needles where they are asked, and rows of several examples."""

import pickle
import random
import re
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from src.data import IGNORE
from src.data.common import needles
from src.data.common.needles import TASKS, contained
from src.data.niah import Niah
from src.errors import UserError
from src.metrics import exact_match
from src.registry import DATA, build_options

TEXT = [task for task, kind in TASKS.items() if kind.haystack == "text"]
FACT = re.compile(r"The code of ([a-z0-9-]+) is ([a-f0-9-]+)\.")
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
SPLITS = ("train", "val", "test")


def _sentences(rng: random.Random, n: int, words: str) -> str:
    """About n characters of sentences of these words, several to a line, with letters of several bytes."""
    parts, size = [], 0
    while size < n:
        sentence = " ".join(rng.choices([*words.split(), "naïve", "漢字", "3.14"], k=rng.randint(3, 12)))
        parts.append(sentence.capitalize() + rng.choice([". ", ". ", "! ", ".\n", ".\n\n"]))
        size += len(parts[-1])
    return "".join(parts)


@pytest.fixture
def niah(tmp_path: Path, seed: int):
    """A prepared module on a small corpus whose splits have words of their own."""
    rng = random.Random(seed)
    folder = tmp_path / "text"
    folder.mkdir()
    for split, words in zip(SPLITS, ("apple tree", "stone river", "cloud rain"), strict=True):
        for i in range(3):
            (folder / f"{split}{i}.txt").write_text(_sentences(rng, 4000, words))

    def make(seed: int = 0, setup: bool = True, **options) -> Niah:
        paths = dict(zip(("path", "val_path", "test_path"), ([f"{folder}/{s}*.txt"] for s in SPLITS), strict=True))
        defaults = dict(haystack="text", haystack_options=paths, tokenizer="bytes", cache_dir=str(tmp_path / "cache"))
        cls = DATA.get("niah")
        module = cls(build_options(cls, {"vocab_size": 600, "seq_len": 1024} | defaults | options, "data"), seed=seed)
        if setup:
            module.setup("fit")
        return module

    return make


def _parts(module: Niah, example) -> tuple[str, str, str]:
    """Haystack with needles, question and answer as text, with what holds for every example checked."""
    eot = module.tokenizer.eot
    assert example.prompt_ids[0] == eot
    assert eot not in example.prompt_ids[1:] + example.answer_ids
    text = module.tokenizer.decode(example.prompt_ids[1:])
    hay, what, begun = text.rsplit("\n", 2)
    head = needles.instruction(TASKS[example.task])
    assert hay.startswith(head)
    assert re.fullmatch(r"What (is|are) the codes? of .*\?", what)
    assert begun.endswith((" is", " are"))
    return hay[len(head) :], what, module.tokenizer.decode(example.answer_ids)


def _asked(what: str) -> list[str]:
    return re.split(", | and ", re.fullmatch(r"What \w+ the codes? of (.*)\?", what)[1])


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
        hay, what, answer = _parts(module, example)
        assert answer == " " + ", ".join(example.references)
        facts = FACT.findall(hay)
        keys = [key for key, _ in facts]
        asked = _asked(what)
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
            hay, what, _ = _parts(module, example)
            size, inserted = len(hay.encode()), sum(len(m[0]) + 1 for m in FACT.finditer(hay))
            places = [m.start() for m in re.finditer(f"The code of {_asked(what)[0]} is".encode(), hay.encode())]
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
            hay = _parts(module, example)[0]
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
        texts = [_parts(module, module.example(split, "single_2", 40_000, i))[0].lower() for i in range(3)]
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


# ---- rows and batches


def _segments(batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    cuts = batch["cu_seqlens"].tolist()
    assert len(cuts) % 16 == 0
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["input_ids"].shape == batch["labels"].shape == (1, cuts[-1])
    pairs = [(a, b) for a, b in zip(cuts, cuts[1:], strict=False) if b > a]
    return [(batch["input_ids"][0, a:b], batch["labels"][0, a:b]) for a, b in pairs]


@pytest.mark.parametrize("loss", ["answer", "all"])
def test_a_row_holds_several_examples_and_no_padding(niah, loss):
    module = niah(seq_len=1000, lengths=[480, 1000, 420], tasks=["single_2", "multivalue"], loss=loss)
    eot = module.tokenizer.eot
    for rows in ([0], [0, 1, 2], [5, 3]):
        batch = module.batch("train", rows)
        assert (batch["n_bytes"], batch["n_words"], batch["n_pairs"]) == (None, None, None)
        segments = _segments(batch)
        sizes = [size for row in rows for size in ([480, 520], [1000], [420, 580])[row % 3]]
        assert [len(ids) for ids, _ in segments] == sizes
        wanted = [example for row in rows for example in module.train_examples(row)]
        for (ids, labels), (task, length, number) in zip(segments, wanted, strict=True):
            example = module.example("train", task, length, number)
            assert ids.tolist() == [*example.prompt_ids, *example.answer_ids, eot]
            labelled = labels != IGNORE
            assert labels[-1] == IGNORE  # nothing is predicted across examples
            assert torch.equal(labels[:-1][labelled[:-1]], ids[1:][labelled[:-1]])
            if loss == "all":
                assert labelled[:-1].all()
            else:
                assert labels[labelled].tolist() == example.answer_ids
                assert labelled.nonzero()[0] == len(example.prompt_ids) - 1


def test_training_shows_every_task_at_every_length_and_nothing_twice(niah):
    module = niah(seq_len=2048, lengths=[512, 2048, 512], tasks=["single_1", "multikey_2", "multiquery"])
    seen = Counter(example for row in range(90) for example in module.train_examples(row))
    assert set(seen.values()) == {1}
    kinds = Counter((task, length) for task, length, _ in seen)
    assert kinds == {(t, n): (80 if n == 512 else 10) for t in module.config.tasks for n in (512, 2048)}


@pytest.mark.parametrize("loss", ["answer", "all"])
def test_evaluation_batches_are_of_one_task_and_length(niah, loss):
    module = niah(seq_len=1024, loss=loss, val_lengths=[512, 4096], val_examples=5, test_lengths=[700], test_examples=2,
                  val_batch_size=2)  # fmt: skip
    assert module.max_seq_len == 4096
    seen = []
    for samples in module.eval_batches("val", 2):
        kinds = [module.eval_example("val", i) for i in samples]
        assert len({(task, length) for task, length, _ in kinds}) == 1
        assert len(samples) * kinds[0][1] <= max(2048, kinds[0][1])
        seen += kinds
    assert Counter(seen) == dict.fromkeys(((t, n, i) for t in TASKS for n in (512, 4096) for i in range(5)), 1)
    batches = list(module.val_dataloader())
    assert len(batches) == 8 * (2 + 5)
    for batch, samples in zip(batches, module.eval_batches("val", 2), strict=True):
        for (_, labels), sample in zip(_segments(batch), samples, strict=True):
            task, length, number = module.eval_example("val", sample)
            answer = module.example("val", task, length, number).answer_ids
            assert labels[labels != IGNORE].tolist() == answer
    assert [batch["input_ids"].shape[1] for batch in module.test_dataloader()] == [1400] * 8
    assert module.eval_example("test", 0) == ("single_1", 700, 0)


def test_exact_match_needs_every_token_of_an_answer(niah, seed):
    module = niah(val_lengths=[600], val_examples=7, val_batch_size=20, seq_len=600)
    batch = next(iter(module.val_dataloader()))
    labels = batch["labels"].flatten()
    places = (labels != IGNORE).nonzero().flatten()
    segments = _segments(batch)
    for _ in range(20):
        wrong = torch.rand(len(places)) < 0.05
        whole = torch.zeros_like(labels, dtype=torch.bool)
        whole[places] = wrong
        expected = [not whole[i * 600 : (i + 1) * 600].any() for i in range(len(segments))]
        assert exact_match(~wrong, places, batch["cu_seqlens"]).tolist() == expected


def test_contained():
    assert contained("It is ABC-1, 77.", ["abc-1", "78", "77", "x"]) == 0.5
    assert contained("it is abc-1", ["ABC-1"]) == 1
    assert contained("", ["1"]) == 0


# ---- preparation and mistakes


def test_the_fingerprint_covers_haystack_tokenizer_and_options(niah, tmp_path):
    (tmp_path / "other.txt").write_text("Another text. " * 2000)
    variants = [
        {}, {"seed": 1}, {"loss": "all"}, {"tasks": ["single_1"]}, {"lengths": [512]}, {"val_lengths": [999]},
        {"test_examples": 3}, {"tokenizer": "bpe"}, {"haystack_options": {"path": str(tmp_path / "other.txt")}},
    ]  # fmt: skip
    prints = [niah(**options).fingerprint for options in variants]
    assert len(set(prints)) == len(variants)
    assert niah(batch_size=3, num_workers=1).fingerprint == prints[0]
    facts = niah(lengths=[512, 600]).describe()
    assert facts["test.haystack tokens"] > 10_000
    assert facts["val"] == "512/600 tokens"


def test_the_second_time_uses_the_cache(niah, monkeypatch):
    first = niah(tokenizer="bpe")
    monkeypatch.setattr("src.data.common.corpus.build", lambda *_: pytest.fail("tokenised again"))
    again = niah(tokenizer="bpe")
    assert again.fingerprint == first.fingerprint
    assert again.example("val", "multiquery", 1024, 2) == first.example("val", "multiquery", 1024, 2)


def test_a_saved_tokenizer_gives_the_same_examples(niah, tmp_path):
    module = niah(tokenizer="bpe")
    module.save_tokenizer(tmp_path)
    again = niah(tokenizer=str(tmp_path / "tokenizer.json"))
    assert again.example("test", "single_3", 900, 0) == module.example("test", "single_3", 900, 0)


@pytest.mark.parametrize("task", TASKS)
def test_every_example_fits_into_the_smallest_length(niah, task):
    for tokenizer in ("bytes", "bpe"):
        module = niah(tokenizer=tokenizer)
        least = module.smallest(task)
        for number in range(200):
            module.example("train", task, least, number)
        message = f"length={least - 1}: {task} needs at least {least} tokens with this tokenizer"
        with pytest.raises(UserError, match=message):
            module.example("train", task, least - 1, 0)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@pytest.mark.parametrize("task", [task for task, kind in TASKS.items() if kind.haystack == "needles"])
def test_the_smallest_length_has_another_line_on_either_side(niah, task, tokenizer):
    module, alone = niah(tokenizer=tokenizer), 0
    for number in range(200):
        for depth in (0.0, 1.0):
            example = module.example("val", task, module.smallest(task), number, depth)
            hay, what, _ = _parts(module, example)
            keys = [key for key, _ in FACT.findall(hay)]
            if len(keys) == 1 and task == "multikey_3":  # UUIDs of uncommonly many tokens
                alone += 1
                continue
            assert len(keys) >= 2
            assert (keys[-1] == _asked(what)[0]) == bool(depth)
            assert example.depth == 1.0 if depth else example.depth < 0.7  # a short line may stand at the end
    assert alone <= 0.03 * 400


def test_shared_options_are_not_offered_for_the_haystack(niah):
    with pytest.raises(UserError, match=r"^unknown key 'data.haystack_options.eots'") as error:
        niah(haystack_options={"eots": "x"})
    allowed = re.search(r"\(allowed in data.haystack_options: (.*)\)", str(error.value))[1].split(", ")
    assert {"path", "split"} <= set(allowed)
    assert not {"tokenizer", "vocab_size", "eot", "cache_dir", "name"} & set(allowed)
    assert "data.haystack_options.eot'" not in str(error.value)


def test_an_impossible_length_is_an_error_at_once(niah, monkeypatch):
    monkeypatch.setattr("src.data.common.corpus.build", lambda *_: pytest.fail("tokenised before the check"))
    module = niah(setup=False, seq_len=100, tasks=["single_1", "multiquery", "multikey_1"])
    begin = time.perf_counter()
    with pytest.raises(UserError, match=r"data.seq_len=100: multiquery needs at least \d+ tokens"):
        module.setup("fit")
    assert time.perf_counter() - begin < 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["multikey1"]}, r"data.tasks=multikey1: unknown; did you mean 'multikey_1'\? \(allowed: single_1"),
        ({"tasks": []}, r"data.tasks=\[\]: name at least one of single_1, "),
        ({"lengths": [2048]}, "data.lengths=2048: longer than a row of data.seq_len=1024"),
        ({"lengths": [1024, 200], "tasks": ["single_1", "multikey_3"]}, "data.lengths=200: multikey_3 needs at least"),
        ({"val_lengths": [20], "tasks": ["single_2"]}, "data.val_lengths=20: single_2 needs at least"),
        ({"test_lengths": [0]}, "data.test_lengths=0: must be at least 1"),
        ({"val_examples": 0}, "data.val_examples=0: must be at least 1"),
        ({"haystack": "txt"}, "unknown data 'txt'.*did you mean 'text'"),
        ({"haystack": "mqar"}, "data.haystack=mqar: is no text corpus"),
        ({"haystack": "niah"}, "data.haystack=niah: is no text corpus"),
        ({"haystack_options": {"pth": "x"}}, r"unknown key 'data.haystack_options.pth'; did you mean .*path"),
        ({"haystack_options": {"tokenizer": "bpe"}}, "data.haystack_options.tokenizer: set data.tokenizer"),
        ({"haystack_options": {}}, "data.haystack_options.path is not set"),
        ({"haystack_options": {"path": "nowhere"}}, "data.haystack_options.path=nowhere: no such file"),
        ({"tokenizer": "byts"}, "data.tokenizer=byts: .*did you mean bytes"),
        ({"loss": "some"}, "data.loss=some: expected one of: answer, all"),
    ],
)
def test_mistakes(niah, options, message):
    with pytest.raises(UserError, match=message) as error:
        niah(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("val", "single1", 1024, 0), "task=single1: unknown; did you mean 'single_1'"),
        (("val", "single_1", 1024, 0, 1.5), r"depth=1.5: must be in \[0, 1\]"),
        (("val", "single_1", 5, 0), "length=5: single_1 needs at least"),
        (("val", "multikey_2", 5_000_000, 0), "length=5000000: more lines than the 38874 different keys"),
    ],
)
def test_mistakes_of_a_call(niah, call, message):
    with pytest.raises(UserError, match=message):
        niah().example(*call)


def test_examples_take_milliseconds(niah):
    module = niah(tokenizer="bpe")
    for task in TASKS:
        module.example("train", task, 2048, 0)
        times = []
        for number in range(3):
            begin = time.perf_counter()
            module.example("train", task, 131_072, number)
            times.append(time.perf_counter() - begin)
        print(f"{task} of 131,072 tokens: {1e3 * min(times):.1f} ms")
        assert min(times) < (0.05 if TASKS[task].haystack != "needles" else 1)


def _foreign(path: Path, text: str, kind: str) -> str:
    """A tokenizer.json of another make: words with a sign for the space before them, or line ends inside a token."""
    core = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=kind == "metaspace"))
    alphabet = [f"<0x{i:02X}>" for i in range(256)] if kind == "metaspace" else pre_tokenizers.ByteLevel.alphabet()
    if kind == "metaspace":
        core.pre_tokenizer = pre_tokenizers.Metaspace()
        core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    else:
        pattern = tokenizers.Regex(r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), byte_level])
        core.decoder = decoders.ByteLevel()
    special = ["<unk>", "<eos>", *(alphabet if kind == "metaspace" else [])]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False,
                                  initial_alphabet=[] if kind == "metaspace" else alphabet)  # fmt: skip
    core.train_from_iterator([text * 3, "\n".join(map(str, range(1000, 3000)))], trainer)
    core.save(str(path))
    return str(path)


@pytest.mark.parametrize("kind", ["metaspace", "line ends inside"])
def test_tokenizers_of_another_make(niah, tmp_path, seed, kind):
    text = _sentences(random.Random(seed), 5000, "the code of a stone is in quick amber-tree") + UUID
    module = niah(tokenizer=_foreign(tmp_path / "tokenizer.json", text, kind))
    for task in TASKS:
        least = module.smallest(task)
        for number in range(20):
            length = least + 50 * number
            example = module.example("val", task, length, number)
            assert len(example.prompt_ids) + len(example.answer_ids) + 1 == length
            prompt = " ".join(module.tokenizer.decode(example.prompt_ids).split())
            asked = re.search(r"(\S+)\? The codes? of ", prompt)[1]
            facts = FACT.findall(prompt)
            assert (asked, example.references[-1]) in facts
            assert contained(module.tokenizer.decode(example.answer_ids), example.references) == 1
            assert {value for key, value in facts if TASKS[task].n_answers > 1} <= set(example.references)
