"""LTE: groups without a right answer try again, told which answers were wrong; right answers replace wrong ones.

    all answers wrong  ->  as many further answers under the prompt with a hint
        all of them truncated      the hint asks to think concisely
        some truncated             that, and the list of the distinct wrong answers
        none truncated             the list
    each right answer replaces a wrong answer of the group, chosen at random

If the hint is too long, it names fewer of the wrong answers; if no hint fits, the group stays as it is. The hint never
contains the reference answer. The wording of the hints is ours. The loss is mixed_context: the ratio to the policy
under the hint, shaped by r / (r + gamma). Source: arXiv 2510.26109 (text; its code could not be read).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from opd_zoo.strategies.hinted import HINTED, Hint, Hinted, all_wrong, by_uid, rewards_by_row
from student.data.streams import stream
from student.plugin.strategy import StrategySettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.plan import StepPlan
    from student.data.row import Row
    from student.rollout.sampling import Sampling


class LteSettings(StrategySettings):
    """Settings of LTE."""

    threshold: float = Field(1.0, description="Minimum reward of an answer that counts as right.")
    concise: str = Field("Think concisely.", description="Hint for groups with answers that were cut off.")
    answers: str = Field(
        "These answers are wrong: {answers}. Do not mention this note.",
        description="Hint that lists the wrong answers, in place of {answers}.",
    )
    seed: int = Field(0, ge=0, description="Seed of the choice of wrong answers that are replaced.")


class Lte(Hinted[LteSettings]):
    """Lets all-wrong groups try again, told of their wrong answers (LTE)."""

    evidence: ClassVar[str] = "text"
    traits = replace(HINTED, works_ahead=True, judges_first=True)

    def run(self, plan: StepPlan, sampling: Sampling) -> list[Row]:
        threshold = self.settings.threshold
        rows = sampling.judge(plan.rows)
        rewards = rewards_by_row(rows, sampling)
        groups = by_uid(rows)
        hard = [uid for uid, mine in groups.items() if all_wrong([rewards[uid, r.key.sample] for r in mine], threshold)]
        hints = {uid: self.hints(groups[uid], sampling.extract(groups[uid])) for uid in hard}
        wanted = [self.hinted(row, hints[row.key.uid], sampling) for row in plan.rows if row.key.uid in hints]
        hinted = sampling.judge(sampling.again([row for row in wanted if row is not None]))
        after = rewards_by_row(hinted, sampling)
        for uid, found in by_uid(hinted).items():
            right = [row for row in found if (after[uid, row.key.sample] or 0.0) >= threshold]
            order = stream(self.settings.seed, "lte", plan.step, uid).permutation(len(groups[uid]))
            leave = {int(place) for place in order[: len(right)]}
            groups[uid] = [row for place, row in enumerate(groups[uid]) if place not in leave] + right
            sampling.measure("lte/helped_share", float(bool(right)))
        sampling.measure("lte/tried_share", len(hard), len(groups))
        kept = [row for mine in groups.values() for row in mine]
        sampling.measure("hinted_share", sum(not row.on_policy for row in kept), len(kept))
        return kept

    def hints(self, rows: Sequence[Row], answers: Sequence[str | None]) -> list[Hint]:
        """The prompt with what there is to say of a group of wrong answers, then with ever fewer of the answers."""
        said = ["{prompt}", *([self.settings.concise] if any(row.truncated for row in rows) else [])]
        wrong = list(
            dict.fromkeys(a for row, a in zip(rows, answers, strict=True) if a is not None and not row.truncated)
        )
        told = "\n".join([*said, self.settings.answers])
        hints: list[Hint] = [(told, {"answers": ", ".join(wrong[:n])}) for n in range(len(wrong), 0, -1)]
        return hints + ([("\n".join(said), {})] if said[1:] or not wrong else [])
