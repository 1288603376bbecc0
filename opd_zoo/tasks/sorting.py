"""Sorting with scratch work: a family of problems that has only the form of its answers in common with arithmetic.

A prompt is "dbca=" and its worked solution "d bd bcd abcd:abcd": the letters so far in order, one letter more each time
(insertion sort), then the result after a colon. Only the result is verified.
"""

import string
from random import Random
from typing import ClassVar

from pydantic import Field

from opd.config import Settings
from opd.tasks.prompt import Prompt
from opd.tasks.source import Labels
from opd.tasks.verdict import Verdict


class SortingOptions(Settings):
    """The size of the problems."""

    letters: int = Field(default=4, ge=2, le=16, description="Number of different letters to put in order.")


class Sorting:
    """Letters put in order, with every step of an insertion sort.

    Letters to be sorted; `Prompt.extra["solution"]` holds the worked solution.
    """

    Options: ClassVar[type[Settings]] = SortingOptions
    domain = "sorting"

    def __init__(self, options: SortingOptions) -> None:
        self.options = options

    def draw(self, random: Random) -> Prompt:
        """Draw a problem."""
        letters = random.sample(string.ascii_lowercase, self.options.letters)
        steps = ["".join(sorted(letters[:count])) for count in range(1, len(letters) + 1)]
        solution = f"{' '.join(steps)}:{steps[-1]}"
        return Prompt.make(f"{''.join(letters)}=", answer=steps[-1], domain=self.domain, extra={"solution": solution})

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """Compare what follows the last colon with the sorted letters."""
        result = completion.rpartition(":")[2].strip()
        return Verdict.of(result == prompt.answer, f"the order is {prompt.answer}, not {result[:40]!r}")

    def labels(self) -> Labels:
        """All problems have the domain of the task and no teacher."""
        return frozenset({(None, self.domain)})

    def close(self) -> None:
        """Nothing to release."""
