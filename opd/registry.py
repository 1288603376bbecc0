"""Registries for everything that is chosen by name: methods, objectives, tasks, engines, ...

A registry maps names to dotted paths and imports them on use, so that listing plug-ins does not load torch. Third
parties add names through an entry-point group, and a package of many plug-ins adds a catalogue of names; a recipe may
also give a dotted path ("package.module:Class").
"""

import ast
import difflib
import importlib
import importlib.util
import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from opd.config import parse_settings
from opd.errors import ConfigError, OpdError


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered plug-in: its name, dotted path, and the package that registered it."""

    name: str
    path: str
    origin: str

    @property
    def summary(self) -> str:
        """The first sentence of its docstring; nothing is imported for it."""
        return first_sentence(self.path)

    @property
    def evidence(self) -> str:
        """What is known of its formula, as its class says; "" if it says nothing. Nothing is imported for it."""
        assigned = [node for node in definition(self.path) if isinstance(node, ast.Assign | ast.AnnAssign)]
        named = (node for node in assigned if "evidence" in ast.unparse(node).partition("=")[0])
        value = next((node.value for node in named), None)
        return str(value.value) if isinstance(value, ast.Constant) else ""


class Registry:
    """The names of one kind of plug-in, imported lazily.

    Args:
        kind: what the entries are called in messages and in `opd plugins list`, for example "method".
        group: entry-point group for third parties, for example "opd.methods".
        member: an attribute that all plug-ins of this kind have, for example "settings_type".
        names: the dotted path "module:attribute" of each name that comes with the trunk.
    """

    def __init__(
        self, kind: str, group: str, *, member: str | None = None, names: Mapping[str, str] | None = None
    ) -> None:
        self.kind = kind
        self.group = group
        self.member = member
        self._entries = {name: Entry(name, path, "opd") for name, path in (names or {}).items()}
        self._scanned = False

    def add(self, name: str, path: str, *, origin: str = "opd") -> None:
        """Register `name` for the dotted path "module:attribute".

        Raises:
            ConfigError: if the name is taken by another path; the message names both places.
        """
        known = self._entries.get(name)
        if known is not None and known.path != path:
            raise ConfigError(
                f"{self.kind} {name!r} is registered twice, as {known.path} by {known.origin} and as {path} by "
                f"{origin}; rename one of them."
            )
        self._entries[name] = Entry(name, path, origin)

    def _scan(self) -> None:
        if self._scanned:
            return
        for catalogue in entry_points(group="opd.catalogues"):
            for name, path in catalogue.load().get(self.kind, {}).items():
                self.add(name, path, origin=path.partition(".")[0])
        for point in entry_points(group=self.group):
            origin = point.dist.name if point.dist is not None else "an entry point"
            self.add(point.name, point.value, origin=origin)
        self._scanned = True

    def __iter__(self) -> Iterator[Entry]:
        self._scan()
        return iter(sorted(self._entries.values(), key=lambda e: e.name))

    def __contains__(self, name: str) -> bool:
        self._scan()
        return name in self._entries

    def load(self, name: str, base: type | None = None) -> Any:
        """Import and return the object registered as `name`, or at the dotted path `name`.

        Args:
            name: the name or path.
            base: the class that plug-ins of this kind derive from; None if they need not derive from any.

        Raises:
            ConfigError: for an unknown name (with near matches), a path that cannot be imported, or an object of
                another kind.
        """
        self._scan()
        if name in self._entries:
            path = self._entries[name].path
        elif ":" in name:
            path = name
        else:
            module, _, cls = name.rpartition(".")
            meant = f"a class of your own is written {module}:{cls}." if module else hint(name, self._entries)
            raise ConfigError(f"there is no {self.kind} {name!r}; {meant}")
        module = path.partition(":")[0]
        if not module or module.startswith("."):
            raise ConfigError(f"{self.kind} {name!r} must have the form package.module:Class.")
        try:
            found = imported(path)
        except (ImportError, AttributeError) as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
            fix = "; install its package, or name the folder of its file in PYTHONPATH" if missing else ""
            raise ConfigError(f"{self.kind} {name!r} at {path} cannot be imported: {error}{fix}.") from error
        if base is not None:
            _check_base(f"{self.kind} {name!r} at {path}", found, base)
        if self.member is not None and not hasattr(found, self.member):
            raise ConfigError(
                f"{self.kind} {name!r} at {path} is not of kind {self.kind}: it has no {self.member!r}; add it."
            )
        return found

    def make(self, entry: Mapping[str, Any], base: type, where: str) -> Any:
        """The plug-in that an entry of a recipe names, created with its settings.

        Args:
            entry: its name and its settings.
            base: the class that plug-ins of this kind derive from.
            where: the key in the recipe, for messages.

        Raises:
            ConfigError: as for `load`; also for a missing name, settings that are not valid, or that the plug-in does
                not keep.
        """
        if "name" not in entry:
            raise ConfigError(f"{where} has no name; add one of `opd plugins list {self.kind}`.")
        name = str(entry["name"])
        cls = self.load(name, base)
        try:
            settings = parse_settings(cls.settings_type, entry, source=where)
        except ConfigError as error:
            bare = cls.settings_type is getattr(base, "settings_type", None)
            if not bare or entry.keys() <= cls.settings_type.model_fields.keys():
                raise
            raise ConfigError(
                f"{error} {self.kind} {name!r} declares no settings of its own; its class would name them after its "
                f"base: class {cls.__name__}({base.__name__}[...])."
            ) from error
        made = cls(settings)
        if not hasattr(made, "settings"):
            raise ConfigError(
                f"{self.kind} {name!r} does not keep its settings; let its __init__ call super().__init__(settings)."
            )
        return made


def _check_base(what: str, found: Any, base: type) -> None:
    """Refuse a class that does not derive from `base`, or whose settings or constructor do not fit it.

    Checked here, where the plug-in can be named; otherwise an attribute would be missing later, in code by someone
    else.
    """
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{what} does not derive from {base.__module__}.{base.__name__}; make it a subclass.")
    settings, wanted = getattr(found, "settings_type", None), getattr(base, "settings_type", object)
    if not (isinstance(settings, type) and issubclass(settings, wanted)):
        raise ConfigError(
            f"the settings of {what} do not derive from {wanted.__module__}.{wanted.__name__}, but are {settings!r}; "
            "make them a subclass."
        )
    try:
        inspect.signature(found).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"{what} cannot be created with its settings alone ({error}); give it __init__(self, settings)."
        ) from error


def imported(path: str) -> Any:
    """The object at a dotted path "module:attribute".

    Raises:
        ImportError: if the module cannot be found, or its own code fails; the message then gives the place.
        AttributeError: if it has no such attribute.
    """
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, OpdError):
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, SyntaxError) else f" ({place.filename}, line {place.lineno})"
        raise ImportError(f"{type(error).__name__}: {error}{where}") from error


def function_at(path: str, *arguments: str) -> Callable[..., Any]:
    """The function at a dotted path "module:function".

    Args:
        path: the path.
        arguments: what it is called with, in words.

    Raises:
        ConfigError: if it cannot be imported, or cannot be called with as many arguments.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise ConfigError(f"function {path!r} must have the form package.module:function.")
    try:
        found: Callable[..., Any] = imported(path)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"function {path!r} cannot be imported: {error}.") from error
    try:
        inspect.signature(found).bind(*arguments)
    except (TypeError, ValueError) as error:
        words = f"{', '.join(arguments[:-1])} and {arguments[-1]}"
        raise ConfigError(f"function {path!r} cannot be called with {words}: {error}.") from error
    return found


def hint(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known names, or all if none is near."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(names)}."


def first_sentence(path: str) -> str:
    """The first sentence of the docstring of "module:attribute", or else of its module; "" if it cannot be read."""
    texts = [_docstring(body) for body in (definition(path), _source(path))]
    text = next(filter(None, texts), "")
    # A title such as "Dr. GRPO" ends no sentence.
    return re.split(r"(?<!\bDr)\. ", " ".join(text.partition("\n\n")[0].split()))[0].removesuffix(".")


def definition(path: str) -> list[ast.stmt]:
    """The statements of the class or function "module:attribute", read from its source; [] if it cannot be read."""
    attribute = path.partition(":")[2]
    kinds = ast.ClassDef | ast.FunctionDef
    return next((node.body for node in _source(path) if isinstance(node, kinds) and node.name == attribute), [])


def _docstring(body: list[ast.stmt]) -> str:
    return ast.get_docstring(ast.Module(body, [])) or ""


def _source(path: str) -> list[ast.stmt]:
    """The statements of the module of "module:attribute". Nothing is imported, so that listing plug-ins stays fast."""
    top, *rest = path.partition(":")[0].split(".")
    try:
        spec = importlib.util.find_spec(top)
        folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec is not None else []
        places = [folder.joinpath(*rest) for folder in folders]
        files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
        if spec is not None and spec.origin is not None and not rest:
            files.append(Path(spec.origin))
        file = next(file for file in files if file.is_file())
        return _parsed(file, file.stat().st_mtime_ns)
    except (StopIteration, ImportError, ValueError, SyntaxError, OSError):
        return []


@cache
def _parsed(file: Path, changed: int) -> list[ast.stmt]:
    """Once per version of a file: a listing reads the summary and the evidence of each plug-in of a module."""
    return ast.parse(file.read_text(encoding="utf-8")).body
