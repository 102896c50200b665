"""Plugins by name: mixers and data modules, found without importing them.

A plugin comes from a file of the package (`src/mixers/softmax.py` is `softmax`), from an entry point of an
installed distribution (its value is the class), or from a file named in `plugins=[path/to/file.py]`.
"""

import dataclasses
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from src.errors import UserError
from src.options import build, nearest, one_line, type_hints


@dataclasses.dataclass(frozen=True)
class _Source:
    """Where a plugin comes from, and how to import the module or class."""

    origin: str
    load: Callable[[], ModuleType | type]
    identity: object


class Registry:
    """The plugins of one kind; `get` imports the one that is asked for and nothing else."""

    def __init__(self, kind: str, package: str, base: str) -> None:
        """`kind` names plugins in messages; `base` is the class of `package` that all of them subclass."""
        self.kind, self.package = kind, package
        self._base = base
        self._files: dict[str, tuple[Path, type]] = {}
        self._names: dict[type, str] = {}

    @property
    def base(self) -> type:
        return getattr(importlib.import_module(self.package), self._base)

    def names(self) -> list[str]:
        """The names of all plugins, sorted; imports nothing. Raises UserError if a name has two origins."""
        return sorted(self._sources())

    def get(self, name: str) -> type:
        """The class of that name. Raises UserError if there is none or if its file cannot be imported."""
        sources = self._sources()
        if name not in sources:
            known = ", ".join(sorted(sources)) or "none"
            raise UserError(f"unknown {self.kind} {name!r}{nearest(name, sources)} (available: {known})")
        source = sources[name]
        found = _guarded(source.load, f"{self.kind} {name!r} ({source.origin})")
        cls = self._pick(found, source.origin) if isinstance(found, ModuleType) else found
        if not (isinstance(cls, type) and issubclass(cls, self.base)):
            raise UserError(f"{self.kind} {name!r} ({source.origin}) is no subclass of {self._base}")
        type_hints(cls.Config)
        self._names[cls] = name
        return cls

    def name_of(self, cls: type) -> str:
        """The name under which `get` gave this class; empty for a class that it never gave."""
        return self._names.get(cls, "")

    def add_file(self, path: Path, module: ModuleType) -> bool:
        """Registers the plugin of this kind that a loaded file defines; False if it defines none."""
        candidates = self._candidates(module)
        if not candidates:
            return False
        self._files[path.stem] = (path, self._pick(module, str(path)))
        return True

    def check_free(self, path: Path) -> None:
        """Raises UserError if another origin than this file has the name already."""
        taken = self._sources().get(path.stem)
        if taken and taken.identity != path:
            raise UserError(_duplicate(self.kind, path.stem, taken.origin, str(path)))

    def _sources(self) -> dict[str, _Source]:
        sources: dict[str, _Source] = {}

        def add(name: str, source: _Source) -> None:
            if name in sources and sources[name].identity != source.identity:
                raise UserError(_duplicate(self.kind, name, sources[name].origin, source.origin))
            sources[name] = source

        spec = importlib.util.find_spec(self.package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for file in sorted(Path(folder).glob("*.py")):
                if not file.name.startswith("_"):
                    module = f"{self.package}.{file.stem}"
                    add(file.stem, _Source(str(file), lambda m=module: importlib.import_module(m), module))
        for point in entry_points(group=self.package):
            add(point.name, _Source(_describe(point), point.load, point.value))
        for name, (path, cls) in self._files.items():
            add(name, _Source(str(path), lambda c=cls: c, path))
        return sources

    def _candidates(self, module: ModuleType) -> list[type]:
        base = self.base
        return [
            value
            for name, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__
            if not name.startswith("_") and value.__name__ == name
        ]

    def _pick(self, module: ModuleType, origin: str) -> type:
        found = self._candidates(module)
        if len(found) != 1:
            what = ", ".join(c.__name__ for c in found) or "none"
            raise UserError(
                f"{self.kind} {origin}: expected one public subclass of {self._base}, found {what}"
                " (a leading underscore keeps a class private)"
            )
        return found[0]


MIXERS = Registry("mixer", "src.mixers", "Mixer")
DATA = Registry("data", "src.data", "DataModule")


def load_file(path: str | Path) -> None:
    """Registers the plugins of a Python file under the file's stem: a mixer, a data module, or one of each.

    A file that is loaded already is not executed again unless it changed. Raises UserError if the file is
    missing, fails to import, defines no plugin, or has the name of another plugin.
    """
    file = Path(path).expanduser().resolve()
    if file.suffix != ".py" or not file.is_file():
        what = "no Python file (.py)" if file.exists() else "no such file"
        raise UserError(f"plugins={path}: {what}")
    source = file.read_bytes()
    content = hashlib.sha256(source).hexdigest()
    name = f"src_plugin_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    loaded = sys.modules.get(name)
    if loaded is None or loaded.__plugin_content__ != content:
        loaded = _guarded(lambda: _execute(name, file, source, content), f"plugin {file}")
    registries = [r for r in (MIXERS, DATA) if r._candidates(loaded)]
    if not registries:
        raise UserError(f"plugin {file}: defines neither a subclass of Mixer nor of DataModule")
    for registry in registries:
        registry.check_free(file)
    for registry in registries:
        registry.add_file(file, loaded)


def build_options(cls: type, options: Mapping[str, Any], where: str) -> Any:
    """The plugin's `Config` from plain values, checked: `where` is their dotted key, for messages.

    Raises UserError, of one line, for an unknown key and for a value of the wrong type.
    """
    name = MIXERS.name_of(cls) or DATA.name_of(cls)
    return build(cls.Config, {"name": name, **options} if name else options, where)


def _execute(name: str, file: Path, source: bytes, content: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    module.__plugin_content__ = content
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    try:
        # Not the loader's exec_module: its cached bytecode is that of another source of equal size in the same second.
        exec(spec.loader.source_to_code(source, str(file)), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _guarded(load: Callable[[], Any], what: str) -> Any:
    """Calls `load`; a failing import becomes one line that says which import failed, and where."""
    try:
        return load()
    except UserError:
        raise
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "src"):
            raise UserError(f"{what} cannot be imported: {one_line(error)}") from error
        raise UserError(f"{what} needs {error.name!r}, which is not installed: pip install {package}") from error
    except Exception as error:
        if isinstance(error, SyntaxError):
            place = f"{error.filename}:{error.lineno}"
        else:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{frame.filename}:{frame.lineno}"
        detail = one_line(getattr(error, "msg", None) or error)
        raise UserError(f"{what} cannot be imported: {type(error).__name__}: {detail} ({place})") from error


def _describe(point: EntryPoint) -> str:
    owner = point.dist.name if point.dist else "an installed package"
    return f"entry point {point.value} of {owner}"


def _duplicate(kind: str, name: str, first: str, second: str) -> str:
    return f"the {kind} name {name!r} is taken twice: {first} and {second}; rename one"
