"""The base class of all settings models."""

from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


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
