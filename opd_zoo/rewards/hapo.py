"""HAPO: a bonus for correct answers that are shorter than the shortest correct one to the same prompt so far.

    h      shortest correct length of the prompt in earlier steps, tokens
    f      cos(pi / 2 min(|y| / h, 2)), from 1 for nothing over 0 at h to -1 from 2 h on
    part = weight max(f, floor)   for a correct answer
           weight min(f, 0)       for a wrong one
           0                      while the prompt has no correct answer yet

The history is updated with the lengths of a step after its update. Source: the code of arXiv 2505.11225,
HCY123902/HAPO; the default floor -0.7 keeps a long correct answer above a wrong one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pydantic import Field

from student.plugin.traits import Traits
from student.scoring.rewards.base import Reward, RewardSettings, is_correct

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from student.data.report import StepReport
    from student.data.row import Row
    from student.scoring.rewards.base import RewardServices

_LENGTH = "hapo/length"


class HapoSettings(RewardSettings):
    """Settings of HAPO."""

    weight: float = Field(1.0, gt=0, description="Weight of the length reward, which is added to the verdict.")
    floor: float = Field(-0.7, ge=-1, le=0, description="Minimum length reward of a correct answer.")


class Hapo(Reward[HapoSettings]):
    """A bonus for correct answers shorter than the prompt's shortest so far (HAPO).

    Its state is these lengths.
    """

    evidence = "text and code"
    by_group = False
    traits = Traits(remembers_prompts=True)

    def __init__(self, settings: HapoSettings) -> None:
        super().__init__(settings)
        self.shortest: dict[str, int] = {}

    def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
        """Add the length reward as a part; metric known_prompts, the share of rows with a history."""
        for row in rows:
            correct = is_correct(row)
            if correct is None:
                continue
            if correct:
                # Passed on as a note, because `observe` sees the outcomes of all ranks, not their rows.
                row.notes[_LENGTH] = float(row.length)
            value = self.value(row.length, self.shortest.get(row.key.uid), correct=correct)
            row.reward_parts[self.label] = self.settings.weight * value
            self.fire("known_prompts", float(row.key.uid in self.shortest))

    def value(self, length: int, shortest: int | None, *, correct: bool) -> float:
        """The length reward, -1 to 1, of an answer of `length` tokens, given the shortest correct length so far."""
        if shortest is None:
            return 0.0
        f = math.cos(math.pi / 2 * min(length / shortest, 2.0))
        return max(f, self.settings.floor) if correct else min(f, 0.0)

    def observe(self, report: StepReport) -> None:
        """Update the shortest correct lengths from all ranks."""
        for outcome in report.outcomes:
            if _LENGTH in outcome.notes:
                length = int(outcome.notes[_LENGTH])
                self.shortest[outcome.uid] = min(length, self.shortest.get(outcome.uid, length))

    def state_dict(self) -> dict[str, Any]:
        """The shortest correct length of each prompt."""
        return {"shortest": dict(self.shortest)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.shortest = {str(uid): int(length) for uid, length in state["shortest"].items()}
