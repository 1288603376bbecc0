"""Finds the tokens of a response that hold a given text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def pieces_of(ids: Iterable[int], tokenizer: Any) -> list[str]:
    """The text of each token alone; joined, they are the response except for characters made of several tokens."""
    return [str(tokenizer.decode([int(token)])) for token in ids]


def ends_of(pieces: Sequence[str], mark: str) -> list[int]:
    """The number of tokens up to and including the end of each `mark`; marks do not overlap."""
    text, ends, found = "".join(pieces), [], 0
    for piece in pieces:
        found += len(piece)
        ends.append(found)
    places: list[int] = []
    start = text.find(mark)
    while start >= 0:
        stop = start + len(mark)
        # A token that contains the end of the mark and more text counts as the mark's last token.
        places.append(next(i for i, end in enumerate(ends) if end >= stop) + 1)
        start = text.find(mark, stop)
    return sorted(set(places))


def tokens_of(pieces: Sequence[str], span: str) -> range:
    """The tokens that hold any part of the first occurrence of `span`; an empty range if it does not occur."""
    start = "".join(pieces).find(span) if span else -1
    if start < 0:
        return range(0)
    stop, found, first = start + len(span), 0, -1
    for index, piece in enumerate(pieces):
        if first < 0 and found + len(piece) > start:
            first = index
        found += len(piece)
        if found >= stop:
            return range(first, index + 1)
    return range(0)
