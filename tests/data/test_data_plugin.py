"""The data registry: every choice constructs, and a new one is one file."""

from itertools import islice
from pathlib import Path

import pytest
import torch

from src.data import DataModule
from src.errors import UserError
from src.registry import DATA, build_options, load_file

PLUGIN = Path(__file__).parents[1] / "plugins" / "copy_task.py"


def test_the_choices():
    assert {"pystdlib", "prose", "text", "wikitext", "hub", "mqar", "niah"} <= set(DATA.names())
    for name in DATA.names():
        cls = DATA.get(name)
        assert issubclass(cls, DataModule)
        options = build_options(cls, {"seq_len": 128, "batch_size": 8}, "data")
        module = cls(options, seed=1, micro_batch_size=2)
        assert (module.config.name, module.accumulation) == (name, 4)
        assert module.max_seq_len >= 128


def test_a_plugin_of_one_file():
    load_file(PLUGIN)
    cls = DATA.get("copy_task")
    module = cls(build_options(cls, {"batch_size": 6, "val_batch_size": 30}, "data"), micro_batch_size=3)
    assert module.vocab_size == 9
    batches = list(islice(module.train_dataloader(), 4))
    assert all(batch["input_ids"].shape == (3, 32) for batch in batches)
    ids, labels = batches[1]["input_ids"], batches[1]["labels"]
    assert torch.equal(labels[:, 16:], ids[:, :16])
    assert torch.equal(module.batch("train", range(6))["input_ids"], torch.cat([b["input_ids"] for b in batches[:2]]))
    assert [len(b["labels"]) for b in module.val_dataloader()] == [30, 30, 30, 10]
    with pytest.raises(UserError, match="symbol"):
        build_options(cls, {"symbol": 3}, "data")


def test_a_task_keeps_no_tokenizer(tmp_path):
    cls = DATA.get("mqar")
    cls(cls.Config()).save_tokenizer(tmp_path)
    assert not list(tmp_path.iterdir())


def test_text_keeps_its_tokenizer(text, prose, tmp_path):
    from src.data.common.tokenizer import load_tokenizer

    module = text({"a.txt": prose(5000)}, tokenizer="bpe", vocab_size=300)
    run = tmp_path / "run"
    run.mkdir()
    module.save_tokenizer(run)
    sentence = "state of é"
    assert load_tokenizer(run).encode(sentence) == module.tokenizer.encode(sentence)
