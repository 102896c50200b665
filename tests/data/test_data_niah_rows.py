"""data=niah as a data module: rows of several examples, evaluation batches, preparation and mistakes."""

import random
import re
import time
from collections import Counter
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from src.data import IGNORE
from src.data.common.needles import TASKS, contained
from src.errors import UserError
from src.metrics import exact_match
from tests.needles import asked_keys, parts, sentences

TEXT = [task for task, kind in TASKS.items() if kind.haystack == "text"]
FACT = re.compile(r"The code of ([a-z0-9-]+) is ([a-f0-9-]+)\.")
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
SPLITS = ("train", "val", "test")


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


def test_short_rows_come_first_and_are_not_shown_again(niah):
    module = niah(seq_len=2048, lengths=[2048, 512, 512], tasks=["single_1", "multiquery"], short_rows=30)
    rows = [module.train_examples(row) for row in range(120)]
    assert all({length for _, length, _ in row} == {512} for row in rows[:30])
    later = Counter(length for row in rows[30:] for _, length, _ in row)
    assert later == {2048: 30, 512: 240}
    assert set(Counter(example for row in rows for example in row).values()) == {1}
    plain = niah(seq_len=2048, lengths=[2048, 512, 512], tasks=["single_1", "multiquery"])
    assert [{length for _, length, _ in plain.train_examples(row)} for row in range(3)] == [{2048}, {512}, {512}]


@pytest.mark.parametrize("loss", ["answer", "all"])
def test_evaluation_batches_are_of_one_task_and_length(niah, loss):
    module = niah(seq_len=1024, loss=loss, val_lengths=[512, 4096], val_examples=5, test_lengths=[700], test_examples=2,
                  val_batch_size=2)  # fmt: skip
    assert module.max_seq_len == 1024  # trained, not only measured
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
        {"test_examples": 3}, {"short_rows": 4}, {"tokenizer": "bpe"},
        {"haystack_options": {"path": str(tmp_path / "other.txt")}},
    ]  # fmt: skip
    prints = [niah(**options).fingerprint for options in variants]
    assert len(set(prints)) == len(variants)
    assert niah(batch_size=3, num_workers=1).fingerprint == prints[0]
    facts = niah(lengths=[512, 600]).describe()
    assert facts["test.haystack tokens"] > 10_000
    assert facts["train"] == facts["val"] == "512/600 tokens"
    facts = niah(lengths=[600, 512], short_rows=1000).describe()
    assert facts["train"] == "1,000 rows of 512, then 600/512 tokens"
    assert facts["val"] == "600/512 tokens"


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
            hay, what, _ = parts(module, example)
            keys = [key for key, _ in FACT.findall(hay)]
            if len(keys) == 1 and task == "multikey_3":  # UUIDs of uncommonly many tokens
                alone += 1
                continue
            assert len(keys) >= 2
            assert (keys[-1] == asked_keys(what)[0]) == bool(depth)
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
    with pytest.raises(UserError, match=r"data.seq_len=100: multiquery needs at least \d+ tokens") as error:
        module.setup("fit")
    assert time.perf_counter() - begin < 0.5
    assert "there is room for" not in str(error.value)


def test_tasks_with_room_are_named_and_have_it(niah):
    tasks = ["single_1", "multikey_3", "single_2", "multiquery"]
    with pytest.raises(UserError, match=r"multiquery needs .*; there is room for ") as error:
        niah(setup=False, seq_len=300, tasks=tasks).setup("fit")
    fitting = str(error.value).rpartition("room for ")[2].split(", ")
    assert set(fitting) < set(tasks)
    module = niah(seq_len=300, tasks=fitting)
    assert max(map(module.smallest, fitting)) <= 300 < min(module.smallest(task) for task in {*tasks} - {*fitting})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["multikey1"]}, r"data.tasks=multikey1: unknown; did you mean 'multikey_1'\? \(allowed: single_1"),
        ({"tasks": []}, r"data.tasks=\[\]: name at least one of single_1, "),
        ({"lengths": [2048]}, "data.lengths=2048: longer than a row of data.seq_len=1024"),
        ({"lengths": [1024, 200], "tasks": ["single_1", "multikey_3"]}, "data.lengths=200: multikey_3 needs at least"),
        ({"short_rows": -1}, "data.short_rows=-1: must be at least 0"),
        ({"val_lengths": [20], "tasks": ["single_2"]}, "data.val_lengths=20: single_2 needs at least"),
        ({"test_lengths": [0]}, "data.test_lengths=0: must be at least 1"),
        ({"val_examples": 0}, "data.val_examples=0: must be at least 1"),
        ({"haystack": "txt"}, "data.haystack=txt: unknown; did you mean 'text'"),
        ({"haystack": "mqar"}, "data.haystack=mqar: is no text corpus"),
        ({"haystack": "prse"}, "^data.haystack=prse: unknown; did you mean 'prose'"),
        ({"haystack_options": {"seq_len": 64}}, "^unknown key 'data.haystack_options.seq_len'"),
        ({"haystack_options": {"carry_state": True}}, "^unknown key 'data.haystack_options.carry_state'"),
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
    text = sentences(random.Random(seed), 5000, "the code of a stone is in quick amber-tree") + UUID
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
