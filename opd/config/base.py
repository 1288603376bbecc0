"""The base class of all settings models."""

from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, create_model, field_validator


class Settings(BaseModel):
    """A group of settings: immutable, documented by the descriptions of its fields, and strict about unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_as_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # Pydantic would turn booleans into 1 and 0, so that `steps: yes` would be a run of one step.
        if isinstance(value, bool) and info.field_name is not None:
            annotation = cls.model_fields[info.field_name].annotation
            kinds = set(get_args(annotation)) if get_origin(annotation) in (Union, UnionType) else {annotation}
            if kinds & {int, float} and bool not in kinds:
                raise ValueError("it must be a number, not true or false (YAML reads yes, no, on and off as these)")
        return value


def with_defaults(model: type[Settings], defaults: Mapping[str, Any], *, owner: type) -> type[Settings]:
    """The settings `model` with other defaults for some of its keys, whose types, bounds and descriptions stay.

    Args:
        model: the settings.
        defaults: a default for each of those keys.
        owner: the class that keeps the result as its `settings_type`, for pickle and messages.
    """
    fields: dict[str, Any] = {}
    for key, value in defaults.items():
        field = model.model_fields[key]
        kind: Any = field.annotation
        for bound in field.metadata:
            kind = Annotated[kind, bound]
        fields[key] = (kind, Field(value, description=field.description))
    # Its fields have their descriptions. Pydantic would look for source, through all modules for each caller's frame.
    docstrings = {"use_attribute_docstrings": False}
    made: type[Settings] = create_model(
        f"{owner.__name__}Settings", __base__=model, __module__=owner.__module__, __cls_kwargs__=docstrings, **fields
    )
    made.model_config["use_attribute_docstrings"] = True  # of what derives from it
    made.__qualname__ = f"{owner.__qualname__}.settings_type"
    return made
