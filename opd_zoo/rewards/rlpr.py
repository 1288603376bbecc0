"""RLPR: the student's own probability of the reference answer after its reasoning, where no verifier can judge.

    p      mean over the tokens of the reference answer of pi(token | prompt, reasoning, tokens before)
    p0     the same without the reasoning
    whole  (1 - format_weight) max(0, p - p0) + format_weight * format

The response is cut at the last `answer_start`: what comes before is the reasoning, and the reference answer replaces
what follows up to `answer_end`. format is 1 for a response with both marks in order, else 0. Probabilities are averaged
and not multiplied, so one unlikely token costs at most 1 / length. The reward carries no gradient.

Groups whose rewards differ too little to learn from are left out of the step: those with a standard deviation below
`filter` times its moving average over steps (decay `filter_decay`, begun in step 6, used from step 11 on).
Source: the code of arXiv 2506.18254, OpenBMB/RLPR.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from opd_zoo.deviation import deviation
from student.data.needs import STUDENT, Needs
from student.plugin.traits import Traits
from student.rl.rewards.reference import reference_item, reference_of
from student.scoring.rewards.base import Reward, RewardSettings, in_groups

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opd.tasks.prompt import Prompt
    from opd.wire.types import ScoreItem
    from student.data.report import StepReport
    from student.data.row import Row
    from student.scoring.rewards.base import RewardServices

_SPREAD = "rlpr/spread"
_FIRST_AVERAGED, _FIRST_FILTERED = 5, 10
"""Step indices, from 0, at which the moving average and the filter begin."""


class RlprSettings(RewardSettings):
    """Settings of RLPR."""

    answer_start: str = Field("<answer>", min_length=1, description="Mark before the answer in a response.")
    answer_end: str = Field("</answer>", description="Mark after the answer; empty means the end of the response.")
    format_weight: float = Field(0.1, ge=0, le=1, description="Weight of having both marks.")
    filter: float = Field(
        0.5,
        ge=0,
        description="A group whose standard deviation of rewards is below this multiple of its moving average is left "
        "out; 0 keeps all.",
    )
    filter_decay: float = Field(0.99, ge=0, lt=1, description="Share of that moving average that each step keeps.")


class Rlpr(Reward[RlprSettings]):
    """The student's own probability of the reference answer after its reasoning (RLPR).

    Its state is the filter's average.
    """

    kind: ClassVar[Literal["whole", "part"]] = "whole"
    evidence = "text and code"

    @property
    def traits(self) -> Traits:
        if not self.settings.filter:
            return Traits()
        why = {"least_group": "filters groups by the spread of their rewards", "begins": "lower filter to 0"}
        return Traits(least_group=2, begins={"the filter": _FIRST_FILTERED}, why=why)

    def __init__(self, settings: RlprSettings) -> None:
        super().__init__(settings)
        self.average: float | None = None

    def needs(self) -> Needs:
        """The student, which scores the reference answers; no verdicts."""
        return Needs(reward="any", models=frozenset({STUDENT}))

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts without a reference answer.

        Raises:
            DataError: naming the first of them.
        """
        for prompt in prompts:
            reference_of(prompt, self.label)

    def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
        """Set the whole reward, and leave out groups by the filter; metrics gain and left_out.

        Raises:
            DataError: for a prompt without a reference answer.
        """
        starts = [row.text.rfind(self.settings.answer_start) for row in rows]
        able = [i for i, start in enumerate(starts) if start >= 0]
        items = [self._item(rows[i], rows[i].text[: starts[i]], services.tokenizer) for i in able]
        items += [self._item(rows[i], "", services.tokenizer) for i in able]
        # One call, even with nothing to read: ranks of a sharded student must call equally often.
        means = [_mean_probability(scores.sampled) for scores in services.read(items)]
        gains = {i: max(0.0, means[k] - means[k + len(able)]) for k, i in enumerate(able)}
        weight = self.settings.format_weight
        for i, row in enumerate(rows):
            row.reward = (1 - weight) * gains.get(i, 0.0) + weight * self._format(row.text)
            self.fire("gain", gains.get(i, 0.0))
        self._filter(rows)

    def _item(self, row: Row, reasoning: str, tokenizer: Any) -> ScoreItem:
        """The reference answer as a response to the prompt, the reasoning and `answer_start`."""
        lead = reasoning + self.settings.answer_start
        return reference_item(row.prompt, self.label, row.prompt_ids, lead, tokenizer)

    def _format(self, text: str) -> float:
        start = text.find(self.settings.answer_start)
        return float(start >= 0 and text.find(self.settings.answer_end, start) >= 0)

    def _filter(self, rows: Sequence[Row]) -> None:
        for group in in_groups(rows):
            spread = deviation([row.reward or 0.0 for row in group], 0)
            # Noted on one row of the group, so that each group counts once in the average.
            group[0].notes[_SPREAD] = spread
            left_out = (
                self.average is not None
                and group[0].key.step >= _FIRST_FILTERED
                and spread < self.settings.filter * self.average
            )
            self.fire("left_out", float(left_out))
            for row in group if left_out else ():
                row.reward = None

    def observe(self, report: StepReport) -> None:
        """Update the moving average with the spreads of all ranks' groups."""
        spreads = [outcome.notes[_SPREAD] for outcome in report.outcomes if _SPREAD in outcome.notes]
        if report.step < _FIRST_AVERAGED or not spreads:
            return
        mean, decay = math.fsum(spreads) / len(spreads), self.settings.filter_decay
        self.average = mean if self.average is None else decay * self.average + (1 - decay) * mean

    def state_dict(self) -> dict[str, Any]:
        """The moving average of the spread."""
        return {"average": self.average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.average = state["average"]


def _mean_probability(log_probs: Any) -> float:
    return float(np.exp(np.asarray(log_probs, dtype=np.float64)).mean())
