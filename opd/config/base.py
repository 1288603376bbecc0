"""The base of every settings model."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A group of settings: immutable, documented by its fields' descriptions, and strict about unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
