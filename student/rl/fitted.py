"""Base classes of critics: heads that are fitted once per step, and a warm-up in which nothing else learns."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypeVar

from opd.errors import ConfigError
from opd.wire.types import PayloadSpec, ScoreItem
from student.data.outcome import outcome_of
from student.plugin.controllers import Controller, ControllerSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from student.data.row import Row
    from student.learning.updates import Update
    from student.plugin.controllers import Services
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe

Array = NDArray[np.float64]
_PLACES = ("step", "uid", "sample", "turn", "agent")


class FittedSettings(ControllerSettings):
    """Settings of every critic."""

    warm_up: int = Field(
        0, ge=0, description="Number of first steps in which only the critic learns and the student is not updated."
    )
    fits: int = Field(16, ge=1, description="Number of AdamW steps of the heads after each step of the run.")
    learning_rate: float = Field(3e-3, gt=0, description="Learning rate of the heads.")


FittedSettings_co = TypeVar("FittedSettings_co", bound=FittedSettings, covariant=True, default=FittedSettings)


class FittedCritic(Controller[FittedSettings_co]):
    """A critic whose subclasses fit heads in `fit`, which runs after the last update of a step."""

    def __init__(self, settings: FittedSettings_co) -> None:
        super().__init__(settings)
        self._now = 0
        self._told: dict[str, float] = {}  # metrics of a fit that `after_update` has not told yet

    @property
    def warming_up(self) -> bool:
        """Whether the current step makes no update."""
        return self._now < self.settings.warm_up

    def check_warm_up(self, recipe: Recipe) -> None:
        """Refuse a warm-up that never ends.

        Raises:
            ConfigError: naming the setting to lower.
        """
        if self.settings.warm_up >= recipe.train.steps:
            raise ConfigError(
                f"method {self.settings.name} has a warm_up of {self.settings.warm_up} steps, in which the student is "
                f"not trained, but the run has only {recipe.train.steps} (train.steps); lower warm_up."
            )

    def updates(self, updates: Iterable[Update], services: Services) -> Iterable[Update]:
        """Make no updates in the warm-up; fit the heads after the last update."""
        # Fit after the last update, before anything can interrupt the step; not at all if an update failed.
        if not self.warming_up:
            yield from updates
        self._told = self.fit(services)

    @abstractmethod
    def fit(self, services: Services) -> dict[str, float]:
        """Fit the heads to the data of all ranks; returns the metrics for `after_update`."""

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """The metrics of the fit."""
        told, self._told = self._told, {}
        self._now = step + 1
        return told


class TurnCritic(FittedCritic[FittedSettings_co]):
    """A critic of turns, which reads hidden states at turns and writes `CriticValues.credit`."""

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse a critic that no advantage reads, histories that are cut, and a warm-up that never ends.

        Raises:
            ConfigError: naming what to change.
        """
        name = self.settings.name
        if recipe.rollout.episodes.history is not None:
            raise ConfigError(
                f"method {name} reads whole episodes, but rollout.episodes.history is "
                f"{recipe.rollout.episodes.history!r}; remove history."
            )
        self.check_warm_up(recipe)

    def states(self, rows: Sequence[Row]) -> Iterator[tuple[Row, Array]]:
        """Rows, and the initial student's hidden states [T + 1, H] before each token and after the last one."""
        # One extra id gives a state after the last token; no state that is read depends on that id.
        items = [
            ScoreItem(np.concatenate([row.prompt_ids, row.response_ids, row.prompt_ids[-1:]]), len(row.prompt_ids))
            for row in rows
        ]
        for row, scores in zip(rows, self.services.read(items, PayloadSpec.hidden(), model="initial"), strict=True):
            yield row, np.asarray(scores.hidden, np.float64)

    def write(self, row: Row, credit: NDArray[np.floating]) -> None:
        """Keep the advantage [T] of each token with the row, under the critic's class."""
        row.critic = replace(row.critic, credit={**row.critic.credit, type(self).__name__: credit.astype(np.float32)})

    def in_order(self, mine: list[tuple[tuple[Any, ...], Array]], services: Services) -> list[Array]:
        """The arrays [turns, ...] of all rows on all ranks, sorted by key, so independent of how rows are spread."""
        told = sorted((entry for part in services.gather(mine) for entry in part), key=lambda entry: entry[0])
        return [turns for _, turns in told]


def spans_of(row: Row) -> tuple[tuple[int, int], ...]:
    """The turns of a row; an answer without turns is one turn."""
    return row.turns or ((0, row.length),)


def turn_rewards(row: Row) -> tuple[tuple[Any, ...], Array] | None:
    """The row's key and rewards [turns], an episode's reward on its last turn; None if there is nothing to learn."""
    outcome = outcome_of(row)
    if outcome.reward is None or not row.loss_mask.any():
        return None
    rewards = np.zeros(len(spans_of(row)))
    rewards[-1] = outcome.reward
    if outcome.turns.rewards:
        rewards = np.array(outcome.turns.rewards, np.float64)
    return outcome.key(_PLACES), rewards
