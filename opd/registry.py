"""One kind of registry for everything that is chosen by name: methods, objectives, tasks, engines, ...

A registry maps a name to a dotted path and imports it on use, so listing plug-ins needs no torch. Third
parties add names through an entry-point group; a recipe may also give a dotted path ("package.module:Class").
"""

import ast
import difflib
import importlib
import importlib.util
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from opd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered plug-in: its name, dotted path, one-line summary and where it was registered."""

    name: str
    path: str
    summary: str
    origin: str


class Registry:
    """Names of one kind of plug-in, imported lazily.

    Args:
        kind: what the entries are, in messages and in `opd plugins list`, for example "method".
        group: entry-point group of third parties, for example "opd.methods".
        member: an attribute that every plug-in of this kind has, for example "settings_type".
    """

    def __init__(self, kind: str, group: str, *, member: str | None = None) -> None:
        self.kind = kind
        self.group = group
        self.member = member
        self._entries: dict[str, Entry] = {}
        self._scanned = False

    def add(self, name: str, path: str, summary: str = "", *, origin: str = "opd") -> None:
        """Register `name` for the dotted path "module:attribute".

        Raises:
            ConfigError: when the name is taken by another path; names both places.
        """
        known = self._entries.get(name)
        if known is not None and known.path != path:
            raise ConfigError(
                f"{self.kind} {name!r} is registered twice, as {known.path} by {known.origin} and as {path} by "
                f"{origin}; rename one of them."
            )
        self._entries[name] = Entry(name, path, summary, origin)

    def _scan(self) -> None:
        if not self._scanned:
            for point in entry_points(group=self.group):
                origin = point.dist.name if point.dist is not None else "an entry point"
                self.add(point.name, point.value, first_sentence(point.value), origin=origin)
            self._scanned = True

    def __iter__(self) -> Iterator[Entry]:
        self._scan()
        return iter(sorted(self._entries.values(), key=lambda e: e.name))

    def __contains__(self, name: str) -> bool:
        self._scan()
        return name in self._entries

    def load(self, name: str) -> Any:
        """Import and return the object registered as `name`, or at the dotted path `name`.

        Raises:
            ConfigError: for an unknown name (with near matches), a path that does not import, or something of another
                kind.
        """
        self._scan()
        if name in self._entries:
            path = self._entries[name].path
        elif ":" in name:
            path = name
        else:
            raise ConfigError(f"there is no {self.kind} {name!r}; {hint(name, self._entries)}")
        module = path.partition(":")[0]
        if not module or module.startswith("."):
            raise ConfigError(f"{self.kind} {name!r} is not of the form package.module:Class.")
        try:
            found = imported(path)
        except (ImportError, AttributeError) as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
            fix = "; install its package, or name the folder of its file in PYTHONPATH" if missing else ""
            raise ConfigError(f"{self.kind} {name!r} at {path} cannot be imported: {error}{fix}.") from error
        if self.member is not None and not hasattr(found, self.member):
            raise ConfigError(f"{self.kind} {name!r} at {path} is not of kind {self.kind}: it has no {self.member!r}.")
        return found


def imported(path: str) -> Any:
    """The object at a dotted path "module:attribute".

    Raises:
        ImportError: when the module cannot be found or its own code fails, with the place.
        AttributeError: when it has no such attribute.
    """
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError):
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, SyntaxError) else f" ({place.filename}, line {place.lineno})"
        raise ImportError(f"{type(error).__name__}: {error}{where}") from error


def hint(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the nearest known ones, or else all."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(names)}."


def first_sentence(path: str) -> str:
    """The first sentence of the docstring of "module:attribute", or else of its module; "" where it cannot be read.

    Nothing is imported, because listing plug-ins must stay quick.
    """
    name, _, attribute = path.partition(":")
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
        folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec is not None else []
        places = [folder.joinpath(*rest) for folder in folders]
        files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
        if spec is not None and spec.origin is not None and not rest:
            files.append(Path(spec.origin))
        source = ast.parse(next(file for file in files if file.is_file()).read_text(encoding="utf-8"))
    except (StopIteration, ImportError, ValueError, SyntaxError, OSError):
        return ""
    found = [
        node for node in source.body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == attribute
    ]
    text = next((text for node in (*found, source) if (text := ast.get_docstring(node))), "")
    return " ".join(text.partition("\n\n")[0].split()).partition(". ")[0].removesuffix(".")
