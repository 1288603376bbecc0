"""ACE-RL: the share of a prompt's own constraints that an answer satisfies, each judged separately.

    whole = mean over the constraints of  1 where satisfied, 1/2 where in part, 0 where not

Constraints are a kept column of the prompts, a list or a text with one constraint per line. Constraints on which the
judge gives no clear word are left out of the mean; if none remains, the reward is unknown. It is also unknown if the
judge fails on one of them: a mean over those it happened to answer would be over other constraints in every row.
Source: ACE-RL, arXiv 2509.04903 (inferred from its abstract: the levels and the question are ours).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from opd.tasks.judges import filled
from opd_zoo.asked_chat import AskedChat, AskedChatSettings
from opd_zoo.asking import word_of
from opd_zoo.criteria import entries_of
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opd.tasks.prompt import Prompt

_LEVELS = {"yes": 1.0, "partly": 0.5, "no": 0.0}


class ChecklistSettings(AskedChatSettings):
    """Settings of the checklist."""

    column: str = Field("constraints", description="Kept column with the prompt's constraints (prompts.keep_columns).")
    question: str = Field(
        "Question:\n{prompt}\n\nAnswer:\n{answer}\n\nDoes the answer satisfy this: {constraint}\n"
        "Say yes, partly or no.",
        description="What the judge is asked about each constraint.",
    )


class Checklist(AskedChat[ChecklistSettings]):
    """The share of a prompt's constraints that a judge finds satisfied (ACE-RL)."""

    evidence = "inferred"

    @property
    def traits(self) -> Traits:
        return Traits(columns=(self.settings.column,))

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts without constraints.

        Raises:
            DataError: naming the first of them.
        """
        for prompt in prompts:
            self._constraints(prompt)

    def value(self, prompt: Prompt, answer: str) -> float | None:
        """The mean level over the constraints; None if the judge gives a clear word on none.

        Raises:
            DataError: for a prompt without constraints.
            ChatFailed: if the judge gave no answer.
        """
        levels = [self._level(prompt, answer, str(constraint)) for constraint in self._constraints(prompt)]
        clear = [level for level in levels if level is not None]
        return sum(clear) / len(clear) if clear else None

    def _constraints(self, prompt: Prompt) -> list[Any]:
        return entries_of(prompt, self.settings.column, "reward checklist reads the constraints")

    def _level(self, prompt: Prompt, answer: str, constraint: str) -> float | None:
        """How far a constraint is satisfied, 0 to 1; None if the judge gives no clear word."""
        text = filled(self.settings.question, prompt, answer, constraint=constraint)
        word = word_of(self.client, text, _LEVELS)
        return None if word is None else _LEVELS[word]
