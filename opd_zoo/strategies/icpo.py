"""ICPO: one answer of each group is sampled after a worked example, with which the policy acts as its own expert.

    the last planned answer of a group is sampled with a random example before the prompt            (IEF)
    it is kept if its reward is at least `least`; otherwise the group is one answer smaller          (ERRS)
    beta max(0, 1 - step / steps) is added to its reward                                             (RS)

If no example fits rollout.max_prompt_tokens, that answer is sampled like the others. It is trained under the plain
prompt. The loss is mixed_context with `denominator: one`, where r is pi(y | x) itself.
Examples are given in the recipe or in a file with lines {"prompt": ..., "answer": ...}. Source: arXiv 2510.26519 and
the released code, Celine-hxy/ICPO, whose shaping has 0.1 where a note on the paper has 0.01.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from opd.errors import ConfigError
from opd_zoo.strategies.hinted import HINTED, Hinted, rewards_by_row
from student.data.streams import stream
from student.plugin.strategy import StrategySettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.plan import PlannedRow, StepPlan
    from student.data.row import Row
    from student.plugin.terms import Term
    from student.rollout.sampling import Sampling
    from student.settings.recipe import Recipe


class IcpoSettings(StrategySettings):
    """Settings of ICPO."""

    examples: list[str] = Field(default_factory=list, description="Worked examples, each a text.")
    file: Path | None = Field(
        None, description='A .jsonl file of worked examples, each line with "prompt" and "answer".'
    )
    text: str = Field("{example}\n\n{prompt}", description="How example and prompt are put together.")
    least: float = Field(1.0, description="delta, the minimum reward for which an answer after an example is kept.")
    beta: float = Field(1.0, ge=0, description="Bonus added in the first step to the reward of a kept answer.")
    steps: int = Field(400, ge=1, description="T, the number of steps over which the bonus falls to 0.")
    seed: int = Field(0, ge=0, description="Seed of the choice of examples.")


class Icpo(Hinted[IcpoSettings]):
    """Samples one answer of each group after a worked example (ICPO)."""

    evidence: ClassVar[str] = "text and code"
    traits = replace(
        HINTED,
        judges_first=True,
        least_group=2,
        why={
            **HINTED.why,
            "works_ahead": "it draws the example of one answer of each group after the step is planned",
            "least_group": "samples one answer of each group after an example",
        },
    )

    def __init__(self, settings: IcpoSettings) -> None:
        super().__init__(settings)
        self._examples: list[str] = []

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse a recipe without examples, or with groups of one answer.

        Raises:
            ConfigError: naming the setting to give.
        """
        self.examples()

    def examples(self) -> list[str]:
        """The worked examples.

        Raises:
            ConfigError: if there are none, or the file cannot be read.
        """
        if not self._examples:
            self._examples = [*self.settings.examples, *_read(self.settings.file)]
        if not self._examples:
            raise ConfigError("rollout.strategy icpo has no worked example; set examples or file.")
        return self._examples

    def run(self, plan: StepPlan, sampling: Sampling) -> list[Row]:
        s = self.settings
        last = {row.key.uid: row.key for row in plan.rows}
        planned = [self._expert(row, sampling) if last[row.key.uid] == row.key else row for row in plan.rows]
        experts = {row.key for row in planned if row.behaviour_prompt is not None}
        rows = sampling.judge(planned)
        rewards = rewards_by_row(rows, sampling)
        # Added after the decision to keep the answer, or the bonus would let wrong answers in.
        bonus = s.beta * max(0.0, 1.0 - plan.step / s.steps)
        kept = []
        for row in rows:
            if row.key not in experts:
                kept.append(row)
                continue
            reward = rewards[row.key.uid, row.key.sample]
            good = reward is not None and reward >= s.least
            sampling.measure("icpo/kept_share", float(good))
            if good:
                row.reward_parts["icpo"] = bonus
                kept.append(row)
        sampling.measure("hinted_share", sum(not row.on_policy for row in kept), len(kept))
        return kept

    def _expert(self, row: PlannedRow, sampling: Sampling) -> PlannedRow:
        """The row after the drawn example, or after the next example that fits; unchanged if none fits."""
        examples = self.examples()
        place = int(stream(self.settings.seed, "icpo", row.key.step, row.key.uid).integers(len(examples)))
        hints = ((self.settings.text, {"example": text}) for text in examples[place:] + examples[:place])
        return self.hinted(row, hints, sampling) or row


def _read(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        # Split as bytes, because text would also be split at separators that JSON may contain unescaped.
        lines = [json.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
        return [f"{line['prompt']}{line['answer']}" for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be read as worked examples ({type(error).__name__}: {error}); each line must be a JSON "
            'object with "prompt" and "answer".'
        ) from error
