"""Base of rewards that ask a service or other code about each answer, in parallel; no answer means unknown, never 0."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal

from pydantic import Field
from typing_extensions import TypeVar

from opd.errors import ConfigError
from opd.procs.children import ChildFailed
from opd.tasks.chat import ChatFailed
from student.data.needs import Needs
from student.scoring.rewards.base import Reward, RewardSettings, check_scale

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opd.tasks.prompt import Prompt
    from student.data.row import Row
    from student.plugin.terms import Term
    from student.scoring.rewards.base import RewardServices
    from student.settings.recipe import Recipe


S = TypeVar("S")
T = TypeVar("T")
_MOST_REASONS = 3
_log = logging.getLogger(__name__)


class AskedSettings(RewardSettings):
    """Settings of rewards that ask a service, or code in a process of its own."""

    adds: bool = Field(False, description="Add the reward to the verdict as a part, instead of replacing the verdict.")
    weight: float = Field(1.0, description="Factor of the reward.")
    workers: int = Field(8, ge=1, le=256, description="Maximum number of answers judged at the same time.")


AskedSettings_co = TypeVar("AskedSettings_co", bound=AskedSettings, covariant=True, default=AskedSettings)


class Asked(Reward[AskedSettings_co]):
    """Base of rewards that ask about each answer: subclasses give `value` of one."""

    evidence = "own"
    by_group = False

    def __init__(self, settings: AskedSettings_co) -> None:
        super().__init__(settings)
        self.kind: Literal["whole", "part"] = "part" if settings.adds else "whole"  # type: ignore[misc]
        self._told: set[str] = set()

    def needs(self) -> Needs:
        """The verdict, if this reward is added to it."""
        return Needs(reward="verdict" if self.settings.adds else "any")

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse a weight of 0, and a weight that every advantage would cancel.

        Raises:
            ConfigError: for 0, or if every advantage divides by the deviation of the rewards.
        """
        if not self.settings.weight:
            raise ConfigError(f"reward {self.label!r} with weight 0 rewards nothing; raise weight or remove it.")
        # A negative weight reverses the order of the answers, which dividing by a deviation does not undo.
        moves = not self.settings.adds and self.settings.weight > 0.0 and self.settings.weight != 1.0
        if moves and terms and len(recipe.rewards) == 1:
            check_scale(f"weight {self.settings.weight:g} of reward {self.label!r}", terms)

    def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
        """Set the reward, or the part, of each row; metric unknown is the share without a value."""
        for row, value in zip(rows, self.asked(rows), strict=True):
            self.fire("unknown", float(value is None))
            if not self.settings.adds:
                row.reward = None if value is None else self.settings.weight * value
            elif value is not None:
                row.reward_parts[self.label] = self.settings.weight * value

    def asked(self, rows: Sequence[Row]) -> list[float | None]:
        """The value of each answer; None where it cannot be determined."""
        return self.told(rows, lambda row: self.value(row.prompt, row.text))

    def told(self, items: Sequence[S], ask: Callable[[S], T | None]) -> list[T | None]:
        """What `ask` returns for each item, `workers` at a time; None where asking failed. Warns of new reasons."""

        def safely(item: S) -> tuple[T | None, str]:
            try:
                return ask(item), ""
            except (ChatFailed, ChildFailed) as error:
                return None, str(error)

        # Threads suffice to wait for a service; code that may hang runs in its own processes (reward function).
        with ThreadPoolExecutor(self.settings.workers) as threads:
            found = list(threads.map(safely, items))
        for reason in dict.fromkeys(reason for _, reason in found if reason):
            if reason not in self._told and len(self._told) < _MOST_REASONS:
                self._told.add(reason)
                _log.warning(
                    "reward %s is unknown for an answer: %s; further ones are counted in the metric %s/unknown",
                    self.label,
                    reason.rstrip("."),
                    self.label,
                )
        return [value for value, _ in found]

    def value(self, prompt: Prompt, answer: str) -> float | None:
        """The value of an answer; None where it cannot be determined.

        Raises:
            ChatFailed, ChildFailed: if the service or the code could not be asked.
        """
        raise TypeError(f"{type(self).__name__} does not implement value")
