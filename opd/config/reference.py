"""Every key of a settings model with its default and meaning, taken from the model itself."""

import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from opd.config.load import groups_in


def describe_keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted key, default in YAML, description) of every leaf key of `model`, in the order of declaration.

    Args:
        model: a settings model; its groups are flattened.
        prefix: prepended to every key, including its dot.
    """
    for name, field in model.model_fields.items():
        groups = [group for _, group in groups_in(field.annotation) if group.model_fields]
        if len(groups) == 1 and not _is_collection(field.annotation):
            yield from describe_keys(groups[0], f"{prefix}{name}.")
            continue
        default = field.get_default(call_default_factory=True, validated_data={})
        text = "required" if default is PydanticUndefined else _as_yaml(default)
        yield f"{prefix}{name}", text, _describe_key(model, name)
        for group in groups:
            tag = group.__name__.removesuffix("Settings").lower()
            yield from describe_keys(group, f"{prefix}{name}({tag}).")


def _as_yaml(value: Any) -> str:
    """A default as it would be written in a recipe."""
    try:
        text: str = yaml.safe_dump(value, default_flow_style=True, width=1000)
    except yaml.YAMLError:
        return repr(value)
    return text.removesuffix("\n...\n").strip()


def _describe_key(model: type[BaseModel], key: str) -> str:
    """The description of a key of `model` on one line, with its choices if the text does not name all of them.

    In pydantic, a field that redefines an inherited one to change its default loses the description; here it keeps it.
    """
    bases = [base for base in model.mro() if issubclass(base, BaseModel)]
    known = (base.model_fields[key].description for base in bases if key in base.model_fields)
    text = next((" ".join(text.split()) for text in known if text), "")
    choices = _choices(model.model_fields[key].annotation)
    if all(re.search(rf"\b{re.escape(choice)}\b", text) for choice in choices):
        return text
    return f"{text} One of {', '.join(choices)}.".lstrip()


def _choices(annotation: Any) -> list[str]:
    """The words that a key accepts; [] if it accepts anything else apart from null."""
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    if get_origin(annotation) not in (Union, UnionType):
        return []
    parts = [_choices(part) for part in get_args(annotation) if part is not NoneType]
    return [choice for part in parts for choice in part] if all(parts) else []


def _is_collection(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) in (list, dict, tuple)
