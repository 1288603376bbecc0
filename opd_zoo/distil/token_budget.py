"""End a run after a number of response tokens, so that runs with answers of different lengths learn from equally many.

    end after the first step n with  sum over steps 1..n of the tokens of the answers  >=  tokens

With equal numbers of steps, imitation of a verbose teacher learns from more tokens than distillation on the student's
own answers, so a comparison of the two would compare lengths. `run` takes the number of tokens from a finished run. The
last step is completed, so a run exceeds the budget by up to one step. This method counts the answers that a step keeps;
the `response_tokens` of the other run count everything that it sampled, including what its strategy dropped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from opd.errors import DataError
from student.plugin.controllers import Controller, ControllerSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.plugin.controllers import Services
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe


class TokenBudgetSettings(ControllerSettings):
    """Settings of the budget."""

    tokens: int | None = Field(None, ge=1, description="Number of response tokens after which the run ends.")
    run: Path | None = Field(
        None, description="Folder of a finished run, whose number of response tokens is the budget."
    )

    @model_validator(mode="after")
    def _one(self) -> TokenBudgetSettings:
        if (self.tokens is None) == (self.run is None):
            raise ValueError("the budget is either tokens or run, the folder of another run; set exactly one of them")
        return self


class TokenBudget(Controller[TokenBudgetSettings]):
    """Ends the run after a number of response tokens, for example that of another run."""

    traits = Traits(why={"works_ahead": "it may end the run after steps that are already sampled"})

    def __init__(self, settings: TokenBudgetSettings) -> None:
        super().__init__(settings)
        self._budget = settings.tokens
        self._spent = 0

    def remarks(self, recipe: Recipe, terms: Sequence[Term]) -> list[str]:
        """Warn that a learning rate schedule over all steps does not know of the earlier end."""
        if recipe.train.schedule == "constant":
            return []
        return [
            f"train.schedule {recipe.train.schedule} decays over all {recipe.train.steps} steps, but method "
            "token_budget may end the run before the last"
        ]

    def start(self, services: Services) -> None:
        """Read the tokens of the other run; a resumed run keeps what it read at its start.

        Raises:
            DataError: if the other run has not ended, or its summary cannot be read.
        """
        if self._budget is None:
            path = Path(self.settings.run or "") / "summary.json"
            try:
                self._budget = int(json.loads(path.read_text(encoding="utf-8"))["response_tokens"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{path} has no response_tokens, from which method token_budget takes its budget; wait until that "
                    "run ends, or set tokens."
                ) from error

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Count the answers of the step; metric token_budget_spent, a share."""
        self._spent += sum(outcome.length for outcome in services.outcomes)
        return {"token_budget_spent": self._spent / max(1, self._budget or 0)}

    def finished(self) -> bool:
        """Whether the tokens are spent."""
        return self._budget is not None and self._spent >= self._budget

    def state_dict(self) -> dict[str, Any]:
        """Budget and tokens."""
        return {"budget": self._budget, "spent": self._spent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._budget, self._spent = state["budget"], int(state["spent"])
