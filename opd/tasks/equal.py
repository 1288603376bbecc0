"""Verification by equality: of whole texts, or of the last numbers in them, without an expression parser."""

import math
import re

from opd.tasks.prompt import Prompt
from opd.tasks.verdict import NO_REFERENCE, PlainVerifier, Verdict

_NUMBER = re.compile(
    r"(?<![\w.])(?!\d+(?:st|nd|rd|th)\b)"
    r"([-+]?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?(?:[eE][-+]?\d+)?)(?:/([1-9]\d*))?"
)
"""A number and an optional divisor, not within a word or ordinal; a unit may follow directly, as in "1.5cm"."""
TOLERANCE = 1e-6
"""Relative difference up to which two numbers are equal; absolute if the reference is 0."""


class ExactVerifier(PlainVerifier):
    """The completion equals the answer, white space aside.

    Correct if the completion equals the answer after normalising white space; unknown without an answer.
    """

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        if prompt.answer is None:
            return Verdict.unknown(NO_REFERENCE)
        return Verdict.of(completion.split() == prompt.answer.split(), f"expected {prompt.answer[:80]!r}")


class NumericVerifier(PlainVerifier):
    """The last number of the completion equals the answer's.

    Correct if the last number in the completion equals the reference, within a relative 1e-6.

    Commas may separate thousands, and a/b is a number. Unknown if the reference is not a number.
    """

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        if prompt.answer is None:
            return Verdict.unknown(NO_REFERENCE)
        wanted = last_number(prompt.answer)
        if wanted is None:
            return Verdict.unknown("the prompt's reference answer is not a number")
        found = last_number(completion)
        if found is None:
            return Verdict.of(False, "the completion contains no number")
        return Verdict.of(abs(found - wanted) <= TOLERANCE * (abs(wanted) or 1.0), f"expected {wanted:g}")

    def extract(self, prompt: Prompt, completion: str) -> str | None:
        """The last number, formatted so that equal numbers have equal texts."""
        found = last_number(completion)
        return None if found is None else f"{found:.6g}"


def last_number(text: str) -> float | None:
    """The last finite number in a text; None if there is none."""
    # Typeset answers use the mathematical minus sign.
    for number, divisor in reversed(_NUMBER.findall(text.replace("\u2212", "-"))):
        value = float(number.replace(",", "").replace("$", "")) / float(divisor or 1)
        if math.isfinite(value):
            return value
    return None
