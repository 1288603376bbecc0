"""IGPO: a turn is worth what it adds to the student's own probability of the right answer.

    p_k     exp of the mean log-prob of the reference answer's tokens, read after turn k and what it led to;
            p_0 before the first turn
    r_k     p_k - p_{k-1}            for every turn but the last
    r_K     the verdict's value      for the last one

The rewards are by turn (`row.turn_rewards`), for advantages that read them (trloo, mapo); the row's own reward stays
the verdict. The reference answer is read after the text `before`, and never enters the student's input. At discount 1
the turns' rewards add up to p_{K-1} - p_0 plus the verdict. Source: the code of arXiv 2510.14967, GuoqingWang1/IGPO;
the outcome there is a token F1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from opd.tasks.environments.base import ENVIRONMENT
from student.data.needs import STUDENT, Needs
from student.plugin.traits import Traits
from student.rl.rewards.reference import reference_item, reference_of
from student.scoring.rewards.base import Reward, RewardSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opd.tasks.prompt import Prompt
    from opd.wire.types import ScoreItem
    from student.data.row import Row
    from student.scoring.rewards.base import RewardServices


class IgpoSettings(RewardSettings):
    """Settings of IGPO."""

    before: str = Field(
        "", description="Text put between the episode so far and the reference answer, such as <answer>."
    )


class Igpo(Reward[IgpoSettings]):
    """Rewards each turn by what it adds to the probability of the right answer (IGPO)."""

    evidence = "text and code"
    by_group = False
    traits = Traits(gives=("turns",), why={"gives": "use advantage trloo or mapo"})

    def needs(self) -> Needs:
        """Verdicts, and the student, which scores the reference answers."""
        return Needs(reward="verdict", models=frozenset({STUDENT}))

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Refuse episodes without a reference answer.

        Raises:
            DataError: naming the first prompt of one.
        """
        for prompt in prompts:
            if ENVIRONMENT in prompt.extra:
                reference_of(prompt, self.label)

    def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
        """Set the rewards by turn of judged episodes; metrics belief (at the last turn's start) and gain (per turn).

        Raises:
            DataError: for a prompt without a reference answer.
        """
        judged = [(row, value) for row in rows if (value := row.verdict_value) is not None and row.turns]
        items, counts = [], []
        for row, _ in judged:
            # At the start of a turn, what the turn before led to has been read. The last turn gets the verdict instead.
            places = [row.turns[0][0], *(start for start, _ in row.turns[1:])]
            items += [self._item(row, place, services.tokenizer) for place in places]
            counts.append(len(places))
        beliefs = iter([_belief(scores.sampled) for scores in services.read(items)])
        for (row, value), count in zip(judged, counts, strict=True):
            found = [next(beliefs) for _ in range(count)]
            row.turn_rewards = (*map(float, np.diff(found)), value)
            self.fire("belief", found[-1])
            for gain in row.turn_rewards[:-1]:
                self.fire("gain", gain)

    def _item(self, row: Row, place: int, tokenizer: Any) -> ScoreItem:
        """The reference answer as a response to the episode before position `place`."""
        return reference_item(row.prompt, self.label, row.read_before(place), self.settings.before, tokenizer)


def _belief(log_probs: Any) -> float:
    return float(np.exp(np.asarray(log_probs, dtype=np.float64).mean()))
