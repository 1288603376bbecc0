"""PR (Dr.Kernel): rewards each turn for measured correctness, speed-up and share of time in its own kernels.

    r_k = correct_weight c_k + (speed_weight s_k + coverage_weight v_k) [c_k = 1]
    s_k = min(speed-up, cap), 0 under `floor`;   r_k = penalty for a decoy, and for a turn without measures

After each turn the environment reports its measures as
`Observation.info["measures"] = {"correct": 1, "speedup": 1.7, "coverage": 0.4, "decoy": 0}`, where coverage is the
share of the profiled time spent in the student's own kernels, and a decoy is a kernel that is defined and not used.
A wrong kernel can be as fast as it likes, so the speed of wrong turns is paid only with `speed_of: all`.
Rewards are by turn, for advantages that read them (`trloo`); the row's own reward stays the verdict, and an episode in
which nothing was measured keeps the rewards of its environment. Source: the released code of arXiv 2602.05885
(hkust-nlp/KernelGYM, read): cap 3, floor 0, coverage 0.5; its weights of correctness and speed, and its penalty, were
not found: 1, 1 and 0 are ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from student.plugin.traits import Traits
from student.scoring.rewards.base import Reward, RewardSettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from student.data.row import Row
    from student.plugin.terms import Term
    from student.scoring.rewards.base import RewardServices
    from student.settings.recipe import Recipe

NAMES = ("correct", "speedup", "coverage", "decoy")


class ProfilingSettings(RewardSettings):
    """Settings of PR."""

    correct_weight: float = Field(1.0, ge=0, description="Reward of a correct turn.")
    speed_weight: float = Field(1.0, ge=0, description="Weight of the speed-up.")
    speed_of: Literal["correct", "all"] = Field(
        "correct", description="Turns whose speed-up is rewarded: correct ones, or wrong ones too (all)."
    )
    coverage_weight: float = Field(0.5, ge=0, description="Weight of the coverage of a correct turn.")
    cap: float = Field(3.0, gt=0, description="Speed-up above which the reward does not rise further.")
    floor: float = Field(0.0, ge=0, description="Speed-up below which none is rewarded.")
    penalty: float = Field(0.0, le=0, description="Reward of a decoy, and of a turn without measures.")


class Profiling(Reward[ProfilingSettings]):
    """Rewards each turn by correctness, speed-up and profiled coverage (Dr.Kernel's PR)."""

    evidence = "text and code"
    by_group = False
    traits = Traits(gives=("turns",), why={"gives": "use advantage trloo"})

    def remarks(self, recipe: Recipe, terms: Sequence[Term]) -> list[str]:
        """A remark if wrong turns are rewarded for speed."""
        if self.settings.speed_of == "correct" or not self.settings.speed_weight:
            return []
        return [
            "reward 'profiling' with speed_of all rewards wrong turns for their speed, which a student learns to "
            "exploit; set speed_of: correct"
        ]

    def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
        """Set the rewards by turn; metrics correct, decoys, unmeasured (shares of turns), speedup (of correct ones)."""
        for row in rows:
            turns = [measured(row, turn) for turn in range(len(row.turns))]
            if not any(turns):
                continue
            acts = [turn not in row.summaries for turn in range(len(turns))]
            row.turn_rewards = tuple(self.paid(found) if act else 0.0 for found, act in zip(turns, acts, strict=True))
            for found in (found for found, act in zip(turns, acts, strict=True) if act):
                self.fire("correct", float(found.get("correct", 0.0) > 0))
                self.fire("decoys", float(found.get("decoy", 0.0) > 0))
                self.fire("unmeasured", float(not found))
                if found.get("correct", 0.0) > 0:
                    self.fire("speedup", found.get("speedup", 0.0))

    def paid(self, found: Mapping[str, float]) -> float:
        """The reward r of a turn, from its measures."""
        s, correct = self.settings, found.get("correct", 0.0) > 0
        if not found or found.get("decoy", 0.0) > 0:
            return s.penalty
        speed = min(found.get("speedup", 0.0), s.cap)
        speed = speed if speed >= s.floor else 0.0
        speed = speed if correct or s.speed_of == "all" else 0.0
        coverage = found.get("coverage", 0.0) if correct else 0.0
        return s.correct_weight * correct + s.speed_weight * speed + s.coverage_weight * coverage


def measured(row: Row, turn: int) -> dict[str, float]:
    """What the environment measured of a turn, by name; empty if it measured nothing."""
    return {name: row.notes[f"{name}/{turn}"] for name in NAMES if f"{name}/{turn}" in row.notes}
