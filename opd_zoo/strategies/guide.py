"""Guide: groups without a right answer are sampled again as a whole, under a hint that is stored with the prompt.

    mean reward of a group < low     all its answers are sampled again under the hint, and replace the first ones
    band                             only groups with low <= mean reward <= high are learnt from, hinted or not

The hint is a kept column of the prompts (`prompts.keep_columns: [hint]`). A group whose hint does not fit
rollout.max_prompt_tokens stays as it is. The loss is mixed_context with `quantile: 0.9`, the ratio to the policy under
the hint shaped by a quantile of such ratios. Source: arXiv 2506.13923 and the released code,
vaskar-open-source-research/guide_rl.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from opd.errors import DataError
from opd_zoo.strategies.hinted import HINTED, Hint, Hinted, by_uid, rewards_by_row
from student.plugin.strategy import StrategySettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opd.tasks.prompt import Prompt
    from student.data.plan import PlannedRow, StepPlan
    from student.data.row import Row
    from student.rollout.sampling import Sampling


class GuideSettings(StrategySettings):
    """Settings of Guide."""

    column: str = Field("hint", description="Kept column of the prompts that holds the hint (prompts.keep_columns).")
    text: str = Field("{prompt}\n{hint}", description="How prompt and hint are put together.")
    low: float = Field(
        1e-3,
        description="Mean reward below which a group is sampled again under the hint; with band, also the minimum of "
        "groups that are learnt from.",
    )
    high: float = Field(0.999, description="Maximum mean reward of the groups that are learnt from; needs band.")
    band: bool = Field(True, description="Learn only from groups whose mean reward lies between low and high.")


class Guide(Hinted[GuideSettings]):
    """Lets all-wrong groups try again under a stored hint (Guide)."""

    evidence: ClassVar[str] = "text and code"

    @property
    def traits(self) -> Traits:
        return replace(HINTED, works_ahead=True, judges_first=True, columns=(self.settings.column,))

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts of which none has a hint.

        Raises:
            DataError: naming the first of them.
        """
        if all(prompt.extra.get(self.settings.column) is None for prompt in prompts):
            self._hint(prompts[0])

    def run(self, plan: StepPlan, sampling: Sampling) -> list[Row]:
        s = self.settings
        rows = sampling.judge(plan.rows)
        means = self._means(rows, sampling)
        groups = by_uid(rows)
        # A group without a known reward does not count as failed.
        hard = {uid for uid in groups if means.get(uid, s.low) < s.low}
        wanted = [self.hinted(row, [self._told(row)], sampling) for row in plan.rows if row.key.uid in hard]
        hinted = sampling.judge(sampling.again([row for row in wanted if row is not None]))
        means |= self._means(hinted, sampling)
        groups |= by_uid(hinted)
        kept = {uid: mine for uid, mine in groups.items() if not s.band or s.low <= means.get(uid, -1.0) <= s.high}
        sampling.measure("guide/tried_share", len(hard), len(groups))
        sampling.measure("guide/kept_share", len(kept), len(groups))
        found = [row for mine in kept.values() for row in mine]
        sampling.measure("hinted_share", sum(not row.on_policy for row in found), len(found))
        return found

    def _told(self, row: PlannedRow) -> Hint:
        return self.settings.text, {"hint": self._hint(row.prompt)}

    def _hint(self, prompt: Prompt) -> str:
        hint = prompt.extra.get(self.settings.column)
        if hint is None:
            raise DataError(
                f"{prompt.name} has no column {self.settings.column!r}, from which rollout.strategy guide reads its "
                "hint; add it to prompts.keep_columns."
            )
        return str(hint)

    @staticmethod
    def _means(rows: list[Row], sampling: Sampling) -> dict[str, float]:
        """The mean of the known rewards of each prompt, over all ranks."""
        found: dict[str, list[float]] = {}
        for (uid, _), reward in rewards_by_row(rows, sampling).items():
            if reward is not None:
                found.setdefault(uid, []).append(reward)
        return {uid: sum(values) / len(values) for uid, values in found.items()}
