"""RGR-GRPO's reward: the weighted share of a prompt's own criteria that an answer meets, each judged separately.

    whole = sum over criteria of w_k [met] / sum of w_k

Criteria are a kept column of the prompts: a list of {"criterion": text, "weight": number} or of texts of weight 1, or
a text with one per line. The reward is unknown if the judge fails, or gives no clear word, on one of them: a share of
the others would be of another rubric in every row. Which criteria an answer failed is noted, and strategy
`rubric_guide` refines answers by them.
Source: arXiv 2511.12344 (factual and process criteria, by notes on the text; the weights were not found and are the
data's, the question is ours).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from opd.tasks.judges import filled
from opd_zoo.asked_chat import AskedChat, AskedChatSettings
from opd_zoo.asking import word_of
from opd_zoo.criteria import FAILED, criteria_of
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opd.tasks.prompt import Prompt
    from student.data.row import Row


class RubricSettings(AskedChatSettings):
    """Settings of the rubric."""

    column: str = Field("rubric", description="Kept column with the prompt's criteria (prompts.keep_columns).")
    question: str = Field(
        "Question:\n{prompt}\n\nAnswer:\n{answer}\n\nDoes the answer meet this criterion: {criterion}\nSay yes or no.",
        description="What the judge is asked about each criterion.",
    )


class Rubric(AskedChat[RubricSettings]):
    """The weighted share of a prompt's criteria that a judge finds met (RGR-GRPO)."""

    evidence = "text"

    @property
    def traits(self) -> Traits:
        return Traits(columns=(self.settings.column,))

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts without criteria.

        Raises:
            DataError: naming the first of them.
        """
        for prompt in prompts:
            criteria_of(prompt, self.settings.column)

    def asked(self, rows: Sequence[Row]) -> list[float | None]:
        """The share of each answer; metric met, a share of the criteria without their weights.

        Raises:
            DataError: for a prompt without criteria.
        """
        found: list[float | None] = []
        for row, met in zip(rows, self.told(rows, self.met), strict=True):
            if met is None:
                found.append(None)
                continue
            weights = [weight for _, weight in criteria_of(row.prompt, self.settings.column)]
            row.notes.update({f"{FAILED}{k}": 1.0 for k, right in enumerate(met) if not right})
            found.append(sum(w for w, right in zip(weights, met, strict=True) if right) / sum(weights))
            self.fire("met", float(sum(met)), float(len(met)))
        return found

    def met(self, row: Row) -> list[bool] | None:
        """Whether each criterion is met; None if the judge gives no clear word on one of them.

        Raises:
            DataError: for a prompt without criteria.
            ChatFailed: if the judge gave no answer.
        """
        found = []
        for criterion, _ in criteria_of(row.prompt, self.settings.column):
            question = filled(self.settings.question, row.prompt, row.text, criterion=criterion)
            word = word_of(self.client, question, ("yes", "no"))
            if word is None:
                return None
            found.append(word == "yes")
        return found
