"""InfoPO's credit: the outcome, and what each turn found out, the more of it the less the outcomes tell apart.

    A_k   (R - mean R) / std R + s / (s + std R) z_k,   std R over the prompt's episodes, s over the whole step

z_k is the reward of turn k (reward `infopo`) normalised over turn k of the prompt's episodes; the last turn has the
outcome alone. Where all episodes of a prompt end alike, the gate is 1 and z_k alone teaches. Source: arXiv 2603.00656
(abstract: an adaptive fusion gated by the variance of the outcomes; this gate is ours). Evidence: abstract.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from opd_zoo.advantages.a2tgpo import gains_of
from opd_zoo.advantages.turns import normalised, spread
from opd_zoo.deviation import deviation
from student.plugin.traits import Traits
from student.rl.advantages.base import Advantage, Credit, known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.outcome import Outcome


class InfoPo(Advantage):
    """The outcome and the information gain of each turn, gated by how far the outcomes differ (InfoPO).

    Metrics gain_turns, the share of turns with a gain, and gate.
    """

    evidence = "abstract"
    traits = Traits(
        least_group=2,
        shift_free="group",
        scale_free="group",
        reads=("turns",),
        why={"reads": "add reward infopo or igpo"},
    )

    def estimate(self, outcomes: Sequence[Outcome], credit: Sequence[Credit] | None) -> list[Credit]:
        """Credit per token of each episode, by the module's formula."""
        groups = self.groups(outcomes)
        gains, gates = gains_of(outcomes, groups), []
        found = [each.copy() for each in gains]
        whole = deviation([known(outcome) for outcome in outcomes], 0)
        for places in groups:
            rewards = [known(outcomes[place]) for place in places]
            width = deviation(rewards, 0)
            gates.append(whole / (whole + width) if width else 1.0)
            for place, value in zip(places, normalised(rewards, scale=True), strict=True):
                found[place] = gates[-1] * found[place] + value
        turns = sum(map(len, gains))
        self.fired = {
            "gain_turns": (sum(int(np.count_nonzero(each)) for each in gains), turns),
            "gate": (sum(gates), len(gates)),
        }
        return [spread(outcome, value) for outcome, value in zip(outcomes, found, strict=True)]
