"""A chain of advantages: one estimator, then any number of modifiers of its credit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from opd.config import parse_settings
from opd.errors import ConfigError
from student.rl import ADVANTAGES
from student.scoring.needs import Needs, merge

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from student.controllers import StepReport
    from student.data.outcome import Outcome
    from student.data.row import Row
    from student.recipe import Recipe
    from student.rl.advantages.base import Advantage, Credit


class AdvantageChain:
    """The advantages of a term, in order.

    Args:
        entry: the settings of one advantage, or of several in order.
        where: names the term in messages.

    Raises:
        ConfigError: for an unknown name or setting, or parts in an order that cannot work.
    """

    def __init__(self, entry: dict[str, Any] | Sequence[dict[str, Any]], where: str) -> None:
        entries: list[dict[str, Any]] = [entry] if isinstance(entry, dict) else list(entry)
        self.parts: list[Advantage] = []
        for one in entries:
            if "name" not in one:
                raise ConfigError(f"the advantage of {where} has no name; see `opd plugins list advantage`.")
            cls: type[Advantage] = ADVANTAGES.load(str(one["name"]))
            self.parts.append(cls(parse_settings(cls.settings_type, one, source=f"advantage of {where}")))
        if not self.parts:
            raise ConfigError(f"the advantage of {where} is an empty list; name an estimator.")
        for index, part in enumerate(self.parts):
            if part.modifies != (index > 0):
                role = "changes the credit of another one and cannot come first" if part.modifies else "begins a chain"
                raise ConfigError(
                    f"advantage {part.settings.name!r} of {where} {role}; give one estimator, then its modifiers."
                )

    @property
    def first(self) -> Advantage:
        """The estimator."""
        return self.parts[0]

    def needs(self) -> Needs:
        """What all parts together need."""
        return merge(part.needs() for part in self.parts)

    def check(self, recipe: Recipe) -> None:
        """Let each part look at the recipe.

        Raises:
            ConfigError: when one could do nothing in it.
        """
        for part in self.parts:
            part.check(recipe)

    def estimate(self, outcomes: Sequence[Outcome]) -> list[Credit]:
        """The credit of each outcome; all have a known reward.

        Raises:
            ValueError: when a part gives credit of a wrong shape, or credit that is not finite.
        """
        credit: list[Credit] | None = None
        for part in self.parts:
            credit = part.estimate(outcomes, credit)
            _check(part, outcomes, credit)
        return credit or []

    def refine(self, row: Row, credit: Credit) -> Credit:
        """What the parts make of the credit of one row of this rank, in order."""
        for part in self.parts:
            credit = part.refine(row, credit)
        return credit

    def metrics(self) -> dict[str, tuple[float, float]]:
        """What the parts did, by name of the part and of the metric, each as (sum, count)."""
        return {
            f"{part.settings.name.rpartition(':')[2]}/{key}": v for part in self.parts for key, v in part.fired.items()
        }

    def observe(self, report: StepReport) -> None:
        """Let each part learn from the finished step."""
        for part in self.parts:
            part.observe(report)

    def state_dict(self) -> dict[str, Any]:
        """State of every part, by position."""
        return {str(i): part.state_dict() for i, part in enumerate(self.parts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        for i, part in enumerate(self.parts):
            part.load_state_dict(state.get(str(i), {}))


def _check(part: Advantage, outcomes: Sequence[Outcome], credit: Sequence[Credit]) -> None:
    name = part.settings.name
    if len(credit) != len(outcomes):
        raise ValueError(f"advantage {name!r} gave {len(credit)} credits for {len(outcomes)} rows; give one for each.")
    for outcome, value in zip(outcomes, credit, strict=True):
        if isinstance(value, np.ndarray) and value.shape != (outcome.length,):
            raise ValueError(
                f"advantage {name!r} gave credit of shape {value.shape} to a response of {outcome.length} tokens; give "
                "one number, or one for each token."
            )
        if not np.isfinite(value).all():
            raise ValueError(
                f"advantage {name!r} gave sample {outcome.sample} of prompt {outcome.uid} a credit that is not finite."
            )
