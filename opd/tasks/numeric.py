"""Verification of numbers, without an expression parser: the last number of an answer against the reference."""

import math
import re

from opd.tasks.prompt import Prompt
from opd.tasks.verdict import Verdict

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w])")
TOLERANCE = 1e-6
"""Relative difference at which two numbers are the same; absolute below 1."""


class NumericVerifier:
    """Correct when the last number in the completion is the reference's, within a relative 1e-6.

    Thousands may be set apart by commas. Unknown without a reference that is a number.
    """

    def __init__(self, timeout: float = 10.0) -> None:
        self.timeout = timeout

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """See `Verifier.verify`."""
        wanted = last_number(prompt.answer or "")
        if wanted is None:
            return Verdict.unknown("the prompt has no number as its answer")
        found = last_number(completion)
        if found is None:
            return Verdict.of(False, "the completion holds no number")
        return Verdict.of(math.isclose(found, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE), f"expected {wanted:g}")

    def extract(self, prompt: Prompt, completion: str) -> str | None:
        """The last number; equal numbers have equal texts."""
        found = last_number(completion)
        return None if found is None else f"{found:.6g}"

    def close(self) -> None:
        """Nothing to release."""


def last_number(text: str) -> float | None:
    """The last finite number in a text, None where there is none."""
    for match in reversed(_NUMBER.findall(text)):
        value = float(match.replace(",", ""))
        if math.isfinite(value):
            return value
    return None
