"""Modifiers of credit: ACE, SNGS and StableReinforce's filter of outliers.

    ace          A < 0:  A (1 + alpha softplus(c)),   c = log pi(y) - log pi_ref(y) of the whole response
    sngs         A < 0:  A min(lambda0 + kappa p, 1),  p the share of rewards of the group >= threshold
    outliers     A -> (A - mean) / std over the batch;  0 where that is beyond `sigma`

ACE penalises confident errors more; in c, pi is the policy that sampled, and with `per_token` c is the mean per token.
SNGS weakens negative credit in groups that rarely succeed. Sources: ACE, arXiv 2602.21420 (text; alpha is not stated
there); SNGS of GUI-Libra, 2602.22190 (text; lambda0 and kappa are not stated); the filter: the released code of
R1-Reward, 2505.02835.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from opd.errors import ConfigError
from opd.wire.types import PayloadSpec
from opd_zoo.deviation import deviation
from student.data.needs import REFERENCE, Needs, SignalNeed
from student.plugin.traits import Traits
from student.rl.advantages.base import Advantage, AdvantageSettings, AdvantageSettings_co, Credit, Modifier, known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.outcome import Outcome
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe


class OfErrors(Modifier[AdvantageSettings_co]):
    """Base of modifiers that change negative credit alone."""

    def check_chain(self, parts: Sequence[Advantage]) -> None:
        """Refuse an estimator whose settings leave no negative credit.

        Raises:
            ConfigError: naming both.
        """
        if not getattr(parts[0].settings, "negative", 1.0):
            raise ConfigError(
                f"advantage {self.settings.name!r} changes only negative credit, but {parts[0].settings.name!r} with "
                "negative 0 gives none; remove one of the two."
            )


class AceSettings(AdvantageSettings):
    """Settings of ACE."""

    alpha: float = Field(1.0, ge=0, description="Strength of the penalty on confident errors; 0 changes nothing.")
    shape: Literal["softplus", "relu"] = Field("softplus", description="Function by which the confidence enters.")
    per_token: bool = Field(False, description="Take the mean of the confidence over the tokens instead of the sum.")


class Ace(OfErrors[AceSettings]):
    """Modifier: more weight for confident errors (ACE)."""

    evidence = "text"
    traits = Traits(reads=("behaviour",))

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse a strength of 0.

        Raises:
            ConfigError: with the setting to raise.
        """
        if not self.settings.alpha:
            raise ConfigError("advantage 'ace' with alpha 0 changes nothing; raise alpha or remove it.")

    def needs(self) -> Needs:
        """The reference's log-probs of the response tokens."""
        return Needs(signals=(SignalNeed(REFERENCE, PayloadSpec.sampled()),))

    def modify(self, outcomes: Sequence[Outcome], credit: Sequence[Credit]) -> list[Credit]:
        """New credit per row; metric factor, its mean over the rows with negative credit."""
        found: list[Credit] = []
        factors: list[float] = []
        for outcome, value in zip(outcomes, credit, strict=True):
            gap = outcome.sums["behaviour"] - outcome.sums[REFERENCE]
            gap = gap / max(1, outcome.tokens) if self.settings.per_token else gap
            shaped = max(gap, 0.0) if self.settings.shape == "relu" else float(np.logaddexp(0.0, gap))
            factor = 1.0 + self.settings.alpha * shaped
            factors += [factor] * bool(np.min(value) < 0)
            found.append(_errors_times(value, factor))
        self.fired = {"factor": (math.fsum(factors), float(len(factors)))}
        return found


class SngsSettings(AdvantageSettings):
    """Settings of SNGS."""

    lambda0: float = Field(0.5, ge=0, le=1, description="Factor of negative credit in groups without any success.")
    kappa: float = Field(
        0.5, ge=0, description="Slope by which the factor rises with the group's success rate, up to 1."
    )
    threshold: float = Field(0.5, description="Minimum reward of an answer that counts as a success.")


class Sngs(OfErrors[SngsSettings]):
    """Modifier: less weight for errors in groups that rarely succeed (SNGS)."""

    evidence = "text"

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse factors that are 1 for every group.

        Raises:
            ConfigError: with the settings to lower.
        """
        if self.settings.lambda0 >= 1.0:
            raise ConfigError("advantage 'sngs' with lambda0 1 changes nothing; lower lambda0 or remove it.")

    def modify(self, outcomes: Sequence[Outcome], credit: Sequence[Credit]) -> list[Credit]:
        """New credit per row; metric factor, its mean over the rows with negative credit."""
        found, factors = list(credit), []
        s = self.settings
        for group in self.groups(outcomes):
            rate = sum(known(outcomes[place]) >= s.threshold for place in group) / len(group)
            factor = min(s.lambda0 + s.kappa * rate, 1.0)
            for place in group:
                factors += [factor] * bool(np.min(found[place]) < 0)
                found[place] = _errors_times(found[place], factor)
        self.fired = {"factor": (math.fsum(factors), float(len(factors)))}
        return found


def _errors_times(value: Credit, factor: float) -> Credit:
    """Multiply negative credit by a factor; where credit is per token, only its negative entries."""
    if isinstance(value, np.ndarray):
        return np.where(value < 0, value * np.float32(factor), value)
    return value * factor if value < 0 else value


class OutliersSettings(AdvantageSettings):
    """Settings of the filter."""

    sigma: float = Field(3.0, gt=0, description="Number of standard deviations beyond which credit is set to 0.")
    epsilon: float = Field(1e-6, ge=0, description="Constant added to the deviation.")


class Outliers(Modifier[OutliersSettings]):
    """Modifier: standardises over the batch and drops credit beyond 3 sigma."""

    evidence = "text and code"
    traits = Traits(shift_free="batch", scale_free="batch")

    def check_chain(self, parts: Sequence[Advantage]) -> None:
        """Refuse an estimator whose credit is computed anew for each update, group by group.

        Raises:
            ConfigError: naming it.
        """
        if parts[0].traits.recomputes:
            raise ConfigError(
                f"advantage {self.settings.name!r} reads the whole batch, but {parts[0].settings.name!r} is computed "
                "anew for each update, group by group; set recompute: false there, or remove one of the two."
            )

    def modify(self, outcomes: Sequence[Outcome], credit: Sequence[Credit]) -> list[Credit]:
        """New credit per row; a row is judged by its mean credit. Metric dropped, a share of the rows."""
        means = [float(np.mean(value)) for value in credit]
        width = deviation(means, 1) + self.settings.epsilon
        centre = math.fsum(means) / max(1, len(means))
        kept = [abs(mean - centre) <= self.settings.sigma * width for mean in means]
        self.fired = {"dropped": (float(kept.count(False)), float(len(kept)))}
        return [(value - centre) / width if keep else 0.0 for value, keep in zip(credit, kept, strict=True)]
