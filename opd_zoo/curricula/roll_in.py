"""RLGF's PPO++: answers begin where a guide has got to, and the student goes on from there.

    with the chance `share`, an answer begins with the first c tokens of the guide's answer to its prompt,
    c uniform from 1 to the length of that answer, and less than rollout.max_new_tokens

The beginning is read and judged with the answer and not learnt from. A prompt has one answer of the guide, and each
answer of the student a cut of its own. Where the guide does not answer in time the student begins at the start. The
guide is a completion server that takes token ids (vLLM, SGLang). Source: Learning to generate better than your LLM,
arXiv 2306.11816, and its code, Cornell-RL/tril (share 0.6 to 0.8; PPO). Its AggreVaTeD, in which the student begins and
the guide goes on to estimate values, is not built.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from opd.tasks.chat import ChatClient, ChatFailed, ChatSettings
from opd.tasks.encode import encode_prompt
from opd_zoo.prompts import refuse_episodes
from student.data.streams import stream
from student.plugin.controllers import Controller, ControllerSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opd.tasks.prompt import Prompt
    from student.data.plan import PlannedRow, StepPlan
    from student.data.row import Row
    from student.plugin.controllers import Services

_GIVEN = "roll_in/given"


class RollInSettings(ControllerSettings):
    """Settings of the guide."""

    teacher: ChatSettings = Field(
        description="Server that writes the guide's answers: its endpoint and model, and the max_tokens of an answer."
    )
    share: float = Field(0.7, gt=0, le=1, description="Chance that an answer begins with a part of the guide's.")
    workers: int = Field(16, ge=1, le=256, description="Maximum number of answers requested at the same time.")
    seed: int = Field(0, ge=0, description="Seed of the cuts.")


class RollIn(Controller[RollInSettings]):
    """Begins answers with a part of a guide's answer (RLGF's PPO++)."""

    evidence = "text and code"
    traits = Traits(works_ahead=True)

    def __init__(self, settings: RollInSettings) -> None:
        super().__init__(settings)
        self._client = ChatClient(settings.teacher)

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts that are played: an episode does not begin with tokens of a guide.

        Raises:
            ConfigError: naming the first of them.
        """
        refuse_episodes(prompts, "method roll_in")

    def plan(self, plan: StepPlan) -> StepPlan:
        """Give beginnings to the answers that are drawn for it; those that have one stay as they are."""
        prompts = {row.key.uid: row.prompt for row in plan.rows if not (row.prefix_ids or row.answer)}
        tokenizer = self.services.tokenizer
        ids = [encode_prompt(prompt, tokenizer) for prompt in prompts.values()]
        with ThreadPoolExecutor(self.settings.workers) as threads:
            texts = list(threads.map(self._written, ids))
        # Those that the first rank got, because a server may fail on one rank and all must plan alike.
        texts = self.services.gather(texts)[0]
        guided = {
            uid: tokenizer(text, add_special_tokens=False)["input_ids"]
            for uid, text in zip(prompts, texts, strict=True)
            if text
        }
        return replace(plan, rows=tuple(self._begun(row, guided.get(row.key.uid, ())) for row in plan.rows))

    def _written(self, ids: Sequence[int]) -> str:
        """The guide's answer as text, or "" if there is none."""
        try:
            return self._client.go_on(list(ids))
        except ChatFailed:
            return ""

    def _begun(self, row: PlannedRow, guided: Sequence[int]) -> PlannedRow:
        rng = stream(self.settings.seed, "roll_in", row.key.step, row.key.uid, row.key.sample)
        most = min(len(guided), row.max_new_tokens - 1)
        if row.prefix_ids or row.answer or rng.random() >= self.settings.share or most < 1:
            return row
        cut = int(rng.integers(1, most + 1))
        return replace(
            row,
            # A parent makes the beginning a part of what is judged.
            key=replace(row.key, parent=row.key.sample),
            prefix_ids=tuple(int(token) for token in guided[:cut]),
            max_new_tokens=row.max_new_tokens - cut,
        )

    def compose(self, rows: list[Row]) -> list[Row]:
        """Note how many tokens each answer was given."""
        for row in rows:
            if row.key.parent == row.key.sample:
                row.notes[_GIVEN] = float(row.turns[0][0])
        return rows

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metrics roll_in/share (of the answers that began with the guide's) and roll_in/tokens (given to each)."""
        given = [outcome.notes[_GIVEN] for outcome in services.outcomes if _GIVEN in outcome.notes]
        count = len(services.outcomes)
        found = {"roll_in/share": len(given) / count} if count else {}
        return found | ({"roll_in/tokens": sum(given) / len(given)} if given else {})
