"""Base classes of advantage estimators and modifiers, which turn the outcomes of a step into the credit of each row.

An estimator makes credit from rewards; a modifier changes the credit of the part before it. A term runs a chain: one
estimator, then any number of modifiers. Both see the rows of all ranks whose reward is known, so that statistics of a
group or of the batch do not depend on how rows are spread over ranks. Nothing may depend on the order of the outcomes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypeVar

from opd.config import Settings
from opd.errors import ConfigError, PluginError, short
from student.data.needs import TEACHER
from student.data.outcome import KEYS
from student.plugin.base import Plugin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from student.data.outcome import Outcome
    from student.data.row import Row
    from student.data.token_batch import TokenBatch

Credit: TypeAlias = "float | NDArray[np.float32]"
"""The advantage of a row: one number for all its tokens, or [T], one number per token."""

GROUP = ("step", "uid", "turn", "agent")
"""Rows that answer the same prompt."""


class AdvantageSettings(Settings):
    """Settings that every estimator and modifier has."""

    name: str
    """Registered name, or a dotted path "package.module:Class"."""
    group: list[str] = Field(
        default_factory=lambda: list(GROUP),
        description=f"What rows must have in common to form a group: any of {', '.join(KEYS)} and names of tags. [] "
        "puts all rows of the step into one group.",
    )


AdvantageSettings_co = TypeVar(
    "AdvantageSettings_co", bound=AdvantageSettings, covariant=True, default=AdvantageSettings
)


def teacher_gaps(row: Row) -> NDArray[np.float64]:
    """[trained tokens] float64 log T(y_t) - log mu(y_t), nats, of a row that a teacher has scored.

    mu is the policy that sampled.
    """
    mask = row.loss_mask
    return np.asarray(row.log_probs(TEACHER), np.float64)[mask] - row.behaviour_logp[mask].astype(np.float64)


class Advantage(Plugin[AdvantageSettings_co]):
    """An estimator or a modifier of credit.

    Attributes:
        fired: what the last `estimate` did, as metrics (sum, count).
    """

    def __init__(self, settings: AdvantageSettings_co) -> None:
        super().__init__(settings)
        self.fired: dict[str, tuple[Any, Any]] = {}

    def check_chain(self, parts: Sequence[Advantage]) -> None:
        """Look at all parts of its chain, this one among them, the estimator first.

        Raises:
            ConfigError: if it could have no effect among them.
        """

    def estimate(self, outcomes: Sequence[Outcome], credit: Sequence[Credit] | None) -> list[Credit]:
        """The credit of each row, in the order of `outcomes`.

        Args:
            outcomes: all rows of the step on all ranks whose reward is known.
            credit: what the part before it in the chain gave; None for the first.
        """
        raise PluginError(f"{type(self).__name__} does not implement estimate.")

    def refine(self, row: Row, credit: Credit) -> Credit | None:
        """Change the credit of one row of this rank by what only the row itself holds, such as log-probs per token.

        Returns:
            The new credit; None leaves the row out of the loss and its means.
        """
        return credit

    def bind(self, tokenizer: Any) -> None:
        """Called once with the student's tokenizer, before the first step."""

    def shape(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        """Change the credit [N] of the positions of a micro-batch by the student's present outputs there."""
        return advantage

    def groups(self, outcomes: Sequence[Outcome]) -> list[list[int]]:
        """Indices of the outcomes of each group, by the setting `group`."""
        found: dict[tuple[Any, ...], list[int]] = {}
        for index, outcome in enumerate(outcomes):
            found.setdefault(outcome.key(self.settings.group), []).append(index)
        return list(found.values())


class GroupEstimator(Advantage[AdvantageSettings_co]):
    """Base of estimators that look at one group at a time: subclasses give `of_group`."""

    def estimate(self, outcomes: Sequence[Outcome], credit: Sequence[Credit] | None) -> list[Credit]:
        """Credit from `of_group`, group by group."""
        found: list[Credit] = [0.0] * len(outcomes)
        for places in self.groups(outcomes):
            values = self.of_group([known(outcomes[place]) for place in places])
            if not hasattr(values, "__len__"):
                raise PluginError(
                    f"{type(self).__name__}.of_group returned {short(values)}; it must return a list of numbers."
                )
            if len(values) != len(places):
                raise PluginError(
                    f"{type(self).__name__} returned {len(values)} advantages for a group of {len(places)} rewards."
                )
            for place, value in zip(places, values, strict=True):
                found[place] = value
        return found

    def of_group(self, rewards: Sequence[float]) -> list[float]:
        """One advantage for each reward of a group, in the same order."""
        raise PluginError(f"{type(self).__name__} does not implement of_group.")


class Modifier(Advantage[AdvantageSettings_co]):
    """Base of modifiers, which change the credit of the part before them: subclasses give `modify`."""

    def estimate(self, outcomes: Sequence[Outcome], credit: Sequence[Credit] | None) -> list[Credit]:
        """Credit from `modify`.

        Raises:
            ConfigError: if nothing comes before it in the chain.
        """
        if credit is None:
            raise ConfigError(
                f"advantage {self.settings.name!r} changes the credit of another one; name that one first."
            )
        return self.modify(outcomes, credit)

    def modify(self, outcomes: Sequence[Outcome], credit: Sequence[Credit]) -> list[Credit]:
        """The new credit of each row."""
        raise PluginError(f"{type(self).__name__} does not implement modify.")


def known(outcome: Outcome) -> float:
    """The reward of an outcome; rows without one never reach an estimator."""
    if outcome.reward is None:
        raise ValueError(f"sample {outcome.sample} of prompt {outcome.uid} has no reward; leave it out.")
    return outcome.reward
