"""Fenced blocks in answers, as Markdown writes them."""

import re

_OPENING = r"```[a-zA-Z0-9+]*[^\S\n]*\n"
_FENCED = re.compile(_OPENING + "(.*?)```", re.DOTALL)
_UNCLOSED = re.compile(_OPENING + "(.*)", re.DOTALL)


def fenced(text: str) -> list[str]:
    """What stands in the fences that are closed, in order."""
    return _FENCED.findall(text)


def unclosed(text: str) -> str | None:
    """What follows the first fence, for a text in which none is closed; None without a fence."""
    found = _UNCLOSED.search(text)
    return None if found is None else str(found[1])
