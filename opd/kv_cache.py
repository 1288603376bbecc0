"""Models of transformers call their cache of keys and values `cache` since 5.24 and `past_key_values` before.

A name is looked up in the model itself, so that any version, and a model with code of its own, is called by its names.
"""

import inspect
from functools import cache
from typing import Any


def reading(model: Any, kept: Any) -> dict[str, Any]:
    """The arguments with which `model` reads and extends the cache `kept`."""
    return {_name(type(model).forward): kept, "use_cache": True}


def kept_by(outputs: Any) -> Any:
    """The cache that a model returned; None for a model that keeps something else."""
    return outputs.get("cache", outputs.get("past_key_values"))


@cache
def _name(forward: Any) -> str:
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"
