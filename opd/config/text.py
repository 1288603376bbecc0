"""Reading and writing YAML, with libyaml if PyYAML was built with it, which is several times faster."""

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import yaml

from opd.errors import ConfigError

_Safe: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: type[yaml.SafeDumper] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
L = TypeVar("L", bound=yaml.SafeLoader)
_DEEPEST = 100
"""Levels of nesting; libyaml would overflow the stack of the process at some 30,000."""
_MOST = 100_000
"""Values that may be made of aliases alone: nine anchors of nine aliases each stand for 400 million."""


def _integer(loader: Any, node: yaml.ScalarNode) -> Any:
    return node.value if ":" in node.value else loader.construct_yaml_int(node)


def _real(loader: Any, node: yaml.ScalarNode) -> Any:
    return node.value if ":" in node.value else loader.construct_yaml_float(node)


def plain(loader: type[L]) -> type[L]:
    """A loader that reads 1:30 as text, as YAML 1.2 does, and not as the number 90 of base 60; a class decorator."""
    loader.add_constructor("tag:yaml.org,2002:int", _integer)
    loader.add_constructor("tag:yaml.org,2002:float", _real)
    return loader


_Loader: type[yaml.SafeLoader] = plain(type("_Loader", (_Safe,), {}))


def read_yaml(text: str) -> Any:
    """The value of a YAML document; creates only objects that plain YAML knows.

    Raises:
        yaml.YAMLError: if `text` is not YAML, or too large for its length.
        ValueError: for a value that its tag does not allow, for example the date 2026-99-99.
    """
    return load(text, _Loader)


def load(text: str, kind: type[L]) -> Any:
    """The value of a YAML document, read by a loader of that kind.

    Raises:
        yaml.YAMLError: if `text` is not YAML, nested too deep, or if its aliases stand for too many values.
        ValueError: for a value that its tag does not allow.
    """
    _check_depth(text)
    # The same as yaml.load, a name that is avoided altogether because its loader decides whether data can run code.
    loader = kind(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_depth(text: str) -> None:
    """Refuse deep nesting, before a loader recurses into it."""
    depth = 0
    try:
        for event in yaml.parse(text, Loader=_Safe):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                break
    except yaml.YAMLError:
        return  # the loader says it with its own words
    if depth > _DEEPEST:
        raise yaml.YAMLError(f"it is nested more than {_DEEPEST} levels deep")


def _check_size(root: yaml.Node) -> None:
    """Refuse aliases that make many values, or deep ones, of few nodes."""
    known: dict[int, tuple[int, int]] = {}
    size, height = _measure(root, known)
    if size - len(known) > _MOST:
        raise yaml.YAMLError(f"its aliases stand for more than {_MOST:,} values")
    if height > _DEEPEST:
        raise yaml.YAMLError(f"its aliases are nested more than {_DEEPEST} levels deep")


def _measure(node: yaml.Node, known: dict[int, tuple[int, int]], depth: int = 0) -> tuple[int, int]:
    """The number of values that a node stands for, and of levels; measured once, however often aliases name it."""
    if depth > _DEEPEST:
        raise yaml.YAMLError("an alias stands within its own anchor, or aliases are nested too deep")
    if id(node) not in known:
        held = node.value if isinstance(node, yaml.CollectionNode) else ()
        children = [child for item in held for child in (item if isinstance(item, tuple) else (item,))]
        parts = [_measure(child, known, depth + 1) for child in children]
        known[id(node)] = 1 + sum(size for size, _ in parts), 1 + max((height for _, height in parts), default=0)
    return known[id(node)]


def read_options(flag: str, entries: Iterable[str] | None) -> dict[str, Any]:
    """The values of a flag that may be given several times as KEY=VALUE; values are YAML.

    Raises:
        ConfigError: for an entry that is not of this form.
    """
    options = {}
    for entry in entries or ():
        key, separator, value = entry.partition("=")
        if not separator or not key:
            raise ConfigError(f"{flag} {entry!r} must have the form KEY=VALUE.")
        try:
            options[key] = read_yaml(value)
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"{flag} {entry!r} is not valid YAML; quote the value.") from error
        if isinstance(options[key], str):
            # YAML 1.1 reads 1e-5, which has no dot, as a string.
            with contextlib.suppress(ValueError):
                options[key] = float(value)
    return options


def write_yaml(value: Any, *, allow_unicode: bool = False) -> str:
    """Plain values as a YAML document."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=allow_unicode))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted keys. Empty mappings are kept as values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
