"""Layers of options and how they are laid over each other; `src.config` says which options there are.

A schema is a dataclass. A field with metadata {"group": registry} is a section whose class is the chosen
plugin's `Config`; {"group": None} is a section with presets only.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from src import runs
from src.errors import UserError
from src.files import read_yaml
from src.options import build, coerce, kind_of, nearest, show, type_hints, unknown_key
from src.registry import Registry, load_file

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@dataclass
class Layer:
    """Options from one place, as nested plain values."""

    origin: str
    """The file they are from; empty for the command line."""
    values: dict[str, Any]
    choices: dict[str, str] = field(default_factory=dict)
    """By group, the text of a choice: of a preset or a plugin."""


@dataclass
class Choice:
    """A chosen preset file, plugin, or both."""

    text: str
    plugin: str | None
    preset: Path | None


@dataclass
class Resolved:
    """All layers in one: values by section, where each was written, and the class of every plugin section."""

    schema: type
    configs: Path
    types: dict[str, type] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)

    def build(self) -> Any:
        return build(self.schema, self.values, types=self.types, origins=self.origins)

    def section(self, key: str, hint: Any) -> type | None:
        """The dataclass of a section; None for a plain option."""
        cls = self.types.get(key, hint)
        return cls if dataclasses.is_dataclass(cls) else None

    def keys(self, cls: type | None = None, prefix: str = "") -> list[str]:
        """Every dotted key, in the order of declaration."""
        found = []
        for name, hint in type_hints(cls or self.schema).items():
            section = self.section(prefix + name, hint)
            found += self.keys(section, f"{prefix}{name}.") if section else [prefix + name]
        return found


def groups(schema: type) -> dict[str, Registry | None]:
    return {f.name: f.metadata["group"] for f in dataclasses.fields(schema) if "group" in f.metadata}


def presets(group: str, configs: Path) -> list[str]:
    return sorted(p.stem for p in (configs / group).glob("*.yaml"))


def available(group: str, registry: Registry | None, configs: Path) -> list[str]:
    """The choices of a group: plugins and preset files."""
    return sorted({*presets(group, configs), *(registry.names() if registry else [])})


def resolve(argv: Sequence[str], schema: type, configs: Path) -> Resolved:
    """The layers of a command line, laid over each other. Raises UserError."""
    flat = _parse(argv)
    layers = []
    if groups(schema):
        if (configs / "config.yaml").is_file():
            layers.append(_file_layer(configs / "config.yaml"))
        if (experiment := flat.pop("experiment", None)) is not None:
            layers.append(_file_layer(_experiment(experiment, configs)))
    choices = {group: flat.pop(group) for group in groups(schema) if group in flat}
    layers.append(Layer("", _nest(flat), choices))
    if groups(schema) and (saved := _saved_layer(layers)):
        layers.insert(-1, saved)
    elif groups(schema) and (start := _start_layer(layers)):
        layers.insert(-1, start)
    return resolve_layers(layers, schema, configs)


def resolve_layers(layers: Sequence[Layer], schema: type, configs: Path) -> Resolved:
    """The layers, weakest first, laid over each other; each begins with the presets that it chooses."""
    layers = deepcopy(list(layers))  # choices are taken out of them below
    result = Resolved(schema, configs)
    _load_plugins(layers, schema)
    chosen = [_take_choices(layer, schema, configs) for layer in layers]
    for group, registry in groups(schema).items():
        picks = [c[group] for c in chosen if group in c]
        if registry is None:
            result.choices[group] = picks[-1].text if picks else ""
            continue
        if not picks:
            options = ", ".join(available(group, registry, configs))
            raise UserError(f"{group} is not chosen: give {group}=<name> (available: {options})")
        result.choices[group] = picks[-1].text
        plugin = picks[-1].plugin
        result.types[group] = registry.get(plugin).Config
        for layer, choice in zip(layers, chosen, strict=True):
            if group in choice and choice[group].plugin != plugin:
                # Options of a plugin that was not chosen after all.
                del choice[group]
                layer.values.pop(group, None)
    for layer, choice in zip(layers, chosen, strict=True):
        for group, pick in choice.items():
            if pick.preset:
                preset = _file_layer(pick.preset)
                preset.values.pop("name", None)
                _lay(result, Layer(preset.origin, {group: preset.values}), schema)
            if pick.plugin:
                _lay(result, Layer(layer.origin, {group: {"name": pick.plugin}}), schema)
        _lay(result, layer, schema)
    return result


def _parse(argv: Sequence[str]) -> dict[str, str]:
    """`key=text` arguments by key."""
    flat: dict[str, str] = {}
    for argument in argv:
        if argument.startswith("-"):
            flags = [flag for flag in ("--help", "--cfg") if flag.startswith(argument)]
            near = f"; did you mean {flags[0]!r}?" if len(flags) == 1 else ""
            raise UserError(f"unknown flag {show(argument)!r}{near} (allowed: --help, --cfg, and key=value)")
        key, equals, text = argument.partition("=")
        if not equals or not all(key.split(".")):
            raise UserError(f"{show(argument)!r} is no option: write key=value, as in seed=1 (--help lists the keys)")
        if key in flat:
            raise UserError(f"{key} is given twice: {show(flat[key])} and {show(text)}")
        flat[key] = text
    return flat


def _nest(flat: Mapping[str, str]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, text in sorted(flat.items()):
        *sections, last = key.split(".")
        place = nested
        for depth, name in enumerate(sections):
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                above = ".".join(sections[: depth + 1])
                raise UserError(f"{key}={show(text)} does not fit {above}={show(place)}: give one of the two")
        place[last] = text
    return nested


def _file_layer(path: Path) -> Layer:
    return Layer(_display(path), read_yaml(path))


def _display(path: Path) -> str:
    """The path as seen from the project's root, if it is inside."""
    root = CONFIGS.parent
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _experiment(text: str, configs: Path) -> Path:
    names = presets("experiment", configs)
    if text in names:
        return configs / "experiment" / f"{text}.yaml"
    if text.endswith((".yaml", ".yml")):
        if Path(text).expanduser().is_file():
            return Path(text).expanduser()
        raise UserError(f"experiment={text}: no such file")
    known = ", ".join(names) or "none"
    raise UserError(
        f"unknown experiment {text!r}{nearest(text, names)} (available: {known}; or the path of a .yaml file)"
    )


def _saved_layer(layers: Sequence[Layer]) -> Layer | None:
    """The options that the run to be continued was saved with; None unless `resume=auto` finds it."""
    resume, name, parent = _last(layers, "resume"), _last(layers, "run", "name"), _last(layers, "run", "dir") or "runs"
    if resume != "auto" or not name:
        return None
    path = Path(str(parent)).expanduser() / str(name) / runs.CONFIG_FILE
    if not path.is_file():
        return None
    saved = runs.saved_options(path.parent)
    values = {key: value for key, value in saved.items() if key not in ("resume", "run")}
    return Layer(str(path), values)


def _start_layer(layers: Sequence[Layer]) -> Layer | None:
    """Mixer and model of the run that `init_from` names. Raises UserError where there is none."""
    name = _last(layers, "init_from")
    if name in (None, "null"):
        return None
    folder = runs.find(str(name), str(_last(layers, "run", "dir") or "runs"), "init_from")
    values = {key: value for key, value in runs.saved_options(folder).items() if key in ("mixer", "model", "plugins")}
    return Layer(str(folder / runs.CONFIG_FILE), values)


def _last(layers: Sequence[Layer], *keys: str) -> Any:
    """The value of a key in the strongest layer that has it; None where none has."""
    for layer in reversed(layers):
        value: Any = layer.values
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    return None


def _load_plugins(layers: Sequence[Layer], schema: type) -> None:
    hint = type_hints(schema).get("plugins")
    for layer in reversed(layers):
        if hint and "plugins" in layer.values:
            # Absolute: a saved run is evaluated from other folders too.
            paths = coerce(layer.values["plugins"], hint, "plugins", layer.origin)
            layer.values["plugins"] = [str(Path(path).expanduser().resolve()) for path in paths]
            for path in layer.values["plugins"]:
                load_file(path)
            return


def _take_choices(layer: Layer, schema: type, configs: Path) -> dict[str, Choice]:
    """The layer's choices by group: `mixer: hybrid`, or without its preset `mixer: {name: hybrid}`."""
    found = {}
    for group, registry in groups(schema).items():
        value = layer.values.get(group)
        if isinstance(value, str):
            layer.choices[group] = layer.values.pop(group)
        name = value.pop("name", None) if registry and isinstance(value, dict) else None
        text = layer.choices.get(group)
        if text is not None and name is not None:
            raise UserError(f"{group} is chosen twice: {group}={show(text)} and {group}.name={show(name)}")
        if text is not None:
            found[group] = _choice(group, registry, text, layer.origin, configs)
        elif name is not None:
            found[group] = Choice(name, _plugin(group, registry, name, layer.origin, configs), None)
    return found


def _choice(group: str, registry: Registry | None, text: str, origin: str, configs: Path) -> Choice:
    path = configs / group / f"{text}.yaml" if text in presets(group, configs) else None
    if registry is None:
        if path is None:
            raise _unknown_choice(group, registry, text, origin, configs)
        return Choice(text, None, path)
    if path is None:
        return Choice(text, _plugin(group, registry, text, origin, configs), None)
    name = read_yaml(path).get("name", text)
    return Choice(text, _plugin(group, registry, name, _display(path), configs), path)


def _plugin(group: str, registry: Registry, name: Any, origin: str, configs: Path) -> str:
    if name not in registry.names():
        raise _unknown_choice(group, registry, name, origin, configs)
    return name


def _unknown_choice(group: str, registry: Registry | None, text: Any, origin: str, configs: Path) -> UserError:
    known = available(group, registry, configs)
    place = f"{origin}: " if origin else ""
    what = "the value is missing" if text == "" else f"no such {group}"
    return UserError(f"{place}{group}={show(text)}: {what}{nearest(str(text), known)} (available: {', '.join(known)})")


def _lay(result: Resolved, layer: Layer, cls: type, values: Mapping | None = None, prefix: str = "") -> None:
    """Lays the values of a layer over those of `result`; every key is checked, no value is."""
    hints = type_hints(cls)
    place = f"{layer.origin}: " if layer.origin else ""
    for key, value in (layer.values if values is None else values).items():
        dotted = f"{prefix}{key}"
        if key not in hints:
            raise UserError(place + _unknown(result, cls, dotted, prefix.rstrip(".")))
        section = result.section(dotted, hints[key])
        if section and isinstance(value, Mapping):
            _lay(result, layer, section, value, f"{dotted}.")
        elif section and value is not None:
            inner = [f"{dotted}.{name}" for name in type_hints(section)]
            near = f"; did you mean {dotted}.name={show(value)}?" if f"{dotted}.name" in inner else ""
            raise UserError(f"{place}{dotted}={show(value)}: {dotted} is a section{near} (it has: {', '.join(inner)})")
        elif not section:
            _set(result, layer, dotted, value, hints[key])


def _set(result: Resolved, layer: Layer, dotted: str, value: Any, hint: Any) -> None:
    *sections, last = dotted.split(".")
    place = result.values
    for name in sections:
        place = place.setdefault(name, {})
    if kind_of(hint) is dict:
        value = _read_texts(value, dotted, layer.origin) if isinstance(value, Mapping) else value
        value = coerce(value, hint, dotted, layer.origin)
        value = _merge(place.get(last) or {}, value) if value is not None else None
    elif isinstance(value, Mapping) and not layer.origin:
        below = f"{dotted}.{next(iter(value))}"
        raise UserError(f"unknown key {below!r}; did you mean {dotted!r}? (it has no options of its own)")
    place[last] = value
    result.origins[dotted] = layer.origin


def _read_texts(value: Any, key: str, origin: str) -> Any:
    """Values inside a mapping have no declared type: text is read as YAML, so that 4 is a number."""
    if isinstance(value, Mapping):
        return {name: _read_texts(inner, f"{key}.{name}", origin) for name, inner in value.items()}
    return coerce(value, Any, key, origin) if isinstance(value, str) else value


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _unknown(result: Resolved, cls: type, dotted: str, where: str) -> str:
    sections = groups(result.schema)
    known = result.keys()
    allowed = [name for name in type_hints(cls) if not (name == "name" and where in sections)]
    if not where:
        known += [*sections, *(["experiment"] if sections else [])]
        allowed += ["experiment"] if sections else []
    if result.choices.get(where):
        where = f"{where}={result.choices[where]}"
    return unknown_key(dotted, known, allowed, where)
