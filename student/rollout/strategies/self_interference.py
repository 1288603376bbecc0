"""SELF: only prompts that greedy decoding does not solve, since learning on solved ones interferes with the others.

    greedy answer to each prompt at temperature 0;   right: the prompt is passed over;   wrong: it is sampled as planned
    further prompts, for at most `rounds` greedy rounds, until as many as planned are left

Greedy answers are verified, counted among the costs and not learnt from. Prompts whose greedy answer cannot be judged
are kept. The paper also takes the forward KL to the reference for the reverse one: term reference_kl, form k3_loss.
Source: arXiv 2510.02230 and the released code, mail-research/SELF-llm-interference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from student.rollout.strategies.dynamic_sampling import group_of
from student.rollout.strategy import Strategy, StrategySettings
from student.scoring.needs import Needs

if TYPE_CHECKING:
    from student.data.plan import PlannedRow, StepPlan
    from student.data.row import Row
    from student.rollout.rounds import Rollouts


class SelfInterferenceSettings(StrategySettings):
    """Settings of SELF."""

    rounds: int = Field(4, ge=1, description="Most greedy rounds of a step.")
    threshold: float = Field(1.0, description="Least reward of a solved prompt.")


class SelfInterference(Strategy):
    """The strategy; it has no state."""

    settings_type = SelfInterferenceSettings
    settings: SelfInterferenceSettings
    evidence: ClassVar[str] = "text and code"
    why_not_stale = "it samples only what greedy decoding, with the weights of the step, does not solve"
    judges = True

    def needs(self) -> Needs:
        """Rewards."""
        return Needs(reward="any")

    def run(self, plan: StepPlan, rollouts: Rollouts) -> list[Row]:
        """See `Strategy.run`."""
        # Of all ranks: they must agree on when to stop, and one may find all that another lacks.
        want = sum(rollouts.gather(len({row.key.group for row in plan.rows})))
        kept: dict[str, None] = {}
        mine: dict[str, list[PlannedRow]] = {}
        tried = 0
        for left in reversed(range(self.settings.rounds)):
            groups: dict[str, list[PlannedRow]] = {}
            for row in plan.rows:
                groups.setdefault(row.key.uid, []).append(row)
            mine |= groups
            # What the student's best guess solves has little to teach. Greedy rows have sample indices of their own,
            # because the planned ones are still to be sampled.
            greedy = [replace(row, temperature=0.0) for row in rollouts.again([rows[0] for rows in groups.values()])]
            outcomes = rollouts.outcomes(rollouts.judge(greedy))
            tried += len(outcomes)
            solved = self.settings.threshold
            unsolved = {group_of(o): o.uid for o in outcomes if o.reward is None or o.reward < solved}
            kept |= {unsolved[group]: None for group in rollouts.drawn if group in unsolved}
            missing = want - len(kept)
            if missing <= 0 or not left:
                break
            plan = rollouts.more(want)
        chosen = list(kept)[:want]
        rollouts.measure("self_interference/solved_share", tried - len(kept), tried)
        rollouts.measure("self_interference/filled", len(chosen), want)
        # Chosen among the prompts of all ranks; each samples those that it has planned.
        return rollouts.score(rollouts.sample([row for uid in chosen for row in mine.get(uid, [])]))
