"""REC's balance: drop surplus wrong answers until there are as many as right ones, then subtract the mean of the rest.

    right   answers with r >= mean r of the group
    where there are more wrong ones than right ones, the surplus of wrong ones, chosen at random, has A_i = 0
    A_i = (r_i - mean r) / std r over those that are left,   std (n) with `scale: std`, else 1

Dropped answers stay in the denominators. It is meant for objective rec. The random choice depends on step and prompt
alone, so a step that is repeated drops the same answers. Source: REC, arXiv 2509.24203, by the released code of
Trinity-RFT (its advantage rec with drop: balance, read).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from opd_zoo.deviation import deviation
from student.data.streams import stream
from student.plugin.traits import Traits
from student.rl.advantages.base import Advantage, AdvantageSettings, Credit, known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.outcome import Outcome


class RecBalanceSettings(AdvantageSettings):
    """Settings of the balance."""

    scale: Literal["std", "none"] = Field(
        "none", description="Divide by the standard deviation of the answers that are left (std) or not (none)."
    )
    epsilon: float = Field(1e-6, ge=0, description="Constant added to the deviation.")
    seed: int = Field(0, ge=0, description="Seed of the choice of wrong answers to drop.")


class RecBalance(Advantage[RecBalanceSettings]):
    """Reward minus the mean, after surplus wrong answers are dropped (REC).

    Metric dropped, a share of the answers.
    """

    evidence = "text and code"

    @property
    def traits(self) -> Traits:
        return Traits(least_group=2, shift_free="group", scale_free="group" if self.settings.scale == "std" else "")

    def estimate(self, outcomes: Sequence[Outcome], credit: Sequence[Credit] | None) -> list[Credit]:
        """One advantage per row, by the module's formula."""
        found: list[Credit] = [0.0] * len(outcomes)
        dropped = 0
        for places in self.groups(outcomes):
            # Sorted by key, because the result must not depend on the order of the outcomes.
            left = self._left(sorted(places, key=lambda place: _key(outcomes[place])), outcomes)
            dropped += len(places) - len(left)
            rewards = [known(outcomes[place]) for place in left]
            if len(set(rewards)) == 1:
                continue
            mean = math.fsum(rewards) / len(rewards)
            width = deviation(rewards, 0) + self.settings.epsilon if self.settings.scale == "std" else 1.0
            for place, reward in zip(left, rewards, strict=True):
                found[place] = (reward - mean) / width
        self.fired = {"dropped": (float(dropped), float(len(outcomes)))}
        return found

    def _left(self, places: Sequence[int], outcomes: Sequence[Outcome]) -> list[int]:
        mean = math.fsum(known(outcomes[place]) for place in places) / len(places)
        wrong = [place for place in places if known(outcomes[place]) < mean]
        surplus = 2 * len(wrong) - len(places)
        first = outcomes[places[0]]
        # If rewards are equal and their mean is rounded up, all would count as wrong: keep them.
        if surplus <= 0 or len(wrong) == len(places):
            return list(places)
        order = stream(self.settings.seed, "rec_balance", first.step, first.uid).permutation(len(wrong))
        out = {wrong[int(index)] for index in order[:surplus]}
        return [place for place in places if place not in out]


def _key(outcome: Outcome) -> tuple[object, ...]:
    return outcome.key(("step", "uid", "sample", "turn", "agent"))
