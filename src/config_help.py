"""The text of `--help`: every option of the chosen plugins, with its type, default and docstring."""

import ast
import dataclasses
import inspect
import sys
import textwrap
from itertools import pairwise
from typing import Any

from src.compose import Resolved, available, groups
from src.options import asdict, coerce, default_of, has_default, short, type_hints

_WIDTH = 98


def render(resolved: Resolved) -> str:
    """What `--help` prints: choices of each group, then options, plain ones first and then by section."""
    schema = resolved.schema
    entry = getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", None) or "<program>"
    lines = [
        inspect.cleandoc(schema.__doc__ or ""),
        "",
        f"usage: python -m {entry} [key=value ...] [--help] [--cfg]",
    ]
    lines += ["", "--help shows this text, --cfg prints the composed options as YAML.", ""]
    choices = {g: available(g, r, resolved.configs) for g, r in groups(schema).items()}
    if choices:
        choices["experiment"] = available("experiment", None, resolved.configs)
        lines.append("choices:")
        for group, names in choices.items():
            lines += _wrap(f"  {group + '=':<12}", ", ".join(names) or "(none)")
        lines.append("")
    plain, sections = [], []
    for name, hint in type_hints(schema).items():
        section = resolved.section(name, hint)
        if section:
            chosen = f" ({name}={resolved.choices[name]})" if resolved.choices.get(name) else ""
            sections += [f"{name}{chosen}:", *_section(resolved, section, f"{name}."), ""]
        else:
            plain += _entry(resolved, schema, name, hint, name)
    if plain:
        lines += ["options:", *plain, ""]
    return "\n".join([*lines, *sections]).rstrip() + "\n"


def docstrings(cls: type) -> dict[str, str]:
    """The string literal under each attribute of a dataclass, by the attribute's name; a subclass's wins."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):
            continue  # typed into an interpreter: there is no source to read
        body = ast.parse(source).body[0].body
        for attribute, text in pairwise(body):
            if not (isinstance(attribute, ast.AnnAssign) and isinstance(attribute.target, ast.Name)):
                continue
            if (
                isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                found[attribute.target.id] = " ".join(text.value.value.split())
    return found


def _section(resolved: Resolved, cls: type, prefix: str) -> list[str]:
    lines = []
    for name, hint in type_hints(cls).items():
        inner = resolved.section(prefix + name, hint)
        if inner:
            lines += _section(resolved, inner, f"{prefix}{name}.")
        elif not (name == "name" and prefix.rstrip(".") in groups(resolved.schema)):
            lines += _entry(resolved, cls, name, hint, prefix + name)
    return lines


def _entry(resolved: Resolved, cls: type, name: str, hint: Any, key: str) -> list[str]:
    text = docstrings(cls).get(name, "")
    value = _value(resolved, cls, name, hint, key)
    return [*_wrap(f"  {key}: {short(hint)} ", value), *_wrap("      ", text)]


def _value(resolved: Resolved, cls: type, name: str, hint: Any, key: str) -> str:
    """What the option is if nothing more is given: from the layers, or from the dataclass."""
    place: Any = resolved.values
    for part in key.split("."):
        place = place.get(part, dataclasses.MISSING) if isinstance(place, dict) else dataclasses.MISSING
    if place is not dataclasses.MISSING:
        return "= " + _text(coerce(place, hint, key, resolved.origins.get(key, "")))
    field = next(f for f in dataclasses.fields(cls) if f.name == name)
    return f"= {_text(default_of(field))}" if has_default(field) else "(required)"


def _text(value: Any) -> str:
    plain = asdict(value)
    if isinstance(plain, list):
        return "[" + ", ".join(_text(v) for v in plain) + "]"
    if isinstance(plain, dict):
        return "{" + ", ".join(f"{k}: {_text(v)}" for k, v in plain.items()) + "}"
    words = {None: "null", True: "true", False: "false", "": "(empty)"}
    return words[plain] if plain is None or isinstance(plain, bool) or plain == "" else repr(plain).strip("'\"")


def _wrap(head: str, text: str) -> list[str]:
    """The text behind its head, on lines of at most 98 columns."""
    if not text:
        return []
    indent = " " * max(6, min(len(head), 16))
    return textwrap.wrap(head + text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
