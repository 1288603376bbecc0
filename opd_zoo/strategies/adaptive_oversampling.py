"""Adaptive oversampling: one round, enlarged by the share of groups that recent steps had to drop (CodeV-R1's DAPO).

    prompts of the round = min(ceil(B / (1 - e)), cap B),   B the prompts of the plan
    e <- decay e + (1 - decay) (groups whose rewards all agree / groups sampled)

Of the groups whose rewards differ, B chosen at random are learnt from, or all if there are fewer. Dynamic sampling
instead draws further rounds, one after the other. Source: abstract of CodeV-R1, arXiv 2505.24183; the rule is inferred
from its description, decay and cap are ours.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from opd.errors import ConfigError
from student.data.needs import Needs
from student.data.streams import stream
from student.plugin.strategy import Strategy, StrategySettings
from student.plugin.traits import Traits
from student.rollout.strategies.dynamic_sampling import rewards_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.plan import StepPlan
    from student.data.report import StepReport
    from student.data.row import Row
    from student.plugin.terms import Term
    from student.rollout.sampling import Sampling
    from student.settings.recipe import Recipe

_DISCARDED = "adaptive_oversampling/discarded_share"


class AdaptiveOversamplingSettings(StrategySettings):
    """Settings of the oversampling."""

    decay: float = Field(
        0.8,
        ge=0,
        lt=1,
        description="Share of e, the smoothed share of dropped groups, that each step keeps.",
    )
    cap: float = Field(
        4.0, ge=1, description="Maximum number of prompts in a step, in multiples of rollout.prompts_per_step."
    )
    seed: int = Field(0, ge=0, description="Seed of the choice of groups, if there are more than needed.")


class AdaptiveOversampling(Strategy[AdaptiveOversamplingSettings]):
    """Dynamic sampling in one round, enlarged by the share of groups dropped before (CodeV-R1).

    Its state is the average share of dropped groups.
    """

    evidence: ClassVar[str] = "inferred"
    traits = Traits(works_ahead=True, judges_first=True, least_group=2, drops_equal_groups=True)

    def __init__(self, settings: AdaptiveOversamplingSettings) -> None:
        super().__init__(settings)
        self.waste = 0.0

    def needs(self) -> Needs:
        """Rewards."""
        return Needs(reward="any")

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse groups of one answer, and a cap that never lets a round grow.

        Raises:
            ConfigError: naming the setting to raise.
        """
        if self.size(recipe.rollout.prompts_per_step, waste=1.0) == recipe.rollout.prompts_per_step:
            raise ConfigError(
                f"rollout.strategy adaptive_oversampling with cap {self.settings.cap:g} never draws more than the "
                f"{recipe.rollout.prompts_per_step} prompts of a step; raise cap, for example to 4."
            )

    def size(self, prompts: int, waste: float | None = None) -> int:
        """The number of prompts to draw so that `prompts` are left if the share `waste` (default: average) is lost."""
        most, waste = max(prompts, math.floor(self.settings.cap * prompts)), self.waste if waste is None else waste
        # Slightly less, so that rounding in the quotient does not add a prompt.
        return most if waste >= 1.0 else min(math.ceil(prompts / (1.0 - waste) - 1e-9), most)

    def run(self, plan: StepPlan, sampling: Sampling) -> list[Row]:
        want = sum(sampling.gather(len({row.key.group for row in plan.rows})))
        more = self.size(want) - want
        if more:
            plan = replace(plan, rows=(*plan.rows, *sampling.more(more).rows))
        rows = sampling.judge(plan.rows)
        groups = rewards_of(sampling.outcomes(rows), sampling.drawn)
        mixed = [group for group, rewards in groups.items() if len(rewards) > 1]
        order = stream(self.settings.seed, "adaptive_oversampling", plan.step).permutation(len(mixed))
        chosen = {mixed[int(place)] for place in order[:want]}
        sampling.measure(_DISCARDED, len(groups) - len(mixed), len(groups))
        sampling.measure("adaptive_oversampling/filled", len(chosen), want)
        return [row for row in rows if row.key.group in chosen]

    def observe(self, report: StepReport) -> None:
        """Move the average."""
        share, decay = report.metrics.get(_DISCARDED), self.settings.decay
        if share is not None:
            self.waste = decay * self.waste + (1.0 - decay) * share

    def state_dict(self) -> dict[str, Any]:
        """The average."""
        return {"waste": self.waste}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""
        self.waste = float(state["waste"])
