"""Rollout windows: how many tokens of a response are sampled and trained on at a step.

    fixed_window    H = tokens, or fraction * T          TOPD (arXiv 2605.31490), Prefix OPD (2602.15260)
    first_n         H = 100 tokens                       ESR (2605.27028)
    staircase       H = min(T, H0 + dH * floor(k / dk))  POPD (2605.31490)
    linear_window   H0 to T linearly                     Fast OPD's schedule

T is rollout.max_new_tokens and k the step. Every window method needs terms with `aggregation: constant`: a response
that is cut at H then contributes exactly the gradients of its first H tokens, and nothing else changes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from student.plugin.controllers import Controller, ControllerSettings, ControllerSettings_co
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.plan import PlannedRow, StepPlan
    from student.plugin.controllers import Services
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe


class WindowController(Controller[ControllerSettings_co]):
    """Base class of window methods; subclasses define how long a planned row may be."""

    traits = Traits(cuts_responses=True)

    def window(self, step: int, row: PlannedRow) -> int:
        """Maximum tokens of the response of `row` at `step`."""
        raise TypeError(f"{type(self).__name__} does not implement window")

    def plan(self, plan: StepPlan) -> StepPlan:
        """Cut every row to its window."""
        rows = tuple(replace(r, max_new_tokens=min(r.max_new_tokens, self.window(plan.step, r))) for r in plan.rows)
        return replace(plan, rows=rows)


class FollowingController(WindowController[ControllerSettings_co]):
    """A window that follows what the rows of the step before were worth; its state is the window."""

    limit: int = 0
    chosen: int | None = None
    """The window, tokens; the length limit until one is chosen."""
    traits = Traits(
        cuts_responses=True, why={"works_ahead": "it chooses the window of a step by the rows of the step before"}
    )

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Also learn T."""
        super().check(recipe, terms)
        self.limit = recipe.rollout.max_new_tokens

    def window(self, step: int, row: PlannedRow) -> int:
        return self.current

    @property
    def current(self) -> int:
        """The window of this step, tokens."""
        return min(self.chosen or self.limit, self.limit)

    def state_dict(self) -> dict[str, Any]:
        """The window."""
        return {"window": self.chosen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the window."""
        self.chosen = state["window"]


class ScheduleController(WindowController[ControllerSettings_co]):
    """A window that is a function of the step alone."""

    limit: int = 0
    traits = Traits(works_ahead=True, cuts_responses=True)

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Also read the length limit and the number of steps from the recipe."""
        super().check(recipe, terms)
        self.limit, self.steps = recipe.rollout.max_new_tokens, recipe.train.steps

    def length(self, step: int) -> int:
        """H at `step`, tokens."""
        raise TypeError(f"{type(self).__name__} does not implement length")

    def window(self, step: int, row: PlannedRow) -> int:
        return max(1, min(self.limit, self.length(step)))

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metric window, tokens."""
        return {"window": float(max(1, min(self.limit, self.length(step))))}


class FixedWindowSettings(ControllerSettings):
    """Settings of a fixed window; exactly one of the two is given."""

    tokens: int | None = Field(None, ge=1, description="Window H in tokens.")
    fraction: float | None = Field(None, gt=0, le=1, description="Window H as a fraction of rollout.max_new_tokens.")

    @model_validator(mode="after")
    def _check(self) -> FixedWindowSettings:
        if (self.tokens is None) == (self.fraction is None):
            raise ValueError(f"tokens is {self.tokens} and fraction is {self.fraction}; set exactly one of them")
        return self


class FixedWindow(ScheduleController[FixedWindowSettings]):
    """Trains on a fixed prefix of each response (TOPD)."""

    def length(self, step: int) -> int:
        tokens, fraction = self.settings.tokens, self.settings.fraction
        return tokens if tokens is not None else math.ceil((fraction or 1.0) * self.limit)


class FirstNSettings(ControllerSettings):
    """Settings of first-N training."""

    tokens: int = Field(100, ge=1, description="Window N in tokens.")


class FirstN(ScheduleController[FirstNSettings]):
    """Trains on the first N tokens of each response (ESR)."""

    def length(self, step: int) -> int:
        return self.settings.tokens


class StaircaseSettings(ControllerSettings):
    """Settings of the staircase."""

    first: int = Field(ge=1, description="Window H0 of the first stair in tokens.")
    rise: int = Field(ge=1, description="Number of tokens dH that each stair adds.")
    every: int = Field(ge=1, description="Number of steps dk in a stair.")


class Staircase(ScheduleController[StaircaseSettings]):
    """A rollout window that grows stepwise (POPD)."""

    def length(self, step: int) -> int:
        return self.settings.first + self.settings.rise * (step // self.settings.every)


class LinearWindowSettings(ControllerSettings):
    """Settings of the linear window."""

    first: int = Field(ge=1, description="Window H0 of the first step in tokens.")
    until: float = Field(
        1.0, gt=0, le=1, description="Fraction of the run after which the window has grown to rollout.max_new_tokens."
    )


class LinearWindow(ScheduleController[LinearWindowSettings]):
    """A rollout window that grows linearly."""

    def length(self, step: int) -> int:
        share = min(1.0, step / max(1.0, self.settings.until * self.steps))
        return round(self.settings.first + share * (self.limit - self.settings.first))
