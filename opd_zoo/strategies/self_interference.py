"""SELF: learn only from prompts that greedy decoding does not solve; learning on solved ones interferes with others.

    greedy answer to each prompt at temperature 0;   right: the prompt is skipped;   wrong: it is sampled as planned
    further prompts, for at most `rounds` greedy rounds, until as many as planned are left

Greedy answers are verified and counted in the costs, but not learnt from. Prompts whose greedy answer cannot be judged
are kept. The paper also replaces the reverse KL to the reference by the forward KL: term reference_kl, form k3_loss.
Source: arXiv 2510.02230 and the released code, mail-research/SELF-llm-interference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from student.data.needs import Needs
from student.plugin.strategy import Strategy, StrategySettings
from student.plugin.traits import Traits
from student.rollout.strategies.dynamic_sampling import group_of

if TYPE_CHECKING:
    from student.data.plan import PlannedRow, StepPlan
    from student.data.row import Row
    from student.rollout.sampling import Sampling


class SelfInterferenceSettings(StrategySettings):
    """Settings of SELF."""

    rounds: int = Field(4, ge=1, description="Maximum number of rounds of greedy decoding in a step.")
    threshold: float = Field(1.0, description="Minimum reward of a greedy answer that counts as right.")


class SelfInterference(Strategy[SelfInterferenceSettings]):
    """Samples only prompts that greedy decoding does not solve (SELF)."""

    evidence: ClassVar[str] = "text and code"
    traits = Traits(
        judges_first=True,
        why={"works_ahead": "it samples only prompts that greedy decoding with the weights of the step does not solve"},
    )

    def needs(self) -> Needs:
        """Rewards."""
        return Needs(reward="any")

    def run(self, plan: StepPlan, sampling: Sampling) -> list[Row]:
        # Counted over all ranks, which must agree on when to stop; one rank may find what another lacks.
        want = sum(sampling.gather(len({row.key.group for row in plan.rows})))
        kept: dict[str, None] = {}
        mine: dict[str, list[PlannedRow]] = {}
        tried = 0
        for left in reversed(range(self.settings.rounds)):
            groups: dict[str, list[PlannedRow]] = {}
            for row in plan.rows:
                groups.setdefault(row.key.uid, []).append(row)
            mine |= groups
            # Greedy rows get new sample indices, because the planned ones are still to be sampled.
            greedy = [replace(row, temperature=0.0) for row in sampling.again([rows[0] for rows in groups.values()])]
            outcomes = sampling.outcomes(sampling.judge(greedy))
            tried += len(outcomes)
            solved = self.settings.threshold
            unsolved = {group_of(o): o.uid for o in outcomes if o.reward is None or o.reward < solved}
            kept |= {unsolved[group]: None for group in sampling.drawn if group in unsolved}
            missing = want - len(kept)
            if missing <= 0 or not left:
                break
            plan = sampling.more(want)
        chosen = list(kept)[:want]
        sampling.measure("self_interference/solved_share", tried - len(kept), tried)
        sampling.measure("self_interference/filled", len(chosen), want)
        # Prompts are chosen over all ranks; each rank samples those that it has planned.
        return sampling.score(sampling.sample([row for uid in chosen for row in mine.get(uid, [])]))
