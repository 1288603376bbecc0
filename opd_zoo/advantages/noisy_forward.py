"""The forward correction for a noisy verifier: weights that depend on how often it refuses right answers.

    A_i = fn - 1 + v_i         fn - 1 for a refused answer, fn for an accepted one;   E[A | right] = 0

v is the verdict, 0 or 1, and fn is the share of right answers that the verifier refuses; how often it accepts wrong
ones need not be known. With `learns: true` fn is estimated from reward appeals and smoothed over steps:

    fn <- memory fn + (1 - memory) (overturned / asked * refused) / (accepted + overturned / asked * refused)

It is the reward minus the constant 1 - fn, so subtracting a group's mean would cancel it: it takes the place of a group
baseline. The backward correction is reward noisy_verifier. Source: arXiv 2510.00915 (text; the smoothing is ours).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from opd.errors import ConfigError
from opd_zoo.rewards.appeals import ACCEPTED, ASKED, OVERTURNED
from student.plugin.traits import Traits
from student.rl.advantages.base import Advantage, AdvantageSettings, GroupEstimator

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from student.data.report import StepReport
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe


class NoisyForwardSettings(AdvantageSettings):
    """Settings of the correction."""

    false_negative: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="fn, the share of right answers that the verifier refuses; with learns, its initial value.",
    )
    learns: bool = Field(False, description="Estimate fn from reward appeals.")
    memory: float = Field(0.9, ge=0, lt=1, description="Share of fn that each step keeps, if it is estimated.")


class NoisyForward(GroupEstimator[NoisyForwardSettings]):
    """Weights that depend on how often the verifier refuses right answers (forward correction).

    Its state is fn.
    """

    evidence = "text"
    traits = Traits(learns_from_equal=True)

    def __init__(self, settings: NoisyForwardSettings) -> None:
        super().__init__(settings)
        self.rate = settings.false_negative

    def check_chain(self, parts: Sequence[Advantage]) -> None:
        """Refuse modifiers that take a mean off.

        Raises:
            ConfigError: naming the modifier.
        """
        for part in parts[1:]:
            if part.traits.shift_free:
                raise ConfigError(
                    f"advantage {part.settings.name!r} subtracts a mean, but {self.settings.name!r} is the reward "
                    "minus a constant, of which nothing would be left; remove one of the two."
                )

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse to learn fn from appeals that are never made.

        Raises:
            ConfigError: naming the reward to add.
        """
        made = any(str(entry.get("name", "")).rpartition(":")[2].lower() == "appeals" for entry in recipe.rewards)
        if self.settings.learns and not made:
            raise ConfigError(
                "advantage noisy_forward with learns: true needs reward appeals; add that reward, or set learns: false."
            )

    def of_group(self, rewards: Sequence[float]) -> list[float]:
        """One advantage per reward, by the module's formula."""
        return [self.rate - 1.0 + reward for reward in rewards]

    def observe(self, report: StepReport) -> None:
        """Update fn from the appeals of the step."""
        asked = sum(outcome.notes.get(ASKED, 0.0) for outcome in report.outcomes)
        judged = [outcome.notes[ACCEPTED] for outcome in report.outcomes if ACCEPTED in outcome.notes]
        if not self.settings.learns or not asked:
            return
        share = sum(outcome.notes.get(OVERTURNED, 0.0) for outcome in report.outcomes) / asked
        accepted = sum(judged)
        wrong = share * (len(judged) - accepted)
        if accepted + wrong:
            memory = self.settings.memory
            self.rate = memory * self.rate + (1.0 - memory) * wrong / (accepted + wrong)

    def state_dict(self) -> dict[str, Any]:
        """The estimate of fn."""
        return {"rate": self.rate}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.rate = float(state["rate"])
