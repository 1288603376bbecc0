"""Rewards that ask someone else about each answer, several at once; what cannot be told is unknown, never 0."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from pydantic import Field

from opd.errors import ConfigError
from opd.tasks.chat import ChatFailed
from opd.tasks.worker import CheckFailed
from student.rl.rewards.base import Reward, RewardSettings, check_scale
from student.scoring.needs import Needs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opd.tasks.prompt import Prompt
    from student.data.row import Row
    from student.learning.terms import Term
    from student.recipe import Recipe
    from student.rl.rewards.base import RewardServices


T = TypeVar("T")
_MOST_REASONS = 3
_log = logging.getLogger(__name__)


class AskedSettings(RewardSettings):
    """Settings of rewards that ask someone else: a service, or code in a process of its own."""

    adds: bool = Field(False, description="Add to the verdict, as a part, instead of standing in for it.")
    weight: float = Field(1.0, description="Multiplies the reward.")
    workers: int = Field(8, ge=1, le=256, description="Answers judged at the same time.")


class Asked(Reward):
    """The base: subclasses give `value` of an answer."""

    settings_type: ClassVar[type[RewardSettings]] = AskedSettings
    settings: AskedSettings
    evidence = "own"
    by_group = False

    def __init__(self, settings: AskedSettings) -> None:
        super().__init__(settings)
        self.kind: Literal["whole", "part"] = "part" if settings.adds else "whole"  # type: ignore[misc]
        self._told: set[str] = set()

    def needs(self) -> Needs:
        """A verdict to add to, or nothing."""
        return Needs(reward="verdict" if self.settings.adds else "any")

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse a weight of 0, and a weight that no term would see.

        Raises:
            ConfigError: for 0, or when every advantage divides by the deviation of the rewards.
        """
        if not self.settings.weight:
            raise ConfigError(f"reward {self.label!r} with weight 0 rewards nothing; raise weight or leave it out.")
        # A negative weight turns the order of the answers round, which no deviation takes back.
        moves = not self.settings.adds and self.settings.weight > 0.0 and self.settings.weight != 1.0
        if moves and terms and len(recipe.rewards) == 1:
            check_scale(f"weight {self.settings.weight:g} of reward {self.label!r}", terms)

    def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
        """See the module."""
        for row, value in zip(rows, self.asked(rows), strict=True):
            self.fire("unknown", float(value is None))
            if not self.settings.adds:
                row.reward = None if value is None else self.settings.weight * value
            elif value is not None:
                row.reward_parts[self.label] = self.settings.weight * value

    def asked(self, rows: Sequence[Row]) -> list[float | None]:
        """What each answer is worth; None where that cannot be told."""
        return self.told(rows, self.value)

    def told(self, rows: Sequence[Row], ask: Callable[[Prompt, str], T | None]) -> list[T | None]:
        """What `ask` says about each answer, several at once; None where it could not be asked."""

        def safely(row: Row) -> tuple[T | None, str]:
            try:
                return ask(row.prompt, row.text), ""
            except (ChatFailed, CheckFailed) as error:
                return None, str(error)

        # Threads, because a service is waited for; code that may hang runs in processes of its own (reward function).
        with ThreadPoolExecutor(self.settings.workers) as threads:
            found = list(threads.map(safely, rows))
        for reason in dict.fromkeys(reason for _, reason in found if reason):
            if reason not in self._told and len(self._told) < _MOST_REASONS:
                self._told.add(reason)
                _log.warning(
                    "reward %s is unknown for an answer: %s; metric %s/unknown counts further ones",
                    self.label,
                    reason.rstrip("."),
                    self.label,
                )
        return [value for value, _ in found]

    def value(self, prompt: Prompt, answer: str) -> float | None:
        """What an answer is worth; None where that cannot be told.

        Raises:
            ChatFailed, CheckFailed: where no service could be asked.
        """
        raise TypeError(f"{type(self).__name__} does not implement value")
