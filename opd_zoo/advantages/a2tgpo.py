"""A2TGPO (arXiv 2605.06200): what turns add to the belief in the right answer, normalised per turn and scaled by depth.

    z_k   (g_k - mean g) / std g over turn k of the prompt's episodes, g_k the gain of turn k (reward `igpo`)
    A_k   (sum over j >= k of gamma^(j-k) z_j) / sqrt(number of terms) + (R - mean R) / std R

The last turn has no gain and gets the outcome's part alone. Dividing by the root keeps the variance of A_k about the
same at every depth. The method's other half, clip ranges that follow z_k, is objective `a2tgpo`. The shape of both is
known from the abstract and readme; gamma was not found and is 1. Evidence: abstract.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from opd_zoo.advantages.turns import TurnSettings, normalised, spread
from student.plugin.traits import Traits
from student.rl.advantages.base import Advantage, Credit, known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.outcome import Outcome


class A2tgpo(Advantage[TurnSettings]):
    """The information gain of each turn, normalised per turn and over depth (A2TGPO).

    Metric gain_turns, the share of turns with a gain.
    """

    evidence = "abstract"
    traits = Traits(least_group=2, shift_free="group", scale_free="group", reads=("turns",))

    def estimate(self, outcomes: Sequence[Outcome], credit: Sequence[Credit] | None) -> list[Credit]:
        """Credit per token of each episode, by the module's formula."""
        gains = gains_of(outcomes, self.groups(outcomes))
        found = [accumulated(each, self.settings.discount) for each in gains]
        for places in self.groups(outcomes):
            for place, value in zip(places, normalised([known(outcomes[p]) for p in places], scale=True), strict=True):
                found[place] = found[place] + value
        self.fired = {"gain_turns": (sum(int(np.count_nonzero(each)) for each in gains), sum(map(len, gains)))}
        return [spread(outcome, value) for outcome, value in zip(outcomes, found, strict=True)]


def gains_of(outcomes: Sequence[Outcome], groups: Sequence[Sequence[int]]) -> list[NDArray[np.float64]]:
    """z_k for each episode [turns]; 0 for the last turn and for turns without peers in their group."""
    found = [np.zeros(max(1, len(outcome.turns.spans))) for outcome in outcomes]
    for places in groups:
        for turn in range(max(len(found[place]) for place in places) - 1):
            peers = [p for p in places if turn < len(outcomes[p].turns.rewards) - 1]
            scores = normalised([outcomes[place].turns.rewards[turn] for place in peers], scale=True)
            for place, value in zip(peers, scores, strict=True):
                found[place][turn] = value
    return found


def accumulated(gains: NDArray[np.float64], discount: float) -> NDArray[np.float64]:
    """[turns] sum over j >= k of discount^(j-k) z_j, over the root of the number of terms.

    The last entry, which has no gain, stays 0.
    """
    found, later = np.zeros_like(gains), 0.0
    for turn in reversed(range(len(gains) - 1)):
        later = float(gains[turn]) + discount * later
        # The sum has this many terms of variance 1.
        found[turn] = later / np.sqrt(len(gains) - 1 - turn)
    return found
