r"""BR-RM: the student judges two answers in two turns, first what matters, then, with that in mind, which is better.

    first turn    names what to look at; must contain `focus`
    second turn   must end with \boxed{A} or \boxed{B}
    reward        1 for the preferred answer after two turns in this form, else `miss`

The prompt is the question; its kept columns `chosen` and `rejected` are the answers, shown as A and B in an order that
the seed draws, so that the place tells nothing. The reward is that of the whole episode; credit of an episode reaches
both turns. Source: Branch-and-Rethink reward models, arXiv 2510.23596 (inferred from the abstract: two turns, a strict
form, an outcome shared by both; the words are ours).
"""

import re
from random import Random
from typing import Any, ClassVar

from pydantic import Field

from opd.config import Settings
from opd.errors import DataError
from opd.tasks.environments.base import Observation
from opd.tasks.prompt import Prompt

_VERDICT = re.compile(r"\\boxed\{\s*([AB])\s*\}\s*\.?\s*$")


class PreferenceOptions(Settings):
    """Settings of the comparison."""

    first: str = Field(
        "\nAnswer A:\n{a}\n\nAnswer B:\n{b}\n\nName up to three things that decide which answer is better, after the "
        "word Focus:, and what you suspect of each answer. Do not decide yet.\n",
        description="What is read before the first turn, made of {a} and {b}.",
    )
    second: str = Field(
        "\nRead both answers again, only for these things. End with \\boxed{A} or \\boxed{B}, the better one.\n",
        description="What is read before the second turn.",
    )
    focus: str = Field("Focus:", min_length=1, description="Text that a well-formed first turn contains.")
    miss: float = Field(0.0, ge=-1, lt=1, description="Reward of a wrong or badly formed judgement.")


class Preference:
    """Two answers to compare in two turns (BR-RM)."""

    Options: ClassVar[type[Settings]] = PreferenceOptions

    def __init__(self, options: PreferenceOptions) -> None:
        self.options = options

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Begin an episode: the two answers.

        Raises:
            DataError: for a prompt without both.
        """
        pair = [_answer(prompt, name) for name in ("chosen", "rejected")]
        self._right = Random(seed).choice("AB")
        a, b = pair if self._right == "A" else pair[::-1]
        self._formed: list[bool] = []
        values = {"a": a, "b": b}
        return Observation(re.sub(r"\{(a|b)\}", lambda found: values[found[1]], self.options.first))

    def step(self, action: str) -> Observation:
        """Take a turn."""
        if not self._formed:
            self._formed.append(self.options.focus in action)
            return Observation(self.options.second, info={"formed": self._formed[0]})
        said = _VERDICT.search(action)
        right = all(self._formed) and said is not None and said[1] == self._right
        return Observation(
            "",
            reward=1.0 if right else self.options.miss,
            done=True,
            success=right,
            info={"formed": all(self._formed) and said is not None},
        )

    def close(self) -> None:
        """Nothing to release."""


def _answer(prompt: Prompt, column: str) -> str:
    found: Any = prompt.extra.get(column)
    if not isinstance(found, str) or not found:
        raise DataError(
            f"{prompt.name} has no text in column {column!r}, which environment preference shows; add the column to "
            "prompts.keep_columns."
        )
    return found
