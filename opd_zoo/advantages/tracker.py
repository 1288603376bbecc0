"""A baseline from each prompt's own past, for single answers (MSSR).

    A_i = (r_i - v(x)),   then standardised over the batch
    v(x) <- memory v(x) + (1 - memory) mean r of the step,   v(x) = mean r of the step's other prompts before the first

No group is needed: with rollout.samples_per_prompt 1 it still has a baseline of the prompt. In the paper the memory
depends on how far the policy has moved since the prompt was last seen, which is not offered; its shaping by entropy is
modifier entropy_shaping. Source: arXiv 2512.18215 (notes; the constant memory is ours).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pydantic import Field

from opd_zoo.deviation import deviation
from student.plugin.traits import Traits
from student.rl.advantages.base import Advantage, AdvantageSettings, Credit, known

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from student.data.outcome import Outcome
    from student.data.report import StepReport


class ValueTrackerSettings(AdvantageSettings):
    """Settings of the tracker."""

    memory: float = Field(
        0.8, ge=0, lt=1, description="Share of a prompt's value that each step with that prompt keeps."
    )
    epsilon: float = Field(1e-6, ge=0, description="Constant added to the deviation.")


class Tracker(Advantage[ValueTrackerSettings]):
    """Reward minus the prompt's average in earlier steps, for single answers (MSSR).

    Its state is the value of each prompt.
    """

    evidence = "inferred"
    traits = Traits(learns_from_equal=True, shift_free="batch", scale_free="batch", remembers_prompts=True)

    def __init__(self, settings: ValueTrackerSettings) -> None:
        super().__init__(settings)
        self.values: dict[str, float] = {}

    def estimate(self, outcomes: Sequence[Outcome], credit: Sequence[Credit] | None) -> list[Credit]:
        """One advantage per row; metric known, the share of rows whose prompt has a value."""
        if not outcomes:
            return []
        before = self._before(outcomes)
        gaps = [known(outcome) - self.values.get(outcome.uid, before[outcome.uid]) for outcome in outcomes]
        self.fired = {"known": (float(sum(outcome.uid in self.values for outcome in outcomes)), float(len(outcomes)))}
        centre, width = math.fsum(gaps) / len(gaps), deviation(gaps, 1)
        return [(gap - centre) / (width + self.settings.epsilon) if width else 0.0 for gap in gaps]

    @staticmethod
    def _before(outcomes: Sequence[Outcome]) -> dict[str, float]:
        """For each prompt the mean reward of the step's other prompts; its own would bias the baseline."""
        mine: dict[str, list[float]] = {}
        for outcome in outcomes:
            mine.setdefault(outcome.uid, []).append(known(outcome))
        sums = {uid: math.fsum(rewards) for uid, rewards in mine.items()}
        total, alone = math.fsum(sums[uid] for uid in sorted(sums)), len(mine) == 1
        # A step of one prompt has only its own rewards.
        return {
            uid: total / len(outcomes) if alone else (total - sums[uid]) / (len(outcomes) - len(rewards))
            for uid, rewards in mine.items()
        }

    def observe(self, report: StepReport) -> None:
        """Move the values towards the step's rewards of on-policy rows."""
        rewards: dict[str, list[float]] = {}
        for outcome in report.outcomes:
            if outcome.reward is not None and outcome.on_policy:
                rewards.setdefault(outcome.uid, []).append(outcome.reward)
        for uid, found in rewards.items():
            new = math.fsum(found) / len(found)
            old = self.values.get(uid, new)
            self.values[uid] = self.settings.memory * old + (1.0 - self.settings.memory) * new

    def state_dict(self) -> dict[str, Any]:
        """The value of each prompt."""
        return {"values": dict(self.values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.values = {str(uid): float(value) for uid, value in state["values"].items()}
