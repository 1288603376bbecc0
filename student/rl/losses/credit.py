"""The credit of each row, by which a term weights its tokens; the formula is the term's own.

    outcomes of all ranks -> advantage chain -> credit per row or token

Rows whose reward is unknown are in no statistics and have no credit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from student.data.outcome import gather_outcomes
from student.plugin.terms import Term
from student.plugin.traits import Traits
from student.rl.advantages.chain import AdvantageChain
from student.rl.losses.settings import CREDIT_SIGNS, PolicyGradientSettings_co

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.outcome import Outcome
    from student.data.report import StepReport
    from student.data.row import Row
    from student.rl.advantages.base import Credit
    from student.settings.recipe import Recipe

T = TypeVar("T")


class ByRow(dict[int, "tuple[Row, T]"], Generic[T]):
    """A value for each row, by the object's id: replayed rows may share a key. A deep copy (a probe's) is empty.

    The row is kept with its value, so that its id stays its own.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> ByRow[T]:
        return type(self)()

    def of(self, row: Row) -> T | None:
        """The value of `row`; None if it has none."""
        held = self.get(id(row))
        return None if held is None else held[1]


class CreditTerm(Term[PolicyGradientSettings_co]):
    """A term that learns from a row by its credit; see `student.rl.advantages`."""

    @property
    def traits(self) -> Traits:
        first = self.chain.first
        # Without uid in its key a group spans several prompts, so one answer to each prompt may be enough.
        least = first.traits.least_group if "uid" in first.settings.group else 1
        return replace(
            super().traits,
            least_group=least,
            learns_from_equal=first.traits.learns_from_equal,
            recomputes=any(part.traits.recomputes for part in self.chain.parts),
        )

    def __init__(self, settings: PolicyGradientSettings_co) -> None:
        super().__init__(settings)
        self.chain = AdvantageChain(settings.advantage, f"term {settings.name!r}")
        self._credit: ByRow[Credit | None] = ByRow()

    def remarks(self, recipe: Recipe, terms: Sequence[Term]) -> list[str]:
        """Those of the advantages."""
        return self.chain.remarks(recipe, terms)

    def bind(self, tokenizer: Any) -> None:
        """Pass the tokenizer to the advantages."""
        self.chain.bind(tokenizer)

    def assess(self, rows: Sequence[Row], outcomes: Sequence[Outcome], places: Sequence[int]) -> None:
        """Compute the credit of this rank's rows from the outcomes of all ranks."""
        # Cleared every step, because an entry keeps its row in memory.
        self._credit = ByRow()
        self._estimate(rows, outcomes, places)

    def _estimate(self, rows: Sequence[Row], outcomes: Sequence[Outcome], places: Sequence[int]) -> None:
        able = [place for place, outcome in enumerate(outcomes) if self._counts(outcome)]
        if self.settings.skip_degenerate:
            able = self._without_degenerate(outcomes, able)
        credit = dict(zip(able, self.chain.estimate([outcomes[place] for place in able]), strict=True))
        # Rows without credit get an entry as well: to `prepare`, a row without one is from outside the batch.
        self._credit |= {id(row): (row, None) for row in rows}
        for row, place in zip(rows, places, strict=True):
            if place in credit and row.trained and not self.lacks(row):
                self._credit[id(row)] = (row, self.chain.refine(row, credit[place]))

    def lacks(self, row: Row) -> bool:
        """Whether a model that the credit or the loss reads had no context for the row and read the bare prompt."""
        return bool(row.unread) and any(need.role in row.unread for need in self.needs().signals)

    def _counts(self, outcome: Outcome) -> bool:
        return outcome.reward is not None and self.settings.admits(outcome)

    def _without_degenerate(self, outcomes: Sequence[Outcome], able: Sequence[int]) -> list[int]:
        groups = self.chain.first.groups([outcomes[place] for place in able])
        kept = [group for group in groups if len({outcomes[able[i]].reward for i in group}) > 1]
        return sorted(able[i] for group in kept for i in group)

    def prepare(self, rows: Sequence[Row]) -> None:
        """Compute credit for rows from outside the batch (a probe's, for example), among themselves.

        Where credit is recomputed, also recompute that of an update's rows, which then hold whole groups.
        """
        if any(id(row) not in self._credit for row in rows):
            # `assess` is not used here, because all ranks would have to take part.
            self._credit = ByRow()
            self._estimate(rows, *gather_outcomes(rows))
        elif self.traits.recomputes:
            self._estimate(rows, *gather_outcomes(rows))

    def credit(self, row: Row) -> Credit | None:
        """The credit of a row; None if its reward is unknown or the row is left out."""
        return self._credit.of(row)

    def selects(self, row: Row) -> bool:
        """Whether the row has credit."""
        return self.credit(row) is not None

    def stratum(self, row: Row) -> str:
        """With strata `credit`, the sign of the row's mean credit: good, even or bad."""
        if self.settings.strata != "credit":
            return super().stratum(row)
        credit = self.credit(row)
        return CREDIT_SIGNS[int(np.sign(0.0 if credit is None else np.mean(credit)))]

    def observe(self, report: StepReport) -> None:
        """Let the advantages learn."""
        self.chain.observe(report)

    def state_dict(self) -> dict[str, Any]:
        """State of the advantages."""
        return {"advantage": self.chain.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.chain.load_state_dict(state["advantage"])
