"""Reading settings from YAML and dotted overrides; every mistake becomes one sentence that names the key."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, Tag, ValidationError

from opd.config.base import Settings
from opd.config.text import load, plain
from opd.errors import ConfigError, one_line

S = TypeVar("S", bound=Settings)
_Group = tuple[str | None, type[BaseModel]]
"""A group of settings, with its tag if it is a member of a tagged union."""


def load_settings(model: type[S], path: str | Path | None, overrides: Iterable[str] = ()) -> S:
    """Read `path` (YAML), apply "dotted.key=value" overrides (values are YAML too), validate as `model`.

    If `path` is None, the overrides apply to the defaults.

    Raises:
        ConfigError: for a missing or unreadable file, an unknown key (with the nearest valid one) or a bad value.
    """
    data = {} if path is None else read_mapping(path)
    for override in overrides:
        _apply(data, override)
    return parse_settings(model, data, source="overrides" if path is None else str(path))


def read_mapping(path: str | Path) -> dict[str, Any]:
    """The mapping in the YAML file `path`; {} for an empty file.

    Raises:
        ConfigError: if the file is missing, unreadable, not YAML or not a mapping, or gives a key twice.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; check the path.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason}; save it as UTF-8.") from error
    data = _yaml(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path} must be a mapping of keys, but it is a {type(data).__name__}; write key: value lines."
        )
    return data


def parse_settings(model: type[S], data: Mapping[str, Any], *, source: str = "settings") -> S:
    """Validate `data` as `model`; every violation becomes one sentence of a `ConfigError`."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(" ".join(f"{source}: {said}" for said in _sentences(model, data, error.errors()))) from error


@plain
class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, except that duplicate keys are an error; PyYAML would silently take the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
        return node


def _yaml(text: str, what: str) -> Any:
    try:
        return load(text, _Loader)
    # Besides its own errors, PyYAML passes on those of the types that it constructs, as for the date 2026-99-99.
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{what} is not valid YAML: {_said(error)}.") from error


def _said(error: Exception) -> str:
    """What PyYAML found and where, on one line, without the lines of the text that it quotes."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None or error.problem_mark is None:
        # PyYAML's name for a text that it did not read from a file.
        return one_line(error).replace('in "<unicode string>", ', "in ")
    said = f"{one_line(error.problem)} in {_place(error.problem_mark)}"
    if error.context and error.context_mark is not None:
        said += f", {error.context} that begins in {_place(error.context_mark)}"
    return said.replace("'<stream end>'", "the end of the text")


def _place(mark: yaml.Mark) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"


def _apply(data: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r} must have the form dotted.key=value.")
    node: Any = data
    *parents, last = key.split(".")
    for part in parents:
        if isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
            continue
        # A group that the file leaves out, or leaves empty, is created by the override.
        if isinstance(node, dict) and node.get(part) is None:
            node[part] = {}
        node = node[part] if isinstance(node, dict) else None
        if not isinstance(node, dict | list):
            raise ConfigError(f"override {override!r}: {part!r} is not a group of settings.")
    parsed = _yaml(value, f"override {override!r}")
    if isinstance(node, list):
        if not (last.isdigit() and int(last) < len(node)):
            raise ConfigError(
                f"override {override!r}: {last!r} is not an index of this list, which has {len(node)} entries, from 0."
            )
        node[int(last)] = parsed
    else:
        node[last] = parsed


def _sentences(model: type[BaseModel], data: Any, issues: Iterable[Any]) -> Iterator[str]:
    """One sentence per mistake; for a key that accepts several types, only for those that its value came closest to."""
    placed = [(issue, *_resolve(model, data, issue["loc"])) for issue in issues]
    invalid: dict[str, list[str]] = {}
    for issue, keys, groups, choice in placed:
        location = ".".join(keys)
        if issue["type"] == "extra_forbidden":
            valid = sorted({field.alias or name for group in groups for name, field in group.model_fields.items()})
            near = difflib.get_close_matches(keys[-1], valid, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"valid keys here: {', '.join(valid) or 'none'}."
            yield f"unknown key {location!r}; {hint}"
        elif issue["type"] == "missing":
            yield f"key {location!r} is missing; give it a value."
        elif not location:
            yield f"{_reason(issue)}."
        elif choice is None or len(keys) == max(len(others) for _, others, _, of in placed if of == choice):
            reason = _FORMS[issue["type"]] + _example(keys, groups) if issue["type"] in _FORMS else _reason(issue)
            invalid.setdefault(f"{location} = {_shown(issue.get('input'))}", []).append(reason)
    for what, reasons in invalid.items():
        yield f"{what} is not valid: {', or '.join(reasons)}."


def _reason(issue: Any) -> str:
    return str(issue["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ").rstrip(".")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:150]}... ({len(text)} characters)"


_FORMS = {
    "list_type": "it must be a list, in [brackets]",
    "tuple_type": "it must be a list, in [brackets]",
    "dict_type": "it must be a group of keys, in {braces}",
    "model_type": "it must be a group of keys, in {braces}",
    "model_attributes_type": "it must be a group of keys, in {braces}",
    "string_type": "it must be text, in quotes if it looks like a number or a list",
    "path_type": "it must be a path, in quotes if it looks like a number or a date",
}
"""Pydantic's error types whose own messages speak of Python types."""


def _example(keys: list[str], groups: list[type[BaseModel]]) -> str:
    """The example in the field's own declaration, for the innermost key that has one."""
    for key in reversed(keys):
        for group in groups:
            field = group.model_fields.get(key)
            if field is not None and field.examples:
                return f", for example {field.examples[0]}"
    return ""


def _resolve(
    model: type[BaseModel], data: Any, location: tuple[Any, ...]
) -> tuple[list[str], list[type[BaseModel]], tuple[str, ...] | None]:
    """Pydantic's `location`, as keys of the file.

    Returns:
        The keys, the groups that can hold the last of them, and the key that accepts one of several types, if there is
        one.
    """
    keys: list[str] = []
    groups: list[_Group] = [(None, model)]
    holders = groups
    choice: tuple[str, ...] | None = None
    for part in location:
        chosen: list[_Group] = [(None, group) for tag, group in groups if tag is not None and tag == part]
        if chosen:
            # The tag of a union's member is part of the location, but not of the file.
            groups = holders = chosen
            continue
        # A key that Python has as a word, such as `from`, is an alias.
        named = (item for _, group in groups for item in group.model_fields.items())
        fields = [field for name, field in named if part in (name, field.alias)]
        within = data if isinstance(data, Mapping) else dict(enumerate(data)) if isinstance(data, list) else {}
        if isinstance(part, str) and not fields and part not in within:
            choice = choice or tuple(keys)  # so is the name of a type, for a key that accepts several
            continue
        keys.append(str(part))
        data, holders = within.get(part), groups
        # Indices of lists and keys of mappings lead to the same groups.
        groups = [found for field in fields for found in groups_in(field.annotation)] or groups
    return keys, [group for _, group in holders], choice


def groups_in(annotation: Any, tag: str | None = None) -> list[_Group]:
    """The settings groups in an annotation, each with its tag or None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [(tag, annotation)]
    for mark in getattr(annotation, "__metadata__", ()):
        tag = mark.tag if isinstance(mark, Tag) else tag
    return [found for argument in get_args(annotation) for found in groups_in(argument, tag)]
