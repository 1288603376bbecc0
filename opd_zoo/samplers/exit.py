"""ExIt: a prompt may be asked again with an earlier answer of its own, from which the student improves.

    buffer   of each prompt, answers with the variance of the rewards of the group that they are from
    draw     a prompt with the largest variance first, without one `new`; with the chance `again` it is asked with one
             of its answers, drawn in proportion to their variance

Each such turn is one answer under a prompt that shows an earlier one, so an iteration costs as much as a first attempt.
Its answers enter the buffer with their own variance, and may be improved in turn; the prompt shows one earlier answer,
not the whole chain. Source: arXiv 2509.04575 (notes on the text: sampling by the variance of returns, single steps
from partial histories; its exploration by diverging attempts is not built, `again` and `new` are ours).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from opd.tasks.encode import encode_prompt
from opd_zoo.deviation import deviation
from opd_zoo.prompts import in_template
from opd_zoo.samplers.base import Sampler, SamplerSettings
from student.data.outcome import reward_of
from student.data.streams import stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opd.tasks.prompt import Prompt
    from student.data.plan import PlannedRow, StepPlan
    from student.data.report import StepReport
    from student.data.row import Row
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe


class ExitSettings(SamplerSettings):
    """Settings of ExIt."""

    again: float = Field(0.5, gt=0, le=1, description="Chance that a prompt with earlier answers is asked with one.")
    new: float = Field(0.25, ge=0, description="Variance of a prompt without earlier answers.")
    keep: int = Field(4, ge=1, description="Number of answers kept of each prompt, those of the largest variance.")
    longest: int = Field(4000, ge=1, description="Maximum number of characters of an answer that is kept.")
    text: str = Field(
        "{prompt}\n\nAn earlier answer:\n{response}\n\nImprove it.",
        description="How the prompt and the earlier answer are put together.",
    )


class ExIt(Sampler[ExitSettings]):
    """Asks prompts again with earlier answers of their own, those with the most to learn first (ExIt).

    Its state is these answers.
    """

    evidence = "text"

    def __init__(self, settings: ExitSettings) -> None:
        super().__init__(settings)
        self.buffer: dict[str, list[tuple[str, float]]] = {}
        self._written: list[tuple[str, int, str, float]] = []
        self._longest = 0

    def knows(self, prompt: Prompt) -> bool:
        """Whether the prompt has earlier answers."""
        return bool(self.buffer.get(prompt.uid))

    def scores(self, pool: Sequence[Prompt], rng: np.random.Generator) -> list[float]:
        """The largest variance of each prompt; less than a millionth at random breaks ties."""
        ties = rng.random(len(pool)) * 1e-6
        best = [max((v for _, v in self.buffer.get(p.uid, [])), default=self.settings.new) for p in pool]
        return [value + float(tie) for value, tie in zip(best, ties, strict=True)]

    def rows_for(self, plan: StepPlan, prompt: Prompt) -> tuple[PlannedRow, ...]:
        """Rows of a chosen prompt, all with the same earlier answer or none; a history over the limit is left out."""
        rows, kept = self.rows_of(plan, prompt), self.buffer.get(prompt.uid, [])
        rng = stream(self.settings.seed, "exit", plan.step, prompt.uid)
        asked = prompt
        if kept and rng.random() < self.settings.again:
            chances = np.array([variance for _, variance in kept])
            chosen = kept[int(rng.choice(len(kept), p=chances / chances.sum()))][0]
            asked = in_template(prompt, self.settings.text, {"response": chosen})
            if len(encode_prompt(asked, self.services.tokenizer)) > self._longest:
                asked = prompt
        self._notes[prompt.uid][f"{self.label}/again"] = float(asked is not prompt)
        return tuple(replace(row, prompt=asked) for row in rows)

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Keep the recipe's longest prompt.

        Raises:
            ConfigError: for a pool that leaves no choice.
        """
        super().check(recipe, terms)
        self._longest = recipe.rollout.max_prompt_tokens

    def compose(self, rows: list[Row]) -> list[Row]:
        """Share the answers of the step with all ranks."""
        mine = [
            (row.key.uid, row.key.sample, row.text, reward)
            for row in rows
            if row.on_policy and len(row.text) <= self.settings.longest and (reward := reward_of(row)) is not None
        ]
        self._written = sorted(one for part in self.services.gather(mine) for one in part)
        return super().compose(rows)

    def observe(self, report: StepReport) -> None:
        """Add the answers of groups whose rewards differ; drop those of the smallest variance."""
        groups: dict[str, list[tuple[str, float]]] = {}
        for uid, _, text, reward in self._written:
            groups.setdefault(uid, []).append((text, reward))
        self._written = []
        for uid, group in groups.items():
            variance = deviation([reward for _, reward in group], 0) ** 2
            if variance:
                known = {text: variance for text, _ in group} | dict(self.buffer.get(uid, []))
                self.buffer[uid] = sorted(known.items(), key=lambda entry: (-entry[1], entry[0]))[: self.settings.keep]

    def state_dict(self) -> dict[str, Any]:
        """The answers, with their variances."""
        return {"buffer": {uid: [list(entry) for entry in kept] for uid, kept in self.buffer.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.buffer = {str(uid): [(str(t), float(v)) for t, v in kept] for uid, kept in state["buffer"].items()}
