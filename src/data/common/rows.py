"""Tables of text in local files: JSON Lines (plain, .gz, .zst), JSON arrays, Parquet. A row's text is a document.

Read as a stream by what is a dependency anyway (pyarrow decompresses); only a .json file that is one array is
read whole.
"""

import io
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from src.data.common.files import DataError, reading
from src.errors import UserError
from src.options import nearest

JSON = tuple(kind + packed for kind in (".jsonl", ".json") for packed in ("", ".gz", ".zst"))
TABLES = (*JSON, ".parquet")
ROWS = 64  # read at once: a row may be a book


def kind(path: Path) -> str | None:
    """ "json", "parquet" or "txt", by the file's name; None for another."""
    name = path.name.lower()
    kinds = {"json": JSON, "parquet": ".parquet", "txt": ".txt"}
    return next((kind for kind, endings in kinds.items() if name.endswith(endings)), None)


def choose_column(names: Sequence[str], texts: Sequence[str], given: str | None, origin: str) -> str:
    """The column of a table that documents are taken from: the given one, else `text`, else the only text."""
    if given is not None:
        if given in names:
            return given
        raise UserError(f"data.column={given}: {origin} has the columns {', '.join(names)}{nearest(given, names)}")
    if "text" in names:
        return "text"
    if len(texts) == 1:
        return texts[0]
    raise UserError(f"data.column is not set, and {origin} has no column text: name one of {', '.join(texts or names)}")


def columns(path: Path) -> tuple[list[str], list[str]]:
    """All columns of a file, and those that hold text. A JSON file's are those of its first rows."""
    if kind(path) == "parquet":
        schema = _parquet(path).schema_arrow
        return schema.names, [field.name for field in schema if _is_text(field.type)]
    found: dict[str, bool] = {}
    for row in islice(_json_rows(path), ROWS):
        for name, value in row.items():
            found[name] = found.get(name, False) or isinstance(value, str)
    return list(found), [name for name, text in found.items() if text]


def check_column(path: Path, column: str) -> None:
    """Raises UserError where a file is known not to have texts in that column without reading it: Parquet."""
    if kind(path) != "parquet":
        return
    schema = _parquet(path).schema_arrow
    if column not in schema.names:
        raise UserError(f"{path} is no Parquet file with a column {column!r} (it has {schema.names})")
    found = schema.field(column).type
    if not _is_text(found) and str(found) != "null":  # null: rows without text
        raise UserError(f"data.column={column} is no text ({path} holds {_one_line(found)})")


def _is_text(kind: Any) -> bool:
    """Of a type of pyarrow; a dictionary's is that of its values."""
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def texts(path: Path, column: str) -> Iterator[str]:
    """The column's texts, empty ones for rows without. Raises UserError that names file and row."""
    table = kind(path) == "parquet"
    values = _parquet_column(path, column) if table else (row.get(column) for row in _json_rows(path))
    for number, value in enumerate(values, 1):
        yield as_text(value, column, f"{path}, row {number}")


def as_text(value: Any, column: str, origin: str) -> str:
    """A value of a table as a text: none is an empty one, half a surrogate pair (JSON can hold it) is U+FFFD."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"data.column={column} is no text ({origin} holds a {type(value).__name__})")
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def text_size(path: Path, column: str | None) -> int | None:
    """Bytes of text in a file, about; None where that is not known without reading."""
    if kind(path) == "parquet":
        metadata = _parquet(path).metadata
        chunks = (
            metadata.row_group(i).column(j) for i in range(metadata.num_row_groups) for j in range(metadata.num_columns)
        )
        return sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)
    return path.stat().st_size if path.name.lower().endswith((".json", ".jsonl", ".txt")) else None


def _parquet(path: Path) -> Any:
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no Parquet file ({_one_line(error)})") from error


def _parquet_column(path: Path, column: str) -> Iterator[Any]:
    check_column(path, column)
    file = _parquet(path)
    try:
        for batch in file.iter_batches(batch_size=ROWS, columns=[column]):
            yield from batch.column(column).to_pylist()
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is damaged ({_one_line(error)})") from error


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow

    with reading(path), pyarrow.input_stream(str(path), compression="detect") as stream:
        lines = io.BufferedReader(stream, 1 << 20)
        if ".json" in path.suffixes and lines.peek(64).lstrip()[:1] == b"[":
            rows = enumerate(_parsed(lines.read(), str(path)), 1)
        else:
            rows = ((i, _parsed(line, f"{path}, line {i}")) for i, line in enumerate(lines, 1) if line.strip())
        for number, row in rows:
            if not isinstance(row, dict):
                raise DataError(f"{path}, row {number}: a {type(row).__name__}, not an object with columns")
            yield row


def _parsed(content: bytes, origin: str) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise DataError(f"{origin}: not JSON, one object a line ({_one_line(error)})") from error


def _one_line(what: object) -> str:
    return " ".join(str(what).split())[:160]
