"""Typed options: from text or plain YAML values to dataclasses, with one-line errors that name the key.

OmegaConf does the type checks, one field at a time. Its own messages span several lines and leave out the key
for tuples, so every failure is worded here: key, value, what is allowed.
"""

import dataclasses
import difflib
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Union

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from src.errors import UserError

# OmegaConf reads "${" as an interpolation and "???" as a missing value; a prompt or a path may hold either.
_SHIELDS = (("${", "\0{"), ("???", "\0?"))
_MESSAGE_LIMIT = 80


class Unreadable(ValueError):
    """Text that stands for no value of the type asked for."""


def nearest(word: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" for the closest of the known words, or an empty string."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def one_line(text: object) -> str:
    """The text on one line: runs of white space become one blank."""
    return " ".join(str(text).split())


def show(value: object) -> str:
    """A value as it is written on the command line, cut to a readable length."""
    text = one_line("null" if value is None else value)
    return text if len(text) <= _MESSAGE_LIMIT else text[: _MESSAGE_LIMIT - 3] + "..."


def type_hints(cls: type) -> dict[str, Any]:
    """The resolved type of every field of a dataclass, in the order of declaration.

    Raises UserError for a class whose annotations are options by intent only, for want of `@dataclass`.
    """
    for base in cls.__mro__:
        if inspect.get_annotations(base) and "__dataclass_fields__" not in vars(base):
            raise UserError(f"{base.__module__}.{base.__qualname__} declares options but lacks @dataclass")
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def members(hint: Any) -> tuple[Any, ...]:
    """The members of a union, None left out; a type that is no union is its only member."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return tuple(m for m in typing.get_args(hint) if m is not type(None))
    return (hint,)


def is_optional(hint: Any) -> bool:
    return hint is None or type(None) in typing.get_args(hint)


def kind_of(hint: Any) -> Any:
    """`list`, `tuple` or `dict` for (optional) containers; the type itself for the rest."""
    inner = members(hint)
    return (typing.get_origin(inner[0]) or inner[0]) if len(inner) == 1 else hint


def describe(hint: Any) -> str:
    """What is allowed, in words: "an integer", "one of: a, b", "a list of numbers"."""
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text", Any: "any value"}
    parts = [words[m] if m in words else _describe_generic(m) for m in members(hint)]
    return " or ".join(parts + ["null"] * is_optional(hint))


def _describe_generic(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        values = ", ".join(str(a) for a in args)
        return f"one of: {values}" if len(args) > 1 else values
    if origin is list:
        return f"a list, each element {describe(args[0])}"
    if origin is tuple and args[-1] is not Ellipsis:
        return f"{len(args)} values ({', '.join(describe(a) for a in args)})"
    if origin is tuple:
        return f"a list, each element {describe(args[0])}"
    if origin is dict:
        return "a mapping"
    return getattr(hint, "__name__", str(hint))


def short(hint: Any) -> str:
    """The type as Python writes it: `int | null`, `documents | concatenate`, `list[str]`."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return " | ".join([short(m) for m in members(hint)] + ["null"] * is_optional(hint))
    if typing.get_origin(hint) is Literal:
        return " | ".join(str(a) for a in typing.get_args(hint))
    if typing.get_origin(hint):
        inner = ", ".join("..." if a is Ellipsis else short(a) for a in typing.get_args(hint))
        return f"{typing.get_origin(hint).__name__}[{inner}]"
    return getattr(hint, "__name__", str(hint))


def from_text(text: str, hint: Any) -> Any:
    """What the text of `key=text` stands for, given the key's type; raises Unreadable if it is nothing.

    Text stays as it is for `str`. `null` and `none` are None where that is allowed. A list is `a,b` or
    `[a,b]` (quotes as in YAML keep a comma). Numbers are left to OmegaConf; mappings are read as YAML.
    """
    for member in members(hint):
        if typing.get_origin(member) is Literal:
            for value in typing.get_args(member):
                if str(value) == text:
                    return value
    if is_optional(hint) and text.lower() in ("null", "none", "~"):
        return None
    kind = kind_of(hint)
    if kind in (list, tuple):
        return _list_from_text(text, hint)
    if kind is dict or kind is Any:
        return _yaml(text, yaml.SafeLoader)
    if not text and kind is not str:
        raise Unreadable("the value is missing")
    if len(members(hint)) > 1:
        return _scalar_from_text(text, members(hint))
    return text


def _scalar_from_text(text: str, kinds: tuple[Any, ...]) -> Any:
    """The text as the first of bool, int, float that the union allows and that it reads as, or as it is."""
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for scalar in (int, float):
        if scalar in kinds:
            try:
                return scalar(text)
            except ValueError:
                continue
    return text


def _list_from_text(text: str, hint: Any) -> list[Any]:
    if text.startswith("[") != text.endswith("]"):
        raise Unreadable("a bracket is not closed")
    if text.startswith("["):
        parts = _yaml(text, yaml.BaseLoader)  # every scalar stays text: the element's type decides
        if not isinstance(parts, list):
            raise Unreadable("not a list")
    elif not text:
        raise Unreadable("the value is missing (an empty list is [])")
    else:
        parts = [part.strip() for part in text.split(",")]
    args = typing.get_args(members(hint)[0]) or (Any,)
    fixed = len(args) == len(parts) and Ellipsis not in args
    elements = args if fixed else (args[0],) * len(parts)
    return [from_text(p, e) if isinstance(p, str) else p for p, e in zip(parts, elements, strict=True)]


def _yaml(text: str, loader: Any) -> Any:
    try:
        return yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        raise Unreadable("it cannot be read as YAML") from error


def coerce(value: Any, hint: Any, key: str, origin: str = "") -> Any:
    """The value as the type `hint` holds it; raises a one-line UserError that names the key otherwise.

    `origin` is where the value was written ("configs/experiment/x.yaml"); empty for the command line.
    Text is read by `from_text`, so that a quoted "4" of a YAML file and `key=4` mean the same.
    """
    reason = ""
    if kind_of(hint) in (list, tuple) and isinstance(value, int | float) and not isinstance(value, bool):
        value = [value]  # `lengths=2048` inside a mapping was read as a number already
    try:
        typed = _checked(from_text(value, hint) if isinstance(value, str) else value, hint)
        if not (isinstance(typed, float) and math.isnan(typed)):
            return typed
    except Unreadable as error:
        reason = f"{error}, "
    except (OmegaConfBaseException, ValueError, TypeError):
        pass  # the message below says all that OmegaConf's does, and the key
    literals = [str(v) for m in members(hint) if typing.get_origin(m) is Literal for v in typing.get_args(m)]
    near = nearest(str(value), literals)
    place = f"{origin}: " if origin else ""
    raise UserError(f"{place}{key}={show(value)}: {reason}expected {describe(hint)}{near}")


def _checked(value: Any, hint: Any) -> Any:
    holder = dataclasses.make_dataclass("Holder", [("value", hint)])
    plain = _map_text(value, lambda text: _replace(text, _SHIELDS))
    merged = OmegaConf.merge(OmegaConf.structured(holder), {"value": plain})
    typed = OmegaConf.to_object(merged).value
    return _map_text(typed, lambda text: _replace(text, [(b, a) for a, b in _SHIELDS]))


def _replace(text: str, pairs: Iterable[tuple[str, str]]) -> str:
    for old, new in pairs:
        text = text.replace(old, new)
    return text


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {k: _map_text(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_text(v, change) for v in value)
    return value


def build(
    cls: type,
    values: Mapping[str, Any],
    where: str = "",
    *,
    types: Mapping[str, type] | None = None,
    origins: Mapping[str, str] | None = None,
) -> Any:
    """An instance of the dataclass from plain values; nested dataclasses are built from nested mappings.

    `where` is the dotted key of the whole ("mixer"; "" for the top). By dotted key, `types` replaces the
    declared class of a section (by the chosen plugin's), `origins` says where a value was written. Raises
    UserError for an
    unknown key, a wrong type, a missing value, and for what a `__post_init__` refuses.
    """
    hints, prefix = type_hints(cls), f"{where}." if where else ""
    for key in values:
        if key not in hints:
            names = [h for h in hints if h != "name"]
            raise UserError(unknown_key(f"{prefix}{key}", [prefix + n for n in names], names, where))
    kwargs = {}
    for field in dataclasses.fields(cls):
        key = prefix + field.name
        hint = (types or {}).get(key, hints.get(field.name))
        if dataclasses.is_dataclass(hint):
            kwargs[field.name] = build(hint, values.get(field.name) or {}, key, types=types, origins=origins)
        elif field.name in values:
            kwargs[field.name] = coerce(values[field.name], hint, key, (origins or {}).get(key, ""))
        elif field.init and not has_default(field):
            raise UserError(f"{key} is required: give {key}=<{short(hint)}>")
    try:
        return cls(**kwargs)
    except ValueError as error:
        raise UserError(f"{where}: {one_line(error)}" if where else one_line(error)) from error


def has_default(field: dataclasses.Field) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def default_of(field: dataclasses.Field) -> Any:
    return field.default if field.default is not dataclasses.MISSING else field.default_factory()


def unknown_key(key: str, known: Iterable[str], allowed: Iterable[str], where: str = "") -> str:
    """The message for a key that no option has: the nearest one, and what its section `where` allows."""
    known, allowed = list(known), list(allowed)
    last = key.rpartition(".")[2]
    same_end = [k for k in known if k.rpartition(".")[2] == last]
    # By the last part: what all keys of a section begin with makes strangers look alike.
    alike = [k for k in known if difflib.SequenceMatcher(None, last, k.rpartition(".")[2]).ratio() > 0.7]
    near = f"; did you mean {same_end[0]!r}?" if same_end else nearest(key, alike)
    inside = f" in {where}" if where else ""
    return f"unknown key {key!r}{near} (allowed{inside}: {', '.join(allowed) or 'none'})"


def asdict(config: Any) -> Any:
    """A dataclass as plain dicts, lists, numbers and text only: what checkpoints and YAML files hold."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: asdict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {str(k): asdict(v) for k, v in config.items()}
    if isinstance(config, list | tuple):
        return [asdict(v) for v in config]
    return config
