"""SvS: the student rewrites problems that it sometimes solves, and learns from both, its problems and their answers.

    share right in [low, high]   ->   `variants` problems, each written from one right answer
    a variant                    ->   as many answers as the prompt has; its answer is that of the problem it stems from
    reward of a variant          1 if the share of right answers to it lies in [least, most], else 0

The variant is what the student writes between the marks. A text without them, or too long for
rollout.max_prompt_tokens, earns 0 and is not answered. The answer stays that of the first problem, so a variant that
changes it is seldom solved and not paid, and a variant that gives it away is solved too often and not paid. The
variants of a prompt form a group, and so do the answers to each. Source: the released code of arXiv 2508.14029,
MasterVito/SvS (0.125 to 0.5 for problems to rewrite, 0.125 to 0.625 for paid variants; by notes on it); the wording is
ours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator

from opd.tasks.prompt import Prompt
from opd_zoo.prompts import in_template, refuse_episodes
from opd_zoo.strategies.hinted import by_uid, rewards_by_row
from student.data.needs import Needs
from student.data.row import RowKey
from student.plugin.strategy import Strategy, StrategySettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from student.data.plan import PlannedRow, StepPlan
    from student.data.row import Row
    from student.rollout.sampling import Sampling

SYNTHESIS = "synthesis"
"""The agent of rows that are variants."""

_WRITE = """A right answer to a problem that you do not see:
{response}

Write a problem, in other words and of another structure than usual, to which this is the answer. The final answer must
stay the same and must not be given away. Put the problem between <problem> and </problem>."""


class SvsSettings(StrategySettings):
    """Settings of SvS."""

    low: float = Field(0.125, ge=0, le=1, description="Minimum share of right answers to a problem that is rewritten.")
    high: float = Field(0.5, ge=0, le=1, description="Maximum share of right answers to a problem that is rewritten.")
    least: float = Field(0.125, ge=0, le=1, description="Minimum share of right answers to a variant that is paid.")
    most: float = Field(0.625, ge=0, le=1, description="Maximum share of right answers to a variant that is paid.")
    variants: int = Field(2, ge=2, description="Number of variants of a problem.")
    threshold: float = Field(1.0, description="Minimum reward of an answer that counts as right.")
    text: str = Field(_WRITE, description="Prompt for a variant, made of {response} and {prompt}.")
    start: str = Field("<problem>", min_length=1, description="Mark before a variant.")
    end: str = Field("</problem>", min_length=1, description="Mark after a variant.")

    @model_validator(mode="after")
    def _bands(self) -> SvsSettings:
        if self.low > self.high or self.least > self.most or not self.high:
            raise ValueError("low and least must not exceed high and most, and high must be above 0")
        return self


class Svs(Strategy[SvsSettings]):
    """Has the student rewrite problems that it sometimes solves, and answer its own (SvS)."""

    evidence: ClassVar[str] = "text and code"
    traits = Traits(
        judges_first=True,
        least_group=2,
        why={
            "works_ahead": "it writes problems from the answers to those of the step",
            "least_group": "looks for problems that are sometimes solved",
        },
    )

    def needs(self) -> Needs:
        """Verdicts."""
        return Needs(reward="verdict")

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts that are played: an episode cannot be rewritten by its text alone.

        Raises:
            ConfigError: naming the first of them.
        """
        refuse_episodes(prompts, "rollout.strategy svs")

    def run(self, plan: StepPlan, sampling: Sampling) -> list[Row]:
        """See `Strategy.run`; metrics svs/rewritten_share (of problems), svs/posed_share and svs/paid_share."""
        s = self.settings
        rows = sampling.judge(plan.rows)
        rewards, planned = rewards_by_row(rows, sampling), {one.key.uid: one for one in plan.rows}
        wanted: list[PlannedRow] = []
        for uid, mine in by_uid(rows).items():
            right = [row for row in mine if (rewards[uid, row.key.sample] or 0.0) >= s.threshold]
            able = bool(right) and s.low <= len(right) / len(mine) <= s.high
            sampling.measure("svs/rewritten_share", float(able))
            for number in range(s.variants if able else 0):
                wanted.append(self._writing(planned[uid], right[number % len(right)], number))
        written = sampling.judge([one for one in wanted if sampling.fits(one.prompt)])
        origin = {_variants(uid): uid for uid in planned}
        posed = {row.key: self._posed(row, planned[origin[row.key.uid]], sampling) for row in written}
        counts = {uid: len(mine) for uid, mine in by_uid(rows).items()}
        asked = [
            replace(planned[origin[key.uid]], key=RowKey(key.step, prompt.uid, sample), prompt=prompt)
            for key, prompt in posed.items()
            if prompt is not None
            for sample in range(counts[origin[key.uid]])
        ]
        # Two variants may be the same problem, which is answered once.
        answers = sampling.judge(list({one.key: one for one in asked}.values()))
        after, solved = rewards_by_row(answers, sampling), by_uid(answers)
        for row in written:
            prompt = posed[row.key]
            row.reward, row.rewarded = float(prompt is not None and self._paid(solved[prompt.uid], after)), True
            sampling.measure("svs/posed_share", float(prompt is not None))
            sampling.measure("svs/paid_share", row.reward)
        return [*rows, *written, *answers]

    def _writing(self, one: PlannedRow, row: Row, number: int) -> PlannedRow:
        """The row in which a variant is written from a right answer."""
        # With a uid of their own, variants are not taken for answers to the problem, for example by samplers.
        uid = _variants(one.key.uid)
        asked = replace(in_template(one.prompt, self.settings.text, {"response": row.text}), uid=uid)
        return replace(one, key=replace(one.key, uid=uid, sample=number, agent=SYNTHESIS), prompt=asked)

    def _posed(self, row: Row, one: PlannedRow, sampling: Sampling) -> Prompt | None:
        """The variant as a prompt, with the answer of the problem it stems from; None if it is not one."""
        _, _, after = row.text.partition(self.settings.start)
        problem, end, _ = after.partition(self.settings.end)
        if not end or not problem.strip():
            return None
        like, asked = one.prompt, in_template(one.prompt, "{problem}", {"problem": problem.strip()})
        prompt = Prompt.make(
            asked.text if asked.messages is None else asked.messages,  # type: ignore[arg-type]
            answer=like.answer,
            teacher=like.teacher,
            domain=like.domain,
            extra=like.extra,
            template_options=like.template_options,
            tools=list(like.tools) or None,
        )
        # Two ranks may write the same variant, whose answers must not share keys.
        return replace(prompt, uid=_own(f"{like.uid} {problem}")) if sampling.fits(prompt) else None

    def _paid(self, answers: Sequence[Row], rewards: Mapping[tuple[str, int], float | None]) -> bool:
        known = [r for row in answers if (r := rewards[row.key.uid, row.key.sample]) is not None]
        right = sum(reward >= self.settings.threshold for reward in known)
        return bool(known) and self.settings.least <= right / len(known) <= self.settings.most


def _variants(uid: str) -> str:
    """The uid of the group of variants of a prompt."""
    return _own(f"{SYNTHESIS} {uid}")


def _own(text: str) -> str:
    return Prompt.make(text).uid
