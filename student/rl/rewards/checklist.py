"""ACE-RL: the share of a prompt's own constraints that an answer satisfies, each judged by itself.

    whole = mean over the constraints of  1 where satisfied, 1/2 where in part, 0 where not

Constraints are a kept column of the prompts, a list or a text with one to a line. Constraints about which the judge
gives no clear word are left out of the mean; without any the reward is unknown. Source: ACE-RL (inferred from its
abstract: the levels and the question are ours).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pydantic import Field

from opd.errors import DataError
from opd.tasks.chat import ChatClient, ChatFailed, ChatSettings
from opd.tasks.judges import filled
from student.rl.rewards.asked import Asked, AskedSettings

if TYPE_CHECKING:
    from opd.tasks.prompt import Prompt

_LEVELS = {"yes": 1.0, "partly": 0.5, "no": 0.0}
_WORD = re.compile(r"\b(yes|partly|no)\b", re.IGNORECASE)


class ChecklistSettings(AskedSettings, ChatSettings):
    """Settings of the checklist."""

    column: str = Field("constraints", description="Kept column of the prompts that holds the constraints.")
    question: str = Field(
        "Question:\n{prompt}\n\nAnswer:\n{answer}\n\nDoes the answer satisfy this: {constraint}\n"
        "Say yes, partly or no.",
        description="What the judge is asked about each constraint.",
    )


class Checklist(Asked):
    """The reward; see the module for the formula."""

    settings_type = ChecklistSettings
    settings: ChecklistSettings
    evidence = "inferred"

    def __init__(self, settings: ChecklistSettings) -> None:
        super().__init__(settings)
        self.client = ChatClient(settings)

    def value(self, prompt: Prompt, answer: str) -> float | None:
        """See the module.

        Raises:
            DataError: for a prompt without constraints.
        """
        found = prompt.extra.get(self.settings.column)
        constraints = found.splitlines() if isinstance(found, str) else list(found or [])
        if not constraints:
            raise DataError(
                f"{prompt.name} has no column {self.settings.column!r}, which reward checklist reads its constraints "
                "from; name it in prompts.keep_columns."
            )
        levels = [level for constraint in constraints if (level := self._level(prompt, answer, str(constraint))) >= 0]
        return sum(levels) / len(levels) if levels else None

    def _level(self, prompt: Prompt, answer: str, constraint: str) -> float:
        """How far a constraint is satisfied; -1 where that is not known."""
        text = filled(self.settings.question, prompt, answer, constraint=constraint)
        try:
            words = _WORD.findall(self.client.ask([{"role": "user", "content": text}]))
        except ChatFailed:
            return -1.0
        return _LEVELS[words[-1].lower()] if words else -1.0
