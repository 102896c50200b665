"""data=pystdlib: which files, which split, and the real thing once."""

import time
from itertools import islice
from pathlib import Path

import pytest

from src.data.pystdlib import PyStdlib
from src.errors import UserError

CONTENT = {
    "a.py": b"x = 1\n",
    "pkg/latin.py": b"# -*- coding: latin-1 -*-\ns = '\xe9'\n",
    "pkg/broken.py": b"s = '\xff'\n",
    "pkg/windows.py": b"a\r\nb\r\n",
    "pkg/empty.py": b"",
    "pkg/test/skipped.py": b"x",
    "pkg/tests/skipped.py": b"x",
    "site-packages/other/skipped.py": b"x",
    "idlelib/idle_test/skipped.py": b"x",
    "config-3.11/skipped.py": b"x",
    "_sysconfigdata__linux.py": b"x",
    "pkg/data.txt": b"x",
}


def _module(root: Path, **options) -> PyStdlib:
    module = PyStdlib(PyStdlib.Config(**({"name": "pystdlib", "tokenizer": "bytes"} | options)))
    module.root = root
    return module


@pytest.fixture
def library(tmp_path):
    root = tmp_path / "python3"
    for name, content in CONTENT.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    for i in range(200):
        (root / f"m{i}.py").write_text(f"value = {i}\n" * (1 + i % 5))
    return root


def test_files_and_encodings(library):
    module = _module(library)
    taken = [path for path in module._files if not path.startswith("m")]
    assert taken == ["a.py", "pkg/broken.py", "pkg/empty.py", "pkg/latin.py", "pkg/windows.py"]
    documents = {document for split in ("train", "val", "test") for document in module.documents(split)}
    assert {"s = '\ufffd'\n", "# -*- coding: latin-1 -*-\ns = 'é'\n", "a\nb\n"} <= documents


def test_splits_are_disjoint_and_decided_by_the_relative_path(library, tmp_path):
    module = _module(library)
    parts = {split: {p for p in module._files if module.split_of(p) == split} for split in ("train", "val", "test")}
    assert sum(map(len, parts.values())) == len(module._files)
    assert all(parts.values())
    before = module.fingerprint
    moved = library.rename(tmp_path / "elsewhere")
    assert _module(moved).fingerprint == before
    (moved / "a.py").write_text("x = 2\n")
    assert _module(moved).fingerprint != before


def test_no_sources_is_one_error(tmp_path):
    with pytest.raises(UserError, match=r"no Python sources in .*data=text"):
        _module(tmp_path).prepare_data()


def test_a_file_that_cannot_be_read_is_named(library):
    (library / "dangling.py").symlink_to(library / "nowhere")
    with pytest.raises(UserError, match=r"dangling.py cannot be read \(No such file"):
        _module(library).prepare_data()


@pytest.mark.slow
def test_the_real_library(tmp_path):
    """About ten seconds on two free cores, three of them for the tokenizer."""
    times = []
    for _ in range(2):
        options = {"cache_dir": str(tmp_path), "seq_len": 256, "batch_size": 16, "val_rows": None}
        module = PyStdlib(PyStdlib.Config(name="pystdlib", **options))
        start = time.perf_counter()
        module.setup("fit")
        times.append(time.perf_counter() - start)
    facts = module.describe()
    print(times, facts)
    assert times[1] < 2
    assert facts["vocabulary"] == 8192
    total = sum(facts[f"{split}.bytes"] for split in ("train", "val", "test"))
    assert 8e6 < total < 16e6
    assert 0.02 < facts["val.bytes"] / total < 0.1
    assert 0.02 < facts["test.bytes"] / total < 0.1
    for batch in islice(module.train_dataloader(), 10):
        assert batch["input_ids"].shape == (1, 16 * 256)
        assert batch["input_ids"].max() < 8192
    n_bytes = sum(batch["n_bytes"] for batch in module.val_dataloader())
    assert n_bytes == pytest.approx(facts["val.bytes"], rel=1e-6)
    source = (module.root / "argparse.py").read_text(encoding="utf-8")
    assert module.tokenizer.decode(module.tokenizer.encode(source)) == source
