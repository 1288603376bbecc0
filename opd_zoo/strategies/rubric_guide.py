"""RGR-GRPO: where no answer passes, the best one is refined by the criteria it failed, and the refinement joins it.

    no reward of a group >= threshold   ->   one more answer, given the best one and its failed criteria
    its reward is higher                ->   it takes the place of the worst answer, trained under the plain prompt

The criteria are those of reward `rubric`, which notes the failed ones. The loss is mixed_context, whose shaped ratio is
that of the policy under the refining prompt. A group whose refinement does not fit rollout.max_prompt_tokens, or is no
better, stays as it is. Source: arXiv 2511.12344 (text in parts: when to refine, failed criteria, a hinted row with
a shaped ratio; which row it replaces and the wording are ours).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from opd.errors import ConfigError
from opd_zoo.criteria import FAILED, criteria_of
from opd_zoo.strategies.hinted import HINTED, Hinted, all_wrong, by_uid, rewards_by_row
from student.plugin.strategy import StrategySettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.plan import StepPlan
    from student.data.row import Row
    from student.plugin.terms import Term
    from student.rollout.sampling import Sampling
    from student.settings.recipe import Recipe

_REFINE = """{prompt}

An earlier answer:
{response}

It does not meet these criteria:
{failed}

Answer again, and meet them."""


class RubricGuideSettings(StrategySettings):
    """Settings of RGR-GRPO's guidance."""

    column: str = Field("rubric", description="Kept column with the prompt's criteria (prompts.keep_columns).")
    threshold: float = Field(1.0, description="Minimum reward of an answer that passes.")
    text: str = Field(
        _REFINE,
        description="Prompt from which a refinement is sampled, made of {prompt}, {response} and {failed}; it is never "
        "trained on.",
    )


class RubricGuide(Hinted[RubricGuideSettings]):
    """Refines the best answer of groups in which none passes by the criteria it failed (RGR-GRPO)."""

    evidence: ClassVar[str] = "text"

    @property
    def traits(self) -> Traits:
        return replace(HINTED, works_ahead=True, judges_first=True, least_group=2, columns=(self.settings.column,))

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse a recipe without the reward that notes failed criteria.

        Raises:
            ConfigError: with the reward to add.
        """
        if all(reward.get("name") != "rubric" for reward in recipe.rewards):
            raise ConfigError(
                "rollout.strategy rubric_guide needs failed criteria, which nothing notes; add reward rubric."
            )

    def run(self, plan: StepPlan, sampling: Sampling) -> list[Row]:
        """See `Strategy.run`; metrics rubric_guide/tried_share and .../joined_share (of groups), and .../gain."""
        rows = sampling.judge(plan.rows)
        rewards, groups = rewards_by_row(rows, sampling), by_uid(rows)
        planned = dict(zip((row.key for row in rows), plan.rows, strict=True))
        wanted = []
        for uid, mine in groups.items():
            known = [rewards[uid, row.key.sample] for row in mine]
            sampling.measure("rubric_guide/tried_share", float(all_wrong(known, self.settings.threshold)))
            if all_wrong(known, self.settings.threshold):
                best = max(mine, key=lambda row: _order(rewards[row.key.uid, row.key.sample]))
                hint = (self.settings.text, {"response": best.text, "failed": self._failed(best)})
                wanted.append(self.hinted(planned[best.key], [hint], sampling))
        refined = sampling.judge(sampling.again([one for one in wanted if one is not None]))
        after = rewards_by_row(refined, sampling)
        joined = {row.key.uid: row for row in refined}
        for uid, mine in groups.items():
            best_before = max(_order(rewards[uid, row.key.sample]) for row in mine)
            new = joined.get(uid)
            gain = -1.0 if new is None else _order(after[uid, new.key.sample]) - best_before
            sampling.measure("rubric_guide/joined_share", float(gain > 0))
            if new is not None and gain > 0:
                sampling.measure("rubric_guide/gain", gain)
                worst = min(mine, key=lambda row: _order(rewards[row.key.uid, row.key.sample]))
                mine[mine.index(worst)] = new
        found = [row for mine in groups.values() for row in mine]
        sampling.measure("hinted_share", sum(not row.on_policy for row in found), len(found))
        return found

    def _failed(self, row: Row) -> str:
        criteria = criteria_of(row.prompt, self.settings.column)
        return "\n".join(f"- {text}" for k, (text, _) in enumerate(criteria) if f"{FAILED}{k}" in row.notes)


def _order(reward: float | None) -> float:
    """A reward to compare by; an unknown one is worse than any."""
    return float("-inf") if reward is None else reward
