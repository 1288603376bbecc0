"""StableReinforce's reward (R1-Reward): a right answer earns more if its reasoning leads to it.

    whole = format_weight [format] + accuracy (1 + consistency_weight [consistent]),   accuracy the verdict's value

An answer has the format if it holds all `marks` in their order. A judge says whether the reasoning supports the answer;
it is asked only about answers that earn something, as it has no effect on the others. Where it gives no clear word the
reward is unknown. Source: the released code of arXiv 2505.02835, yfzhang114/r1_reward (both weights 0.5); the question
is ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from opd.tasks.judges import filled
from opd_zoo.asked_chat import AskedChat, AskedChatSettings
from opd_zoo.asking import word_of
from student.data.needs import Needs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.row import Row


class ConsistencySettings(AskedChatSettings):
    """Settings of the consistency reward."""

    adds: Literal[False] = Field(False, description="Always false: the reward contains the verdict.")
    marks: list[str] = Field(
        default_factory=lambda: ["<think>", "</think>", "<answer>", "</answer>"],
        description="Texts that a well-formed answer holds in this order; [] takes every answer for well-formed.",
    )
    format_weight: float = Field(0.5, ge=0, description="Reward of the format.")
    consistency_weight: float = Field(
        0.5, gt=0, description="Bonus of a right answer whose reasoning leads to it, as a share of its accuracy."
    )
    question: str = Field(
        "Question:\n{prompt}\n\nResponse:\n{answer}\n\nDoes the reasoning of the response lead to the answer that it "
        "gives? End with yes or no.",
        description="What the judge is asked, made of {prompt}, {answer} and {reference}.",
    )


class Consistency(AskedChat[ConsistencySettings]):
    """Accuracy, format, and a bonus where a judge finds that the reasoning leads to the answer (StableReinforce)."""

    evidence = "text and code"

    def needs(self) -> Needs:
        """Verdicts."""
        return Needs(reward="verdict")

    def asked(self, rows: Sequence[Row]) -> list[float | None]:
        """The reward of each answer; metrics format and consistent, the latter of the answers that were asked about."""
        s = self.settings
        earning = [row for row in rows if (row.verdict_value or 0.0) > 0.0]
        said = {id(row): word for row, word in zip(earning, self.told(earning, self.consistent), strict=True)}
        found: list[float | None] = []
        for row in rows:
            accuracy, formed = row.verdict_value, float(self.formed(row.text))
            consistent = said.get(id(row), False)
            self.fire("format", formed)
            if accuracy is None or consistent is None:
                found.append(None)
                continue
            if id(row) in said:
                self.fire("consistent", float(consistent))
            found.append(s.format_weight * formed + accuracy * (1.0 + s.consistency_weight * consistent))
        return found

    def formed(self, text: str) -> bool:
        """Whether a response holds all marks in order."""
        for mark in self.settings.marks:
            _, found, text = text.partition(mark)
            if not found:
                return False
        return True

    def consistent(self, row: Row) -> bool | None:
        """Whether the reasoning leads to the answer; None if the judge gives no clear word.

        Raises:
            ChatFailed: if the judge gave no answer.
        """
        word = word_of(self.client, filled(self.settings.question, row.prompt, row.text), ("yes", "no"))
        return None if word is None else word == "yes"
