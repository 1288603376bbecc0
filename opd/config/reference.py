"""Every key of a settings model with default and meaning, read off the model itself."""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined


def describe_keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted key, default, description) of every leaf key of `model`, groups flattened, in order of declaration.

    Args:
        model: a settings model.
        prefix: put before every key, with its dot.
    """
    for name, field in model.model_fields.items():
        groups = [m for m in _models(field.annotation) if m.model_fields]
        if len(groups) == 1 and not _is_collection(field.annotation):
            yield from describe_keys(groups[0], f"{prefix}{name}.")
            continue
        default = field.get_default(call_default_factory=True, validated_data={})
        text = "required" if default is PydanticUndefined else repr(default)
        yield f"{prefix}{name}", text, " ".join((field.description or "").split())
        for group in groups:
            tag = group.__name__.removesuffix("Settings").lower()
            yield from describe_keys(group, f"{prefix}{name}({tag}).")


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for argument in get_args(annotation) for found in _models(argument)]


def _is_collection(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) in (list, dict, tuple)
