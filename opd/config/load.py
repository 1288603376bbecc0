"""Read settings from YAML and dotted overrides; turn every mistake into one sentence with the key in it."""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from opd.config.base import Settings
from opd.errors import ConfigError

S = TypeVar("S", bound=Settings)


def load_settings(model: type[S], path: str | Path, overrides: Iterable[str] = ()) -> S:
    """Read `path` (YAML), apply "dotted.key=value" overrides (values are YAML too), validate as `model`.

    Raises:
        ConfigError: for a missing or unreadable file, an unknown key (with the nearest valid one) or a bad value.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"recipe {path} cannot be read: {error.strerror}; check the path.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"recipe {path} is not text in UTF-8: {error.reason}; save it again.") from error
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"recipe {path} is not valid YAML: {' '.join(str(error).split())}.") from error
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"recipe {path} must be a mapping of keys, but it is a {type(data).__name__}.")
    for override in overrides:
        _apply(data, override)
    return parse_settings(model, data, source=str(path))


def parse_settings(model: type[S], data: Mapping[str, Any], *, source: str = "settings") -> S:
    """Validate `data` as `model`; every violation becomes one sentence of a `ConfigError`."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(" ".join(_sentence(model, dict(issue), source) for issue in error.errors())) from error


def _apply(data: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r} is not of the form dotted.key=value.")
    node: Any = data
    *parents, last = key.split(".")
    for part in parents:
        if isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
            continue
        if isinstance(node, dict) and node.get(part) is None:
            node[part] = {}
        node = node[part] if isinstance(node, dict) else None
        if not isinstance(node, dict | list):
            raise ConfigError(f"override {override!r}: {part!r} is not a group of settings.")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r} is not valid YAML: {' '.join(str(error).split())}.") from error
    if isinstance(node, list):
        if not (last.isdigit() and int(last) < len(node)):
            raise ConfigError(f"override {override!r}: {last!r} is no index of a list of {len(node)}.")
        node[int(last)] = parsed
    else:
        node[last] = parsed


def _sentence(model: type[BaseModel], issue: dict[str, Any], source: str) -> str:
    location = ".".join(str(part) for part in issue["loc"])
    if issue["type"] == "extra_forbidden":
        valid = _keys_at(model, issue["loc"][:-1])
        near = difflib.get_close_matches(str(issue["loc"][-1]), valid, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"valid keys here: {', '.join(sorted(valid)) or 'none'}."
        return f"{source}: unknown key {location!r}; {hint}"
    if issue["type"] == "missing":
        return f"{source}: key {location!r} is missing; give it a value."
    message = str(issue["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ").rstrip(".")
    if not location:
        return f"{source}: {message}."
    return f"{source}: {location} = {issue.get('input')!r} is not valid: {message}."


def _keys_at(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """Field names of the settings group at `location`, as far as the annotations tell."""
    current: list[type[BaseModel]] = [model]
    for part in location:
        following: list[type[BaseModel]] = []
        for candidate in current:
            field = candidate.model_fields.get(part) if isinstance(part, str) else None
            following += _models_in(field.annotation) if field is not None else []
        # Indices of lists, keys of mappings and tags of unions stay within the same models.
        current = following or current
    return [name for candidate in current for name in candidate.model_fields]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for argument in get_args(annotation) for found in _models_in(argument)]
