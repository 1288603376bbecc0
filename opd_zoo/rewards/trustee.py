"""The judge's reward of an episode in a simulated world: -1, 0 or 1, and `cut` if turns or tokens ran out.

    whole  r = the reward of the episode's last turn, where the judge gives its verdict

A verdict alone is 1 or 0, so failed and half-done episodes would look alike, and method `trustee` could never see a
mean below 0. Episodes that failed with an error or were not judged have no reward and enter no mean. Source: TRUSTEE,
arXiv 2604.17739 (text; it does not say what a cut episode gets, so that is ours).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from student.data.needs import Needs
from student.scoring.rewards.base import Reward, RewardSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.row import Row
    from student.scoring.rewards.base import RewardServices


class TrusteeRewardSettings(RewardSettings):
    """Settings of the reward."""

    cut: float = Field(-1.0, ge=-1, le=1, description="Reward of an episode that ran out of turns or tokens.")


class TrusteeReward(Reward[TrusteeRewardSettings]):
    """The judge's reward in a simulated world (TRUSTEE)."""

    kind: ClassVar[Literal["whole", "part"]] = "whole"
    evidence = "text"
    by_group = False

    def needs(self) -> Needs:
        """Verdicts, which show whether an episode was judged."""
        return Needs(reward="verdict")

    def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
        """Set the whole reward; metrics solved, failed and cut, shares of the rows with a verdict."""
        for row in rows:
            value = row.verdict_value
            if value is None:
                row.reward = None
                continue
            judged = bool(row.turn_rewards) and not row.truncated
            row.reward = float(row.turn_rewards[-1]) if judged else self.settings.cut
            self.fire("solved", float(row.reward >= 1.0))
            self.fire("failed", float(row.reward <= -1.0))
            self.fire("cut", float(row.truncated))
