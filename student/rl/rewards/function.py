"""A reward from a plain function of a prompt and an answer, by dotted path.

    def brevity(prompt, answer):          # my_rewards.py
        return -len(answer) / 1000

    rewards: [{name: function, function: "my_rewards:brevity"}]

`prompt` is an `opd.tasks.Prompt` and `answer` the student's text. The function returns a number in any range, True or
False for 1 and 0, or None where it cannot tell. It runs in processes of its own: a call that hangs or crashes leaves
the reward of its row unknown and disturbs no other.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from opd.tasks.function import FunctionCheck
from opd.tasks.worker import CheckFailed
from student.rl.rewards.base import Reward, RewardSettings
from student.scoring.needs import Needs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.row import Row
    from student.learning.terms import Term
    from student.recipe import Recipe
    from student.rl.rewards.base import RewardServices


class FunctionSettings(RewardSettings):
    """Settings of a function as a reward."""

    function: str = Field(description="Dotted path package.module:function.")
    adds: bool = Field(False, description="Add to the verdict, as a part, instead of standing in for it.")
    weight: float = Field(1.0, description="Multiplies what the function returns.")
    timeout: float = Field(10.0, gt=0, description="Seconds after which the reward of a row is unknown.")
    workers: int = Field(4, ge=1, le=256, description="Answers looked at at the same time, each in a process.")


class FunctionReward(Reward):
    """The reward; see the module."""

    settings_type = FunctionSettings
    settings: FunctionSettings
    evidence = "own"

    def __init__(self, settings: FunctionSettings) -> None:
        super().__init__(settings)
        self.kind: Literal["whole", "part"] = "part" if settings.adds else "whole"  # type: ignore[misc]
        self._check = FunctionCheck(settings.function, settings.timeout, settings.workers)

    @property
    def label(self) -> str:
        """The function's name."""
        return self.settings.function.rpartition(":")[2]

    def needs(self) -> Needs:
        """A verdict to add to, or nothing."""
        return Needs(reward="verdict" if self.settings.adds else "any")

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Import the function.

        Raises:
            ConfigError: when there is none.
        """
        self._check.load()

    def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
        """See the module."""
        with ThreadPoolExecutor(self.settings.workers) as threads:
            found = list(threads.map(self._value, rows))
        for row, value in zip(rows, found, strict=True):
            self.fire("unknown", float(value is None))
            if not self.settings.adds:
                row.reward = None if value is None else self.settings.weight * value
            elif value is not None:
                row.reward_parts[self.label] = self.settings.weight * value

    def _value(self, row: Row) -> float | None:
        try:
            return self._check(row.prompt, row.text)
        except CheckFailed:
            return None

    def close(self) -> None:
        """Stop the processes."""
        self._check.close()
