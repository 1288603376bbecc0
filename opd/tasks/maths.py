"""Verification of free-form mathematical answers with math-verify, in a worker process with a time limit.

math-verify limits its own time with SIGALRM, which works only in a main thread; the worker's limit works everywhere,
and also ends checks that hang inside sympy.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

from opd.procs.children import Answer, ChildFailed
from opd.procs.host import Service
from opd.procs.workers import Workers
from opd.tasks.prompt import Prompt
from opd.tasks.verdict import NO_REFERENCE, Verdict, Verifier

_MOST_LATE = 10_000
_MOST_MIB = 2048
"""Memory of a worker. Within a check's time, sympy expands (1+x)^{1000000} to gigabytes."""

_THOUGHT = re.compile(r"</think(?:ing)?>|\[/THINK\]")
_SCIENTIFIC = re.compile(r"(?<![\w.])(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d{1,3}(?!\w|\.\d)")
_MIXED = re.compile(r"(?<![\w.,/^])(\d{1,9}) {1,3}(\d{1,9})/(\d{1,9})(?!\w|[.,]\d)")
_NOT_UNITS = "times|less|more|fewer|plus|minus|over|squared|cubed|factorial|choose|modulo|percent|only|sqrt|frac"
_SHORT_UNITS = "cup|egg|bag|box|day|pen|car|man|men|cow|dog|cat|bus|ton|kid|can|pie|jar|toy|hat|way|set|row|won|yen"
_UNITS = re.compile(
    rf"(?<=[\d}}])\s+(?!(?:{_NOT_UNITS})\b)(?:[A-Za-z]{{4,}}|{_SHORT_UNITS})\b"
    r"(?: (?!and\b)(?:of|per|in|an?|[A-Za-z]{3,})\b){0,3}\s*(?=\}|\$(?![\w\\({-])|\\\)|\\\])"
)
"""Words right behind a number at the end of a formula: math-verify knows most units, and reads others as variables."""


_SYMBOL = re.compile(
    r"[\d}](?:\s|~|\\[,;:! ])*(?:\\(?:text|mathrm|rm|textrm) *\{\s*)?([kcdm]?[mgsl]|[cdhot])\s*\}?\s*(?:\\?\.)?\s*$"
)
"""A symbol of a unit behind a number at the end of an answer, of those that math-verify drops: m, km, g, s, h, ..."""


class MathVerifier(Verifier):
    r"""Mathematical equality of the final answer (math-verify).

    Correct if the completion's final answer equals the reference mathematically, for example 1/2 and 0.5.

    The final answer is sought behind the thinking (</think>), and in it only if nothing mathematical follows.
    A unit may be left out, or given where the reference has none; "5 g" is not "5 m", though.
    The reference may be plain ("42", "\frac{1}{2}") or have its own `$...$` or `\boxed{...}`. Unknown without a
    reference, if it cannot be parsed, or if a check fails or takes more than `timeout` seconds. Source: `parse` and
    `verify` of math-verify, with their default extraction. A completion that is verified and extracted has `timeout`
    seconds for both: where one ran out of time, the other is not tried.
    """

    def __init__(self, timeout: float = 10.0) -> None:
        self._workers = Workers("opd.tasks.maths:Equality", timeout, memory_mib=_MOST_MIB)
        self._late: dict[int, str] = {}

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        if prompt.answer is None:
            return Verdict.unknown(NO_REFERENCE)
        try:
            answer = self._ask("verify", completion, {"reference": prompt.answer, "completion": completion})
        except ChildFailed as error:
            return Verdict.unknown(str(error))
        return Verdict.of(bool(answer["right"]), str(answer["reason"]))

    def extract(self, prompt: Prompt, completion: str) -> str | None:
        """The final answer, with numbers as exact fractions, so that 1/2 and 0.5 are equal; None if there is none."""
        try:
            return self._ask("extract", completion, {"extract": completion})["answer"]
        except ChildFailed:
            return None

    def _ask(self, kind: str, completion: str, request: Answer) -> Answer:
        """Ask a worker, unless the other kind of check has run out of time on the same completion."""
        key = hash(completion)
        if self._late.get(key, kind) != kind:
            self._late.pop(key, None)
            raise ChildFailed("hung", "the answer took too long before")
        try:
            return self._workers.ask(request)
        except ChildFailed as error:
            if error.kind == "hung":
                if len(self._late) >= _MOST_LATE:
                    self._late.clear()
                self._late[key] = kind
            raise

    def close(self) -> None:
        """Stop the worker processes."""
        self._workers.close()


class Equality(Service):
    """The service: compares and extracts answers, see `check`."""

    def __init__(self, argument: str) -> None:
        super().__init__(argument)
        import math_verify  # noqa: F401

    def answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        return check(request)


def check(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """In the worker: compare request["completion"] with request["reference"], or extract from request["extract"]."""
    from math_verify import verify

    if "extract" in request:
        return {"answer": _canonical(_answered(request["extract"])[1])}
    completion, found = _answered(request["completion"])
    reference = _reference(request["reference"])
    if not found:
        return {"right": False, "reason": "the completion contains no mathematical answer"}
    right = verify(reference, found, timeout_seconds=None, raise_on_error=True)
    right = right and not _other_symbol(request["reference"], completion)
    return {"right": bool(right), "reason": "" if right else f"expected {request['reference'][:80]}"}


def _answered(completion: str) -> tuple[str, list[Any]]:
    """The text that holds the final answer, and what that may mean: what follows the thinking if it has an answer."""
    after = _THOUGHT.split(completion)[-1]
    found = _read(after)
    return (after, found) if found or after == completion else (completion, _read(completion))


def _read(text: str) -> list[Any]:
    """What the final answer of a text may mean, most likely first; empty if there is none."""
    from math_verify import parse
    from sympy import Basic, E

    written = _MIXED.sub(_improper, _SCIENTIFIC.sub(lambda number: f"{Decimal(number[0]):f}", text))
    written = written.replace("°", r"^{\circ}")
    found = parse(written, parsing_timeout=None, raise_on_error=True)
    if _UNITS.search(written):
        found = [*parse(_UNITS.sub("", written), parsing_timeout=None, raise_on_error=True), *found]
    if _SCIENTIFIC.search(text):
        # Within a formula, 2e-1 may mean twice Euler's number minus 1.
        other = parse(text, parsing_timeout=None, raise_on_error=True)
        found = [*found, *(one for one in other if isinstance(one, Basic) and one.has(E))]
    return list(found)


def _other_symbol(reference: str, completion: str) -> bool:
    """Whether two equal numbers have different symbols of units, or variables, which math-verify takes for units."""
    symbols = [_SYMBOL.search(_final(text)) for text in (reference, completion)]
    return symbols[0] is not None and symbols[1] is not None and symbols[0][1] != symbols[1][1]


def _final(text: str) -> str:
    r"""What stands in the last \boxed{} of a text, else in its last formula, else all of it."""
    _, boxed, inside = text.rpartition(r"\boxed{")
    if boxed:
        depth = 1
        for place, sign in enumerate(inside):
            depth += (sign == "{") - (sign == "}")
            if not depth:
                return inside[:place]
    formulas = re.findall(r"(?<!\\)\$([^$]+)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", text, re.DOTALL)
    return max(formulas[-1]) if formulas else text


def _improper(mixed: re.Match[str]) -> str:
    """1 1/2 as 3/2, because math-verify reads it as (1 + 1)/2; "12 34/5" is left as it is."""
    whole, over, under = map(int, mixed.groups())
    return str(whole + Fraction(over, under)) if 0 < over < under else mixed[0]


def _canonical(found: Any) -> str | None:
    """One text for equal numbers; expressions are compared as they are written."""
    from sympy import Basic, nsimplify

    if not found:
        return None
    answer = found[0]
    return str(nsimplify(answer, rational=True) if isinstance(answer, Basic) and answer.is_number else answer)


@lru_cache(maxsize=4096)
def _reference(text: str) -> Any:
    # An escaped dollar is a currency sign, and \\[ may be a line of a matrix.
    marked = re.search(r"(?<!\\)(\$|\\boxed|\\\(|\\\[)", text)
    # Answers in data sets have no delimiters, and a bare fraction would be read as its digits.
    for form in [text] if marked else [f"\\boxed{{{text}}}", text]:
        parsed = _read(form)
        if parsed:
            return parsed
    raise ValueError(f"the reference answer {text[:80]!r} cannot be parsed")
