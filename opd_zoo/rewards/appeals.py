"""Appeals against a verifier: a judge re-examines some of the answers that the verifier refused.

    a refused answer is asked about with probability `share`; the judge's yes overturns the verdict

Rewards stay as they are. What is measured is how often the verifier is wrong, in metrics appeals/overturned and
appeals/unknown; advantage noisy_forward with `learns: true` corrects for it. Which answers are asked about is drawn
from their keys, so a step that is repeated asks about the same ones. Source: arXiv 2510.00915 (text; the question is
ours).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pydantic import Field

from opd.tasks.judges import filled
from opd_zoo.asked_chat import AskedChat, AskedChatSettings
from student.data.streams import stream
from student.scoring.rewards.base import is_correct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opd.tasks.prompt import Prompt
    from student.data.row import Row
    from student.plugin.terms import Term
    from student.scoring.rewards.base import RewardServices
    from student.settings.recipe import Recipe

ASKED, OVERTURNED, ACCEPTED = "appeals/asked", "appeals/overturned", "appeals/accepted"
_WORD = re.compile(r"\b(yes|no)\b", re.IGNORECASE)


class AppealsSettings(AskedChatSettings):
    """Settings of the appeals."""

    adds: bool = Field(True, description="Keep the verdicts as the reward, since this reward only measures.")
    share: float = Field(0.1, gt=0, le=1, description="Share of the refused answers that the judge is asked about.")
    seed: int = Field(0, ge=0, description="Seed of the choice of answers.")
    question: str = Field(
        "Question:\n{prompt}\n\nReference:\n{reference}\n\nAnswer:\n{answer}\n\nDoes the answer say the same as the "
        "reference? End with yes or no.",
        description="What the judge is asked, made of {prompt}, {answer} and {reference}.",
    )


class Appeals(AskedChat[AppealsSettings]):
    """Lets a judge re-examine refused answers, to measure how often the verifier errs.

    Changes no reward.
    """

    evidence = "text"

    def remarks(self, recipe: Recipe, terms: Sequence[Term]) -> list[str]:
        """A remark if no advantage learns from the appeals."""
        firsts = [term.chain.first.settings for term in terms if hasattr(term, "chain")]
        if any(getattr(settings, "learns", False) for settings in firsts):
            return []
        return [
            "reward 'appeals' measures and changes no reward; add advantage noisy_forward with learns: true, which "
            "uses what it measures"
        ]

    def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
        """Note the verdict of every row, and the judge's on the refused rows that were drawn."""
        for row in rows:
            accepted = is_correct(row)
            # The verdict, not the reward, which other parts may have changed.
            row.notes |= {} if accepted is None else {ACCEPTED: float(accepted)}
        chosen = [row for row in rows if is_correct(row) is False and self._drawn(row)]
        for row, value in zip(chosen, self.asked(chosen), strict=True):
            self.fire("unknown", float(value is None))
            if value is not None:
                row.notes |= {ASKED: 1.0, OVERTURNED: value}
                self.fire("overturned", value)

    def _drawn(self, row: Row) -> bool:
        key = row.key
        drawn = stream(self.settings.seed, "appeals", key.step, key.uid, key.sample).random()
        return bool(drawn < self.settings.share)

    def value(self, prompt: Prompt, answer: str) -> float | None:
        """1 if the judge accepts the answer, 0 if not; None if it says neither yes nor no."""
        text = filled(self.settings.question, prompt, answer)
        words = _WORD.findall(self.client.ask([{"role": "user", "content": text}]))
        return float(words[-1].lower() == "yes") if words else None
