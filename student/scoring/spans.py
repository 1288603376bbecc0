"""Aligns the tokens of two tokenizers over one text: spans between the byte offsets at which tokens of both end.

Offsets count bytes and never characters of decoded pieces, because a token may be half a character. Shapes: T tokens of
the student, U of the teacher, V ids of a tokenizer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd.wire.fingerprint import special_ids, token_bytes

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


class Vocabulary:
    """The bytes of every id of a tokenizer, as arrays.

    Args:
        tokenizer: a `transformers` tokenizer.

    Attributes:
        lengths: [V] bytes of each id's text.
        special: [V] bool, ids that stand for an event, such as the end of a turn, and not for their text.
        bytewise: [256] the id of each byte that is a token by itself; -1 for the others.
    """

    def __init__(self, tokenizer: Any) -> None:
        pieces = token_bytes(tokenizer)
        self.lengths: Ints = np.array([len(piece) for piece in pieces], np.int64)
        self.special = np.isin(np.arange(len(pieces)), sorted(special_ids(tokenizer)))
        self._starts = np.cumsum(self.lengths) - self.lengths
        self._bytes: Bytes = np.frombuffer(b"".join(pieces), np.uint8)
        self.bytewise = np.full(256, -1, np.int64)
        single = np.flatnonzero((self.lengths == 1) & ~self.special)
        self.bytewise[self._bytes[self._starts[single]]] = single

    def pieces(self) -> list[bytes]:
        """The bytes of each ordinary token by id; empty for special ones."""
        data = self._bytes.tobytes()
        ends = (self._starts + np.where(self.special, 0, self.lengths)).tolist()
        return [data[start:end] for start, end in zip(self._starts.tolist(), ends, strict=True)]

    def shown(self, token: int) -> str:
        """The text of an id for people."""
        return self.text(np.array([token])).tobytes().decode(errors="backslashreplace")

    def text(self, ids: NDArray[np.integer[Any]]) -> Bytes:
        """The bytes of the ids' texts, joined."""
        lengths = self.lengths[ids]
        ends = np.cumsum(lengths)
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
        found: Bytes = self._bytes[np.repeat(self._starts[ids], lengths) + within]
        return found


def group(student_ends: Ints, teacher_ends: Ints) -> tuple[Ints, Ints]:
    """The span of each token, as the position of the student's first token in it; -1 beyond the last common end.

    A token that ends where the one before it does, as one without text does, belongs to the same span.

    Args:
        student_ends: [T] the byte offset at which each token ends, ascending.
        teacher_ends: [U] likewise.

    Returns:
        [T] and [U]. Every span has tokens of both, which cover the same bytes.
    """
    common = np.intersect1d(student_ends, teacher_ends)
    mine, theirs = np.searchsorted(common, student_ends), np.searchsorted(common, teacher_ends)
    first = np.append(np.searchsorted(mine, np.arange(len(common))), -1)  # tokens beyond the last common end have -1
    return first[mine], first[theirs]


def boundaries(student_starts: Ints, teacher_starts: Ints) -> Ints:
    """[T] the teacher's first token that starts where each of the student's does; -1 where none does."""
    if not len(teacher_starts):
        return np.full(len(student_starts), -1, np.int64)
    place = np.minimum(np.searchsorted(teacher_starts, student_starts), len(teacher_starts) - 1)
    return np.where(teacher_starts[place] == student_starts, place, -1)


def longest_prefixes(student: Sequence[bytes], teacher: Sequence[bytes]) -> Ints:
    """[V] for each token of the teacher, the id of the student's longest token with which its bytes begin; -1 for none.

    Args:
        student: bytes by id, empty for ids that no text has.
        teacher: likewise.
    """
    known: dict[bytes, int] = {}
    for token, piece in enumerate(student):
        if piece:
            known.setdefault(piece, token)
    longest = max(map(len, known), default=0)
    found = np.full(len(teacher), -1, np.int64)
    for token, piece in enumerate(teacher):
        for size in range(min(len(piece), longest), 0, -1):
            if (other := known.get(piece[:size])) is not None:
                found[token] = other
                break
    return found


def character_ends(text: str, ends: Ints) -> Ints:
    """The byte offsets, in UTF-8, of offsets in characters."""
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
    found: Ints = np.append(0, np.cumsum(widths))[ends]
    return found
