"""Small corpora and stand-ins for the data tests."""

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from src.data import DataModule
from src.data.common.corpus import Corpus
from src.data.niah import Niah
from src.data.text import Text
from src.registry import DATA, build_options
from tests.needles import sentences

WORDS = "state level gate chunk Übung token — scan\tdelta 漢字 merge, naïve (decay) 42 = e^x é🙂 mask".split(" ")  # noqa: SIM905


@pytest.fixture
def prose(seed: int) -> Callable[[int], str]:
    """Random text of about n characters: several lines, several alphabets."""
    rng = random.Random(seed)

    def make(n: int) -> str:
        parts, size = [], 0
        while size < n:
            parts.append(rng.choice(WORDS) + rng.choice([" ", " ", " ", "\n", "  ", "\n\n"]))
            size += len(parts[-1])
        return "".join(parts)[:n]

    return make


@pytest.fixture
def text(tmp_path: Path) -> Callable[..., Text]:
    """A prepared Text module of these files (name -> content) with its own cache."""

    def make(files: dict[str, str | bytes], seed: int = 0, micro: int | None = None, **options) -> Text:
        folder = tmp_path / "corpus"
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        defaults = dict(name="text", path=[str(folder)], cache_dir=str(tmp_path / "cache"), tokenizer="bytes")
        module = Text(Text.Config(**(defaults | options)), seed=seed, micro_batch_size=micro)
        module.setup("fit")
        return module

    return make


@pytest.fixture
def attach() -> Callable[..., DataModule]:
    """The same module as a rank of a run sees it at a step."""

    def make(module: DataModule, world: int = 1, rank: int = 0, step: int = 0) -> DataModule:
        device = SimpleNamespace(root_device=torch.device("cpu"))
        module.trainer = SimpleNamespace(world_size=world, global_rank=rank, global_step=step, strategy=device)
        return module

    return make


class Documents(Corpus):
    """A corpus given as lists of strings."""

    splits: dict[str, list[str]]
    asked = 0

    def documents(self, split):
        type(self).asked += 1
        return iter(self.splits[split])

    def content_hash(self):
        return hashlib.sha256(repr(self.splits).encode()).hexdigest()


@pytest.fixture
def corpus(tmp_path: Path) -> Callable[..., Documents]:
    """A prepared corpus of these documents; validation and test may be left out."""

    def make(train, val=("v",), test=(), seed: int = 0, micro: int | None = None, setup=True, **options) -> Documents:
        defaults = dict(name="documents", cache_dir=str(tmp_path / "cache"), tokenizer="bytes")
        module = Documents(Corpus.Config(**(defaults | options)), seed=seed, micro_batch_size=micro)
        module.splits = {"train": list(train), "val": list(val), "test": list(test)}
        if setup:
            module.setup("fit")
        return module

    return make


@pytest.fixture
def niah(tmp_path: Path, seed: int):
    """A prepared module on a small corpus whose splits have words of their own."""
    rng = random.Random(seed)
    folder = tmp_path / "text"
    folder.mkdir()
    for split, words in zip(("train", "val", "test"), ("apple tree", "stone river", "cloud rain"), strict=True):
        for i in range(3):
            (folder / f"{split}{i}.txt").write_text(sentences(rng, 4000, words))

    def make(seed: int = 0, setup: bool = True, **options) -> Niah:
        paths = dict(
            zip(
                ("path", "val_path", "test_path"),
                ([f"{folder}/{s}*.txt"] for s in ("train", "val", "test")),
                strict=True,
            )
        )
        defaults = dict(haystack="text", haystack_options=paths, tokenizer="bytes", cache_dir=str(tmp_path / "cache"))
        cls = DATA.get("niah")
        module = cls(build_options(cls, {"vocab_size": 600, "seq_len": 1024} | defaults | options, "data"), seed=seed)
        if setup:
            module.setup("fit")
        return module

    return make


@pytest.fixture
def rows(seed: int) -> list[dict]:
    """Rows of a table; some without text. No two texts are the same."""
    rng = random.Random(seed)
    made = [{"text": f"{i} é " + "word\n" * rng.randrange(1, 60), "id": i, "meta": {"a": [i]}} for i in range(150)]
    made.insert(rng.randrange(150), {"text": "", "id": -1, "meta": {"a": [0]}})
    made.insert(rng.randrange(150), {"text": None, "id": -2, "meta": {"a": [0]}})
    return made
