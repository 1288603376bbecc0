"""GiGPO (arXiv 2505.10978): credit for the episode, plus credit for each turn among turns that began at the same state.

    A^E_i    (R_i - mean R) / F over the episodes of the prompt
    G_ik     r_ik + gamma G_i(k+1), the discounted return from turn k of episode i on
    A^S_ik   (G_ik - mean G) / F over all turns of the prompt's episodes that began at the same state (the anchor)
    A_ik     A^E_i + w A^S_ik,   F the deviation, or 1

A state is what the environment reports as its state (`Observation.info["state"]`), or else what it last showed,
compared by hash; the authors compare what it showed. A turn whose state no other turn of the prompt shares has A^S = 0.
Revisits within one episode count like visits by other episodes, as in the code. Source: text, and verl-agent's
core_gigpo (read): gamma 0.95, w 1, and F = 1 by default (`mean_norm`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from opd_zoo.advantages.turns import TurnSettings, normalised, returns, spread
from student.plugin.traits import Traits
from student.rl.advantages.base import Advantage, Credit, known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.outcome import Outcome


class GigpoSettings(TurnSettings):
    """Settings of GiGPO."""

    discount: float = Field(0.95, ge=0, le=1, description="gamma, by which the rewards of later turns are discounted.")
    step_weight: float = Field(
        1.0, ge=0, description="w, the weight of the credit among turns that began at the same state."
    )
    scale: Literal["std", "none"] = Field(
        "none", description="Divide by the deviation of the group (std) or not (none)."
    )


class Gigpo(Advantage[GigpoSettings]):
    """Credit of the episode plus credit of each turn among turns at the same state (GiGPO).

    Metrics anchored_share (turns whose state another turn shares) and anchor_size (mean size of their groups).
    """

    evidence = "text and code"

    @property
    def traits(self) -> Traits:
        scaled = self.settings.scale == "std"
        return Traits(shift_free="group", scale_free="group" if scaled else "", reads=("turns",))

    def estimate(self, outcomes: Sequence[Outcome], credit: Sequence[Credit] | None) -> list[Credit]:
        """Credit per token of each episode, by the module's formula."""
        scale = self.settings.scale == "std"
        found = [returns(outcome, self.settings.discount) for outcome in outcomes]
        values = [each * 0.0 for each in found]
        turns = anchored = sizes = 0
        for places in self.groups(outcomes):
            for place, value in zip(places, normalised([known(outcomes[p]) for p in places], scale=scale), strict=True):
                values[place] += value
            for anchor in self._anchors(outcomes, places, [len(found[place]) for place in places]):
                turns += len(anchor)
                if len(anchor) > 1:
                    anchored, sizes = anchored + len(anchor), sizes + len(anchor) ** 2
                step = normalised([found[place][turn] for place, turn in anchor], scale=scale)
                for (place, turn), value in zip(anchor, step, strict=True):
                    values[place][turn] += self.settings.step_weight * value
        self.fired = {"anchored_share": (anchored, turns), "anchor_size": (sizes, anchored)}
        return [spread(outcome, value) for outcome, value in zip(outcomes, values, strict=True)]

    @staticmethod
    def _anchors(
        outcomes: Sequence[Outcome], places: Sequence[int], turns: Sequence[int]
    ) -> list[list[tuple[int, int]]]:
        """For each state the (episode, turn) pairs that began there; rows without states share a single one."""
        found: dict[str, list[tuple[int, int]]] = {}
        for place, count in zip(places, turns, strict=True):
            states = outcomes[place].turns.states or ("",) * count
            for turn in range(count):
                found.setdefault(states[turn], []).append((place, turn))
        return list(found.values())
