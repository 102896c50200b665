"""Tables of text in files, and what data=hub makes of them: for the tests of local tables and of the Hub."""

import gzip
import json
from pathlib import Path

import pyarrow
from pyarrow import parquet

from src.data.hub import Hub

SPLITS = ("train", "val", "test")


def module_of(tmp_path: Path, **options) -> Hub:
    defaults = dict(name="hub", cache_dir=str(tmp_path / "cache"), tokenizer="bytes")
    return Hub(Hub.Config(**(defaults | options)))


def documents_of(module: Hub) -> dict[str, list[str]]:
    """What the splits hold, from the tokens."""
    module.setup("fit")
    found = {}
    for split in SPLITS:
        stream = module._streams[split]
        ends = stream.starts.tolist()
        parts = zip(ends, ends[1:], strict=False)
        found[split] = [module.tokenizer.decode(stream.tokens[begin + 1 : end]) for begin, end in parts]
    return found


def all_texts(module: Hub) -> list[str]:
    return [document for _, document in module.all_documents()]


def jsonl(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=40)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(jsonl(rows[:70])) + gzip.compress(jsonl(rows[70:])))
    elif path.suffix == ".zst":
        with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
            file.write(jsonl(rows))
    else:
        path.write_bytes(json.dumps(rows, indent=1).encode() if path.suffix == ".json" else jsonl(rows))
    return path


def texts_of(rows: list[dict]) -> list[str]:
    return [row["text"] for row in rows if row["text"]]
