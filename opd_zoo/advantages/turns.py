"""Credit per turn of an episode, the same for all tokens of the turn: TRLOO and MAPO.

    G_k = r_k + gamma G_{k+1}                                  the return from turn k on
    trloo   A_k = n / (n - 1) (G_k - mean G_k) over the n episodes of the group that reached turn k, which is G_k minus
            the mean of the others; an episode that is alone at its turn keeps A_k = G_k          (TRLOO of Dr.Kernel)
    mapo    A_k = w (G_k - mean) / std over turn k of the group + (1 - w) (G_k - mean) / std over all turns of the step

r_k are the rewards by turn; an episode without any has its reward at its last turn. Sources: TRLOO, arXiv 2602.05885
(core_algos of hkust-nlp/KernelGYM); MAPO, 2603.06194, of which w and gamma were not found: 0.5 and 1 are ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypeVar

from student.plugin.traits import Scope, Traits
from student.rl.advantages.base import Advantage, AdvantageSettings, Credit, known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.outcome import Outcome

_EPSILON = 1e-6


class TurnSettings(AdvantageSettings):
    """Settings of credit by turn."""

    discount: float = Field(1.0, ge=0, le=1, description="gamma, by which the rewards of later turns are discounted.")


TurnSettings_co = TypeVar("TurnSettings_co", bound=TurnSettings, covariant=True, default=TurnSettings)


class MapoSettings(TurnSettings):
    """Settings of MAPO."""

    mix: float = Field(
        0.5,
        ge=0,
        le=1,
        description="w, the weight of the credit within the turn's own group; 1 - w is the weight of that within the "
        "whole step.",
    )


def returns(outcome: Outcome, discount: float) -> NDArray[np.float64]:
    """[turns] float64 discounted return from each turn of an episode on."""
    rewards = np.zeros(max(1, len(outcome.turns.spans)))
    if outcome.turns.rewards:
        rewards = np.array(outcome.turns.rewards, dtype=np.float64)
    else:
        rewards[-1] = known(outcome)
    found, later = np.zeros_like(rewards), 0.0
    for turn in reversed(range(len(rewards))):
        found[turn] = later = rewards[turn] + discount * later
    return found


def normalised(values: Sequence[float], *, scale: bool) -> NDArray[np.float64]:
    """[n] float64 values minus their mean, with `scale` over their deviation (n - 1); 0 for equal or single ones."""
    found = np.array(values, dtype=np.float64)
    ordered = np.sort(found)  # summed in order of size, so that the order of the episodes has no effect
    if len(found) < 2 or ordered[0] == ordered[-1]:
        return np.zeros_like(found)
    centred: NDArray[np.float64] = found - ordered.mean()
    return centred / (ordered.std(ddof=1) + _EPSILON) if scale else centred


def spread(outcome: Outcome, values: NDArray[np.float64]) -> Credit:
    """The credit of each token [T], from that of its turn; one number for a row without turns."""
    if not outcome.turns.spans:
        return float(values[-1])
    found = np.zeros(outcome.length, dtype=np.float32)
    for (start, end), value in zip(outcome.turns.spans, values, strict=True):
        found[start:end] = value
    return found


class TurnAdvantage(Advantage[TurnSettings_co]):
    """Base of credit by turn: subclasses turn the returns of all episodes into credit of the same shape."""

    @property
    def traits(self) -> Traits:
        return Traits(reads=("turns",))

    def estimate(self, outcomes: Sequence[Outcome], credit: Sequence[Credit] | None) -> list[Credit]:
        """Credit per token of each episode, from `of_turns`."""
        found = [returns(outcome, self.settings.discount) for outcome in outcomes]
        values = self.of_turns(found, self._at_turns(outcomes, found))
        return [spread(outcome, value) for outcome, value in zip(outcomes, values, strict=True)]

    def of_turns(
        self, returns: Sequence[NDArray[np.float64]], groups: Sequence[Sequence[tuple[int, int]]]
    ) -> list[NDArray[np.float64]]:
        """Credit by episode and turn, in the shape of `returns`.

        Args:
            returns: for each episode [turns].
            groups: sets of (episode, turn) that are compared with each other: those of one prompt at the same turn.
        """
        raise TypeError(f"{type(self).__name__} does not implement of_turns")

    def _at_turns(
        self, outcomes: Sequence[Outcome], found: Sequence[NDArray[np.float64]]
    ) -> list[list[tuple[int, int]]]:
        groups = []
        for places in self.groups(outcomes):
            for turn in range(max(len(found[place]) for place in places)):
                groups.append([(place, turn) for place in places if turn < len(found[place])])
        return groups


class Trloo(TurnAdvantage):
    """The return of each turn minus the mean of the other episodes at that turn (TRLOO)."""

    evidence = "text and code"
    traits = Traits(shift_free="group", reads=("turns",))

    def of_turns(
        self, returns: Sequence[NDArray[np.float64]], groups: Sequence[Sequence[tuple[int, int]]]
    ) -> list[NDArray[np.float64]]:
        found = [values.copy() for values in returns]
        for group in groups:
            own = [float(returns[episode][turn]) for episode, turn in group]
            values = normalised(own, scale=False) * len(own) / (len(own) - 1) if len(own) > 1 else np.array(own)
            for (episode, turn), value in zip(group, values, strict=True):
                found[episode][turn] = value
        return found


class Mapo(TurnAdvantage[MapoSettings]):
    """The return of each turn, normalised over its group and over the step (MAPO)."""

    evidence = "inferred"

    @property
    def traits(self) -> Traits:
        scope: Scope = "batch" if self.settings.mix < 1 else "group"
        return Traits(shift_free=scope, scale_free=scope, reads=("turns",))

    def of_turns(
        self, returns: Sequence[NDArray[np.float64]], groups: Sequence[Sequence[tuple[int, int]]]
    ) -> list[NDArray[np.float64]]:
        mix = self.settings.mix
        # Summed in order of size, so that the order of the episodes has no effect.
        every = np.sort(np.concatenate([np.zeros(0), *returns]))
        mean, deviation = (float(every.mean()), float(every.std())) if len(every) else (0.0, 0.0)
        found = [(1 - mix) * (values - mean) / (deviation + _EPSILON) for values in returns]
        for group in groups:
            values = np.array([returns[episode][turn] for episode, turn in group])
            ordered = np.sort(values)
            own = (values - ordered.mean()) / (ordered.std() + _EPSILON)
            for (episode, turn), value in zip(group, own, strict=True):
                found[episode][turn] += mix * value
        return found
