"""What rows of one prompt share, so that a model reads it once: their micro-batches, and their ids in two parts.

    prefix      [G, P]     for each prompt of a micro-batch, the ids with which all of its sequences begin
    the rest    [B, L]     of each sequence, read after the keys and values of its prefix

A prefix is at least the prompt. It is longer where all sequences also begin their responses alike, as the branches of
an episode do, and ends before the last token of the shortest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from student.data.row import Row

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from numpy.typing import NDArray
    from torch import Tensor

_REPEATED = 8

Apart = tuple[str, tuple[tuple[str, float], ...]]


class Prefixes(NamedTuple):
    """The prefixes of a micro-batch.

    Attributes:
        ids: [G, P] int64, right-padded with 0.
        lengths: [G] int64, number of tokens of each.
        of: [B] int64, the prefix that each sequence continues.
    """

    ids: Int[Tensor, "g p"]
    lengths: Int[Tensor, " g"]
    of: Int[Tensor, " b"]

    @property
    def spared(self) -> Float[Tensor, ""]:
        """Number of positions that are not read again."""
        return self.lengths[self.of].double().sum() - self.lengths.sum()


def split_groups(
    rows: Sequence[Row], max_tokens: int, *, by_teacher: bool = False, shortest_first: bool = False
) -> list[list[int]]:
    """As `student.data.batch.split`, with rows of one prompt together, whose prompt counts once.

    A group that is over the budget is split, and its prompt is read in each part.

    Args:
        rows: the step's rows.
        max_tokens: bound on `shared_tokens` of a micro-batch.
        by_teacher: keep rows of different teachers apart.
        shortest_first: groups by the length of their longest row upwards, instead of downwards.
    """
    by_teacher = by_teacher or any(row.teachers for row in rows)
    sign = 1 if shortest_first else -1
    groups: dict[tuple[Apart, bytes], list[int]] = {}
    for i in sorted(range(len(rows)), key=lambda i: (sign * rows[i].longest, i)):
        apart = (rows[i].teacher, rows[i].teachers) if by_teacher else ("", ())
        groups.setdefault((apart, rows[i].prompt_ids.tobytes()), []).append(i)

    def longest(part: Sequence[int]) -> int:
        return max(rows[i].longest for i in part)

    parts: list[list[int]] = []
    kind: Apart | None = None
    for (mine, _), group in sorted(groups.items(), key=lambda g: (g[0][0], sign * longest(g[1]), g[1][0])):
        for some in _within(rows, group, max_tokens):
            if parts and mine == kind and _padded(rows, [*parts[-1], *some]) <= max_tokens:
                parts[-1] += some
            else:
                parts.append(some)
            kind = mine
    return sorted(parts, key=longest) if shortest_first else parts


def _within(rows: Sequence[Row], group: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """The rows of a group in parts, each within the budget if it has more than one row."""
    part: list[int] = []
    for i in group:
        if part and _padded(rows, [*part, i]) > max_tokens:
            yield part
            part = []
        part.append(i)
    yield part


def _sequences(rows: Sequence[Row], part: Sequence[int]) -> dict[bytes, list[Row]]:
    found: dict[bytes, list[Row]] = {}
    for i in part:
        found.setdefault(rows[i].prompt_ids.tobytes(), []).extend([rows[i]] * len(rows[i].sequences))
    return found


def shared_tokens(prefixes: int, prefix: int, sequences: int, rest: int) -> int:
    """Padded tokens that a micro-batch counts, with prefixes of `prefix` tokens and `rest` tokens of each sequence.

    The keys and values that are repeated for each sequence take less than an eighth of what is kept of a token.
    """
    return prefixes * prefix + sequences * (rest + prefix // _REPEATED)


def _padded(rows: Sequence[Row], part: Sequence[int]) -> int:
    """Padded tokens of a micro-batch, where the prefix of several sequences is their prompt."""
    prefixes, rest, count = 0, 0, 0
    groups = _sequences(rows, part).values()
    for several in groups:
        longest = max(row.longest for row in several)
        prefix = len(several[0].prompt_ids) if len(several) > 1 else longest - 1
        prefixes, rest, count = max(prefixes, prefix), max(rest, longest - prefix), count + len(several)
    return shared_tokens(len(groups), prefixes, count, rest)


def spared(rows: Sequence[Row], parts: Sequence[Sequence[int]]) -> int:
    """Number of prompt tokens that are not read again if the rows of each of `parts` share their prompts."""
    groups = (several for part in parts for several in _sequences(rows, part).values())
    return sum((len(several) - 1) * len(several[0].prompt_ids) for several in groups)


def cut(
    texts: Sequence[NDArray[np.uint32]], prompts: Sequence[bytes]
) -> tuple[list[NDArray[np.uint32]], list[int], list[NDArray[np.uint32]]]:
    """Cut what sequences share off their beginnings.

    Args:
        texts: for each of B sequences, its ids.
        prompts: for each, its prompt; sequences of one prompt share a prefix.

    Returns:
        The prefixes; for each sequence the index of its own; and for each sequence what follows.
    """
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    of = [numbers[prompt] for prompt in prompts]
    prefixes = []
    for number in range(len(numbers)):
        mine = [text for text, its in zip(texts, of, strict=True) if its == number]
        common = np.stack([text[: min(map(len, mine)) - 1] for text in mine])
        differs = (common != common[0]).any(0)
        prefixes.append(common[0, : differs.argmax() if differs.any() else None])
    return prefixes, of, [text[len(prefixes[number]) :] for text, number in zip(texts, of, strict=True)]
