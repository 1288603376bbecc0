"""The backward correction for a noisy verifier: a reward whose expectation is the truth, given the error rates.

    whole = (v - fp) / (1 - fp - fn),      E[whole | truth] = truth

v is the verdict, 0 or 1; fp is the rate at which wrong answers are accepted and fn the rate at which right ones are
refused. The reward is affine in v, so subtracting a group's mean removes the shift, and dividing by a deviation also
the scale. The correction therefore acts only without a group's mean, or as a weight on prompts, where rates differ by
domain and the advantage keeps the scale of rewards. (It would also act if rates differed within a group, which they
never do here.) What cannot act is refused. Source: arXiv 2510.00915.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator

from opd.config import Settings
from opd.errors import ConfigError
from student.scoring.rewards.base import Reward, RewardSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.row import Row
    from student.plugin.terms import Term
    from student.scoring.rewards.base import RewardServices
    from student.settings.recipe import Recipe


class Rates(Settings):
    """Error rates of a verifier."""

    false_positive: float = Field(0.0, ge=0, lt=1, description="Share of wrong answers that the verifier accepts.")
    false_negative: float = Field(0.0, ge=0, lt=1, description="Share of right answers that the verifier refuses.")


class NoisyVerifierSettings(RewardSettings, Rates):
    """Settings of the correction."""

    domains: dict[str, Rates] = Field(
        default_factory=dict, description="Mapping from a domain to its own rates, which replace the general ones."
    )

    @field_validator("domains")
    @classmethod
    def _sums(cls, domains: dict[str, Rates]) -> dict[str, Rates]:
        for name, rates in domains.items():
            if rates.false_positive + rates.false_negative >= 1:
                raise ValueError(
                    f"the rates of domain {name!r} add up to 1 or more: such a verdict would mean the opposite"
                )
        return domains


class NoisyVerifier(Reward[NoisyVerifierSettings]):
    """The verdict corrected for a verifier's known error rates."""

    kind: ClassVar[Literal["whole", "part"]] = "whole"
    evidence = "text"
    by_group = False

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse rates that are all 0 or add up to 1, and a correction that an advantage would cancel.

        Raises:
            ConfigError: with what to change.
        """
        s = self.settings
        if s.false_positive + s.false_negative >= 1:
            raise ConfigError(
                "false_positive and false_negative of reward noisy_verifier add up to 1 or more; lower them."
            )
        if not any((r.false_positive or r.false_negative) for r in (s, *s.domains.values())):
            raise ConfigError(
                "reward noisy_verifier has no error rates, so it changes nothing; set false_positive or false_negative."
            )
        constant = not s.domains
        for term in terms:
            chain = getattr(term, "chain", None)
            if chain is None or not chain.shift_free or (chain.shift_free == "batch" and not constant):
                continue
            rescales = chain.scale_free == "group" or (constant and chain.scale_free == "batch")
            if rescales or constant:
                kept = "nothing" if rescales else "a factor that is the same for all prompts"
                raise ConfigError(
                    f"reward noisy_verifier is affine in the verdict, but the advantage {chain.first.settings.name!r} "
                    f"of term {term.settings.name!r} cancels what is added to all rewards of a group, which leaves "
                    f"{kept} of the correction; use an advantage without a group's mean, or rates by domain and an "
                    "advantage that keeps the scale."
                )

    def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
        """Set the whole reward; verdicts with partial credit are corrected by the same formula. Metric shift."""
        for row in rows:
            value = row.verdict_value
            rates = self.settings.domains.get(row.prompt.domain or "", self.settings)
            fp, fn = rates.false_positive, rates.false_negative
            row.reward = None if value is None else (value - fp) / (1 - fp - fn)
            if row.reward is not None and value is not None:
                self.fire("shift", abs(row.reward - value))
