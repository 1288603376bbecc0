"""SPAE: each step of the reasoning is credited by how far it brought the student towards a certain and right answer.

    A_k = (r - mean r) f_k + xi g_k,   then standardised over the tokens of the step
    f_k = 1 - alpha (1 - exp(-C_k)),   C_k the number of steps before k that began with Phi above `saturation`
    g_k = exp(d_k) - mean of exp(d) over the steps of all rows,   d_k = Phi_{k+1} - Phi_k scaled to [0, 1] over them

Phi_k is the potential at the start of step k, from reward `spae`; the last step of a response has no g. What follows
once the answer is certain thus counts for less. Rows without potentials are one step. Source: arXiv 2601.03823 (text;
alpha and xi 0.5, saturation 0.9).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from opd_zoo.rewards.spae import PHI, START
from student.plugin.traits import Traits
from student.rl.advantages.base import Advantage, AdvantageSettings, Credit, known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from student.data.outcome import Outcome

_EPSILON = 1e-6


class SpaeSettings(AdvantageSettings):
    """Settings of SPAE."""

    alpha: float = Field(0.5, ge=0, le=1, description="How far steps after the answer is certain lose weight.")
    xi: float = Field(0.5, ge=0, description="Weight of the change of the potential.")
    saturation: float = Field(0.9, ge=-1, le=1, description="Potential above which the answer counts as certain.")


class Spae(Advantage[SpaeSettings]):
    """Reward against the group's mean, step by step by the change of the potential (SPAE)."""

    evidence = "text"
    traits = Traits(
        reads=("step_potentials",), why={"reads": "add reward spae"}, shift_free="group", learns_from_equal=True
    )

    def estimate(self, outcomes: Sequence[Outcome], credit: Sequence[Credit] | None) -> list[Credit]:
        """Credit per token; metrics saturated (steps whose weight fell) and rise (of the potential, per step)."""
        phis = [_noted(outcome, PHI) for outcome in outcomes]
        weights = [self._weights(phi) for phi in phis]
        changes = [np.diff(phi) for phi in phis]
        # Sorted before they are summed, so that the order of the rows has no effect.
        every = np.sort(np.concatenate([np.zeros(0), *changes]))
        low, high = (float(every[0]), float(every[-1])) if len(every) else (0.0, 0.0)
        scale = (high - low) or 1.0
        mean = float(np.exp((every - low) / scale).mean()) if len(every) else 0.0
        found = []
        for outcome, centred, weight, change in zip(outcomes, self._centred(outcomes), weights, changes, strict=True):
            values = centred * weight
            values[: len(change)] += self.settings.xi * (np.exp((change - low) / scale) - mean)
            found.append(_by_token(values, outcome))
        steps = sum(map(len, weights))
        self.fired = {
            "saturated": (float(sum(int((weight < 1.0).sum()) for weight in weights)), float(steps)),
            "rise": (float(every.sum()), float(len(every))),
        }
        return _standardised(found)

    def _centred(self, outcomes: Sequence[Outcome]) -> list[float]:
        found = [0.0] * len(outcomes)
        for group in self.groups(outcomes):
            mean = math.fsum(known(outcomes[place]) for place in group) / len(group)
            for place in group:
                found[place] = known(outcomes[place]) - mean
        return found

    def _weights(self, phi: NDArray[np.float64]) -> NDArray[np.float64]:
        """F of each step of a row."""
        certain = (phi > self.settings.saturation).astype(np.float64)
        return np.asarray(1.0 - self.settings.alpha * (1.0 - np.exp(certain - np.cumsum(certain))))


def _noted(outcome: Outcome, prefix: str) -> NDArray[np.float64]:
    """The notes prefix0, prefix1, ... of a row, [steps]; a single 0 for a row without any."""
    values: list[float] = []
    while (value := outcome.notes.get(f"{prefix}{len(values)}")) is not None:
        values.append(value)
    return np.array(values or [0.0])


def _by_token(values: NDArray[np.float64], outcome: Outcome) -> NDArray[np.float64]:
    """[T] the value of each token's step."""
    steps = np.searchsorted(_noted(outcome, START), np.arange(outcome.length), side="right") - 1
    return values[steps]


def _standardised(credit: Sequence[NDArray[np.float64]]) -> list[Credit]:
    every = np.sort(np.concatenate([np.zeros(0), *credit]))
    if not len(every) or every[0] == every[-1]:
        return [np.zeros(len(values), np.float32) for values in credit]
    mean, width = every.mean(), every.std() + _EPSILON
    return [((values - mean) / width).astype(np.float32) for values in credit]
