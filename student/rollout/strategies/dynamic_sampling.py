"""Dynamic sampling: replace groups whose rewards are all equal by groups of further prompts (DAPO, arXiv 2503.14476).

    kept  <- groups of the plan whose rewards differ
    while kept < groups of the plan and rounds are left:
        kept <- kept + groups of further prompts whose rewards differ
    learn from the first `groups of the plan` of kept

A group in which all rewards are equal has zero advantage everywhere and only dilutes the batch. Groups are chosen among
those of all ranks, in the order in which they were drawn, so the choice does not depend on how rows are spread over
ranks. Teachers score only the chosen groups, while further rounds are sampled. The selection favours prompts of medium
difficulty, so the gradient is that of a different mixture of prompts. Costs count everything that is sampled. The paper
draws without limit; here `rounds` is the limit, and a step that reaches it learns from fewer groups (metric
dynamic_sampling/filled).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from student.data.needs import Needs
from student.data.row import RowKey
from student.plugin.strategy import Strategy, StrategySettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from student.data.outcome import Outcome
    from student.data.plan import StepPlan
    from student.data.row import Row
    from student.rollout.sampling import Sampling


class DynamicSamplingSettings(StrategySettings):
    """Settings of dynamic sampling."""

    rounds: int = Field(4, ge=2, description="Maximum number of rounds in a step, including the planned one.")
    draw: Literal["batch", "missing"] = Field(
        "batch",
        description="Number of prompts in a further round. batch: as many as the step has (as the released code "
        "does). missing: as many as there are groups missing, which samples less but takes more rounds.",
    )


class DynamicSampling(Strategy[DynamicSamplingSettings]):
    """Draws further prompts until enough groups have rewards that differ (DAPO)."""

    evidence: ClassVar[str] = "text and code"
    traits = Traits(works_ahead=True, judges_first=True, least_group=2, drops_equal_groups=True)

    def needs(self) -> Needs:
        """Rewards."""
        return Needs(reward="any")

    def run(self, plan: StepPlan, sampling: Sampling) -> list[Row]:
        want = sum(sampling.gather(len({row.key.group for row in plan.rows})))
        pool: list[Row] = []
        kept: dict[str, None] = {}
        drawn = 0
        for left in reversed(range(self.settings.rounds)):
            rows = sampling.judge(plan.rows)
            pool += rows
            groups = rewards_of(sampling.outcomes(rows), sampling.drawn)
            drawn += len(groups)
            kept |= {group: None for group, rewards in groups.items() if len(rewards) > 1}
            sure = set(list(kept)[:want])
            # Teachers can start on these groups, because later rounds only append to them.
            sampling.keep([row for row in rows if row.key.group in sure])
            missing = want - len(kept)
            if missing <= 0 or not left:
                break
            plan = sampling.more(missing if self.settings.draw == "missing" else want)
        chosen = set(list(kept)[:want])
        # All ranks have the same numbers, so counting them on each rank does not change the ratio.
        sampling.measure("dynamic_sampling/kept_share", len(kept), drawn)
        sampling.measure("dynamic_sampling/filled", len(chosen), want)
        return [row for row in pool if row.key.group in chosen]


def group_of(outcome: Outcome) -> str:
    """The key of the group of a row; see `RowKey`."""
    return RowKey(outcome.step, outcome.uid, outcome.sample, outcome.turn, outcome.agent).group


def rewards_of(outcomes: Iterable[Outcome], drawn: Sequence[str]) -> dict[str, set[float]]:
    """The distinct known rewards of each group, in the order of `drawn`; outcomes are sorted by uid instead."""
    groups: dict[str, set[float]] = {}
    for outcome in outcomes:
        groups.setdefault(group_of(outcome), set()).update([] if outcome.reward is None else [outcome.reward])
    return {group: groups[group] for group in drawn if group in groups}
