"""Reinforce-Ada: sample a prompt in rounds until it has enough right and wrong answers, then choose a balanced subset.

    round     rollout.samples_per_prompt further answers to every prompt that is still open, at most `rounds` times
    balanced  a prompt is closed by keep / 2 right and keep / 2 wrong answers
    positive  a prompt is closed by a single right answer
    learnt from: `keep` answers, half right and half wrong; if one kind has too few, the other fills up

Answers that are not chosen still count in statistics (`row.trained` is False), so a group's mean is over all answers:
with 3 right ones among 16, group_mean without scaling gives credits of 13/16 and -3/16, whichever 4 are learnt from.
This is the paper's global baseline. Source: arXiv 2510.04996 and the released code, RLHFlow/Reinforce-Ada.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from opd.errors import ConfigError
from opd_zoo.strategies.hinted import rewards_by_row
from student.data.needs import Needs
from student.plugin.strategy import Strategy, StrategySettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.plan import StepPlan
    from student.data.row import Row
    from student.plugin.terms import Term
    from student.rollout.sampling import Sampling
    from student.settings.recipe import Recipe


class ReinforceAdaSettings(StrategySettings):
    """Settings of Reinforce-Ada."""

    rounds: int = Field(4, ge=1, description="Maximum number of rounds in a step.")
    keep: int = Field(4, ge=2, description="Number of answers to a prompt that are learnt from.")
    rule: Literal["balanced", "positive"] = Field(
        "balanced",
        description="When a prompt has enough answers. balanced: keep / 2 right and keep / 2 wrong ones; positive: "
        "one right answer.",
    )
    threshold: float = Field(0.5, description="Minimum reward of an answer that counts as right.")


class ReinforceAda(Strategy[ReinforceAdaSettings]):
    """Draws answers to a prompt until some are right and some wrong, and learns from a balanced choice."""

    evidence: ClassVar[str] = "text and code"
    traits = Traits(works_ahead=True)

    def needs(self) -> Needs:
        """Rewards."""
        return Needs(reward="any")

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse settings that always choose all answers.

        Raises:
            ConfigError: naming the settings to change.
        """
        most = self.settings.rounds * recipe.rollout.samples_per_prompt
        if self.settings.keep >= most:
            raise ConfigError(
                f"rollout.strategy reinforce_ada keeps {self.settings.keep} answers to a prompt and draws at most "
                f"{most} (rounds x rollout.samples_per_prompt), so it has nothing to choose from; lower keep, or "
                "raise one of those."
            )

    def run(self, plan: StepPlan, sampling: Sampling) -> list[Row]:
        planned: dict[str, list[int]] = {}
        for index, one in enumerate(plan.rows):
            planned.setdefault(one.key.uid, []).append(index)
        rows: list[Row] = []
        open_ = list(plan.rows)
        for left in reversed(range(self.settings.rounds)):
            rows += sampling.score(sampling.sample(open_))
            # Rewards of all rounds, because rewards that compare answers change as a prompt gets more of them.
            rewards = rewards_by_row(rows, sampling)
            found: dict[str, list[tuple[Row, float | None]]] = {uid: [] for uid in planned}
            for row in rows:
                found[row.key.uid].append((row, rewards[row.key.uid, row.key.sample]))
            missing = [uid for uid, answers in found.items() if not self._enough(answers)]
            if not left or not sampling.any(bool(missing)):
                break
            open_ = sampling.again([plan.rows[index] for uid in missing for index in planned[uid]])
        for answers in found.values():
            mixed = self._choose(answers)
            sampling.measure("reinforce_ada/answers", len(answers))
            sampling.measure("reinforce_ada/mixed_share", mixed)
        return [row for answers in found.values() for row, _ in answers]

    def _kinds(self, answers: Sequence[tuple[Row, float | None]]) -> tuple[list[Row], list[Row]]:
        known = [(row, reward >= self.settings.threshold) for row, reward in answers if reward is not None]
        return [row for row, right in known if right], [row for row, right in known if not right]

    def _enough(self, answers: Sequence[tuple[Row, float | None]]) -> bool:
        right, wrong = self._kinds(answers)
        if self.settings.rule == "positive":
            return bool(right)
        return min(len(right), len(wrong)) >= self.settings.keep // 2

    def _choose(self, answers: Sequence[tuple[Row, float | None]]) -> bool:
        """Mark the answers to learn from, the first ones of each kind; returns whether both kinds are among them."""
        right, wrong = self._kinds(answers)
        keep = self.settings.keep
        take = min(len(right), max(keep // 2, keep - len(wrong)))
        chosen = {id(row) for row in (*right[:take], *wrong[: keep - take])}
        for row, _ in answers:
            row.trained = row.trained and id(row) in chosen
        return 0 < take < len(chosen)
