"""Critique-GRPO: each answer is critiqued and refined, and the best refinement of a group takes its last place.

    y_1 .. y_{n-1}       sampled; the last planned answer of the group is not
    z_i                  sampled given the prompt, y_i and a critique of y_i, for every i
    group                y_1 .. y_{n-1} and the first z_i of the highest reward, trained under the plain prompt

    verdict   the critique says whether y_i is right                                                    ("simple")
    answer    and what the reference answer is                                                       ("simple_gt")
    text      for a right y_i as above, for a wrong one from a chat model that reads column `solution`      ("text")

If the chat model does not answer, the critique names the reference answer instead. The loss is mixed_context with
`denominator: one`, whose weight p / (p + 0.1) is this paper's, without clips, with advantage group_mean with `scale:
none` and aggregation constant. If the prompt with y_i in it exceeds rollout.max_prompt_tokens, y_i is not refined; a
group without any refinement is one answer smaller. Refining all answers doubles the number of samples. Source: the
released code, zhangxy-2019/critique-GRPO (read), which decodes the refinement and encodes it again where we keep its
ids; arXiv 2506.03106. The wording of the critiques is ours.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from opd.tasks.chat import ChatClient, ChatFailed, ChatSettings
from opd.tasks.messages import message_text
from opd_zoo.prompts import filled
from opd_zoo.strategies.hinted import HINTED, Hinted, by_uid, rewards_by_row
from student.plugin.strategy import StrategySettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from student.data.plan import StepPlan
    from student.data.row import Row
    from student.rollout.sampling import Sampling

_REFINE = """{prompt}

An earlier solution:
{response}

What was said of it:
{critique}

Solve the problem again, step by step. Put right what was wrong in the earlier solution."""

_ASK = """Problem:
{prompt}

A wrong solution:
{response}

The right solution:
{solution}

Name the mistakes of the wrong solution, step by step."""


class CritiqueSettings(StrategySettings):
    """Settings of Critique-GRPO."""

    critique: Literal["verdict", "answer", "text"] = Field(
        "answer",
        description="Form of the critique. verdict: whether the answer is right; answer: also the reference answer; "
        "text: for wrong answers, a text that the model `critic` writes.",
    )
    threshold: float = Field(1.0, description="Minimum reward of an answer that counts as right.")
    right: str = Field("The solution is right.", description="Critique of a right answer.")
    wrong: str = Field("The solution is wrong.", description="Critique of a wrong answer.")
    names: str = Field(
        " The answer is {answer}.", description="Sentence with the reference answer, added unless critique is verdict."
    )
    text: str = Field(
        _REFINE,
        description="Prompt from which a refinement is sampled, made of {prompt}, {response} and {critique}; it "
        "is never trained on.",
    )
    critic: ChatSettings | None = Field(
        None, description="Chat model that writes the critiques with `critique: text`: its endpoint and model."
    )
    column: str = Field(
        "solution", description="Kept column with the solution that the critic reads (prompts.keep_columns)."
    )
    question: str = Field(_ASK, description="What the critic is asked, made of {prompt}, {response} and {solution}.")
    workers: int = Field(16, ge=1, le=256, description="Maximum number of critiques requested at the same time.")

    @model_validator(mode="after")
    def _critic(self) -> CritiqueSettings:
        if (self.critique == "text") != (self.critic is not None):
            raise ValueError("critique: text needs critic (endpoint and model), and the other forms must leave it out")
        return self


class Critique(Hinted[CritiqueSettings]):
    """Replaces one answer of each group by a refinement after a critique (Critique-GRPO)."""

    evidence: ClassVar[str] = "text and code"

    @property
    def traits(self) -> Traits:
        return replace(
            HINTED,
            judges_first=True,
            least_group=2,
            columns=() if self.settings.critic is None else (self.settings.column,),
            why={
                **HINTED.why,
                "works_ahead": "it samples a refinement in place of the last planned row of each group",
                "least_group": "replaces one answer of each group by a refinement",
            },
        )

    def __init__(self, settings: CritiqueSettings) -> None:
        super().__init__(settings)
        self._client = ChatClient(settings.critic) if settings.critic else None

    def run(self, plan: StepPlan, sampling: Sampling) -> list[Row]:
        """See `Strategy.run`; metrics critique/refined_share (of groups), critique/right_share and critique/gain.

        The gain is the reward of the chosen refinement minus the mean reward of the sampled answers.
        """
        last = {row.key.uid: row.key for row in plan.rows}
        planned = [row for row in plan.rows if last[row.key.uid] != row.key]
        rows = sampling.judge(planned)
        rewards = rewards_by_row(rows, sampling)
        said = self._critiques(rows, rewards, sampling)
        wanted = [
            self.hinted(one, [(self.settings.text, {"response": row.text, "critique": critique})], sampling)
            for one, row, critique in zip(planned, rows, said, strict=True)
        ]
        refined = sampling.judge(sampling.again([one for one in wanted if one is not None]))
        after = rewards_by_row(refined, sampling)
        groups, kept = by_uid(refined), by_uid(rows)
        for uid, mine in kept.items():
            before = [known for row in mine if (known := rewards[uid, row.key.sample]) is not None]
            able = [row for row in groups.get(uid, []) if after[uid, row.key.sample] is not None]
            sampling.measure("critique/refined_share", float(bool(able)))
            if not able:
                continue
            best = max(able, key=lambda row: after[row.key.uid, row.key.sample] or 0.0)  # the first of equal ones
            reward = after[uid, best.key.sample] or 0.0
            mine.append(best)
            sampling.measure("critique/right_share", float(reward >= self.settings.threshold))
            if before:
                sampling.measure("critique/gain", reward - sum(before) / len(before))
        found = [row for mine in kept.values() for row in mine]
        sampling.measure("hinted_share", sum(not row.on_policy for row in found), len(found))
        return found

    def _critiques(
        self, rows: Sequence[Row], rewards: Mapping[tuple[str, int], float | None], sampling: Sampling
    ) -> list[str]:
        """The critique of each answer; an answer whose reward is unknown counts as wrong."""

        def say(row: Row) -> tuple[str, bool | None]:
            s, right = self.settings, (rewards[row.key.uid, row.key.sample] or 0.0) >= self.settings.threshold
            answer = row.prompt.answer
            names = filled(s.names, {"answer": str(answer)}) if answer is not None else ""
            plain = (s.right if right else s.wrong) + (names if s.critique != "verdict" else "")
            if self._client is None or right:
                return plain, None
            try:
                return self._client.ask([{"role": "user", "content": self._question(row)}]), True
            except ChatFailed:
                return plain, False

        with ThreadPoolExecutor(self.settings.workers) as threads:
            found = list(threads.map(say, rows))
        asked = [heard for _, heard in found if heard is not None]
        sampling.measure("critique/unanswered_share", float(asked.count(False)), float(len(asked)))
        return [text for text, _ in found]

    def _question(self, row: Row) -> str:
        told = {"prompt": _words(row), "response": row.text, "solution": str(row.prompt.extra[self.settings.column])}
        return filled(self.settings.question, told)


def _words(row: Row) -> str:
    """The prompt as text: its text, or its messages."""
    if row.prompt.messages is None:
        return row.prompt.text or ""
    return "\n".join(map(message_text, row.prompt.messages))
