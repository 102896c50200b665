"""Small files that must be whole: YAML in, text and JSON out."""

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml

from src.errors import UserError
from src.options import one_line, show


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping (or nothing), as plain values. Raises UserError, of one line."""
    try:
        plain = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error
    if plain is None:
        return {}
    if not isinstance(plain, dict):
        raise UserError(f"{path}: expected a mapping of options, found {show(plain)}")
    return plain


def to_yaml(plain: dict[str, Any]) -> str:
    """Plain values as YAML in the order of declaration; `read_yaml` gives the same values back."""
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def write_text(path: Path, text: str) -> None:
    """Writes the file whole or not at all: a reader, or a crash, never meets half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Writes JSON, whole or not at all; NaN and infinities, which JSON does not know, become null."""
    write_text(path, json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _UniqueKeys(yaml.SafeLoader):
    """YAML's own rule that a key stands once, which PyYAML does not hold."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"key {key!r} stands twice in the block at line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)
