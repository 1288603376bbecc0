"""Composing prompts that are already solved into longer ones, whose answer needs the first one's (Composition-RL).

    composed  =  the first problem,  "Let X be the answer to it.",  "Y is D more than X.",
                 the second problem with one of its numbers replaced by Y
    answer    =  the second problem's;   depth = the sum of both depths

D is the replaced number minus the first answer, exactly, in decimals. A composition is kept only if substituting the
numbers gives both problems back, no intermediate answer can be read in the text, and neither problem contains the
symbols. The replaced number must occur only once in the second problem and is drawn by `seed`. Answers must be numbers.
Composing compositions again gives greater depths.

By default a template links the two problems; `opd_zoo.compose.chat` instead asks a chat model what the first answer
is called and which number of the second problem carries it. After Composition-RL, arXiv 2602.12036, and its released
data pipeline.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from random import Random
from typing import Any, Protocol

from opd.tasks.prompt import Prompt

SYMBOLS = ("X", "Y", "P", "Q", "K", "M", "N", "R", "U", "W")
_TRIES = 20
"""Most pairs that are tried per composition wanted."""
_NUMBER = re.compile(r"(?<![\w.,])\d+(?:\.\d+)?(?![\w]|[.,]\d)")


class PairRefused(Exception):
    """Two problems cannot be composed; the message says why in a few words."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem whose answer is a number.

    Attributes:
        text: the problem.
        answer: the number, as text.
        depth: number of problems in it.
        parts: uids of these problems.
        hidden: answers to all of them except the last, which must not appear in the text.
    """

    text: str
    answer: str
    depth: int = 1
    parts: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()

    @classmethod
    def of(cls, row: Mapping[str, Any], *, prompt_column: str = "prompt", answer_column: str = "answer") -> "Problem":
        """The problem in a row of a table.

        Raises:
            PairRefused: if its prompt is not text or its answer is not a number.
        """
        text, answer = row.get(prompt_column), row.get(answer_column)
        if not isinstance(text, str) or not text.strip():
            raise PairRefused("the prompt is not plain text")
        if number(answer) is None:
            raise PairRefused("the answer is not a number")
        parts = tuple(str(part) for part in row.get("parts") or ()) or (Prompt.make(text).uid,)
        hidden = tuple(str(one) for one in row.get("hidden") or ())
        return cls(text.strip(), str(answer).strip(), int(row.get("depth") or 1), parts, hidden)


@dataclass(frozen=True, slots=True)
class Link:
    """How the second problem depends on the first.

    Attributes:
        definition: a sentence that names the first answer {first}.
        replaced: (start, end) of the replaced number in the second problem's text.
    """

    definition: str
    replaced: tuple[int, int]


class Linker(Protocol):
    """Finds how one problem can depend on another."""

    def __call__(self, first: Problem, second: Problem, random: Random) -> Link:
        """Find a link between two problems.

        Raises:
            PairRefused: if there is none.
        """


def by_template(first: Problem, second: Problem, random: Random) -> Link:
    """The template "Let {first} be the answer to the problem above." with a random number that occurs just once."""
    lone = lone_numbers(second.text)
    if not lone:
        raise PairRefused("the second problem has no number that stands in it once")
    return Link("Let {first} be the answer to the problem above.", lone[random.randrange(len(lone))])


def compose(first: Problem, second: Problem, link: Link) -> Problem:
    """The composition of two problems.

    Raises:
        PairRefused: if it fails a check.
    """
    start, end = link.replaced
    carried, known = number(second.text[start:end]), number(first.answer)
    if carried is None or known is None:
        raise PairRefused("the link names no number")
    if set(first.parts) & set(second.parts):
        raise PairRefused("a problem would occur in it twice")
    free = [s for s in SYMBOLS if not re.search(rf"\b{s}\b", f"{first.text} {second.text} {link.definition}")]
    if len(free) < 2:
        raise PairRefused("no symbol is free")
    one, two = free[:2]
    definition = link.definition.replace("{first}", one)
    changed = second.text[:start] + two + second.text[end:]
    text = f"{first.text}\n\n{definition} {relation(one, two, carried - known)}\n\n{changed}"
    _check(first, second, text, changed, (one, two))
    hidden = (*first.hidden, first.answer, *second.hidden)
    if {number(answer) for answer in hidden} & {number(found) for found in _NUMBER.findall(text)}:
        raise PairRefused("an intermediate answer can be read in the text")
    return Problem(text, second.answer, first.depth + second.depth, (*first.parts, *second.parts), hidden)


def relation(one: str, two: str, difference: Decimal) -> str:
    """A sentence that defines `two` by `one`, such as "Y is 3 more than X."."""
    if not difference:
        return f"{two} equals {one}."
    return f"{two} is {plain(abs(difference))} {'more' if difference > 0 else 'less'} than {one}."


def _check(first: Problem, second: Problem, text: str, changed: str, symbols: tuple[str, str]) -> None:
    """Read the composition back from its text alone and compare it with its parts.

    Raises:
        PairRefused: at the first difference.
    """
    one, two = symbols
    said = re.search(rf"\b{two} (?:equals {one}\.|is (\S+) (more|less) than {one}\.)", text)
    if said is None:
        raise PairRefused("the relation cannot be read again")
    step = number(said[1] or "0") or Decimal(0)
    known = number(first.answer) or Decimal(0)
    value = known + (step if said[2] != "less" else -step)
    back = re.sub(rf"\b{two}\b", plain(value), changed)
    if [number(n) for n in _NUMBER.findall(back)] != [number(n) for n in _NUMBER.findall(second.text)]:
        raise PairRefused("putting the numbers back gives another problem")


def compositions(
    problems: Sequence[Problem], seeds: Sequence[Problem], linker: Linker, *, count: int, seed: int
) -> Iterator[Problem | str]:
    """Up to `count` compositions, each of a problem from `problems` followed by one from `seeds`, in random order.

    Args:
        problems: the problems that come first.
        seeds: the problems that come second, whose answers are those of the compositions.
        linker: finds how the second depends on the first.
        count: how many are wanted.
        seed: decides pairs and numbers.

    Yields:
        Compositions, all different, and for each pair that gave none the reason.
    """
    random, made = Random(f"{seed}/compose"), set[str]()
    pairs = len(problems) * len(seeds)
    for place in random.sample(range(pairs), min(pairs, _TRIES * count)):
        if len(made) >= count:
            return
        first, second = problems[place // len(seeds)], seeds[place % len(seeds)]
        try:
            found = compose(first, second, linker(first, second, random))
        except PairRefused as reason:
            yield str(reason)
            continue
        if found.text not in made:
            made.add(found.text)
            yield found


def lone_numbers(text: str) -> list[tuple[int, int]]:
    """(start, end) of the numbers that occur only once in a text."""
    found = list(_NUMBER.finditer(text))
    values = [number(match[0]) for match in found]
    return [match.span() for match, value in zip(found, values, strict=True) if values.count(value) == 1]


def number(text: Any) -> Decimal | None:
    """A finite number, exactly; commas may separate thousands. None for anything else."""
    try:
        found = Decimal(str(text).strip().replace(",", ""))
    except InvalidOperation:
        return None
    return found if found.is_finite() else None


def plain(value: Decimal) -> str:
    """A number without an exponent or trailing zeros."""
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
