"""Functions as rewards, in a module that is quick to import: each worker process imports it."""

from typing import Any


def length(prompt: Any, answer: str) -> float:
    """The answer's length."""
    return len(answer) / 10
