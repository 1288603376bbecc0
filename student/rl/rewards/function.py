"""A reward from a plain Python function of a prompt and an answer, by dotted path.

    def brevity(prompt, answer):          # my_rewards.py
        return -len(answer) / 1000

    rewards: [{name: function, function: "my_rewards:brevity"}]

`prompt` is an `opd.tasks.Prompt` and `answer` the student's text. The function returns a number in any range, True or
False for 1 and 0, or None if it cannot tell. It runs in separate processes: a call that hangs or crashes leaves the
reward of its row unknown and affects no other row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from opd.tasks.function import FunctionCheck
from student.rl.rewards.asked import Asked, AskedSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opd.tasks.prompt import Prompt
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe


class FunctionSettings(AskedSettings):
    """Settings of a function as a reward."""

    function: str = Field(description="Dotted path of the function, package.module:function.")
    weight: float = Field(1.0, description="Factor of what the function returns.")
    timeout: float = Field(10.0, gt=0, description="Seconds after which the reward of a row counts as unknown.")
    workers: int = Field(
        4, ge=1, le=256, description="Maximum number of answers evaluated at the same time, each in a process."
    )


class FunctionReward(Asked[FunctionSettings]):
    """A Python function of prompt and answer, named by dotted path."""

    def __init__(self, settings: FunctionSettings) -> None:
        super().__init__(settings)
        self._check = FunctionCheck(settings.function, settings.timeout, settings.workers)
        self.label = settings.function.rpartition(":")[2]

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Import the function.

        Raises:
            ConfigError: if it cannot be imported, or its weight has no effect.
        """
        self._check.load()
        super().check(recipe, terms)

    def value(self, prompt: Prompt, answer: str) -> float | None:
        """What the function returns for an answer."""
        return self._check(prompt, answer)

    def close(self) -> None:
        """Stop the processes."""
        self._check.close()
