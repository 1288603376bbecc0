"""CURE: some answers of a group begin with another answer of it, cut where the student was most uncertain.

    first       1 / (1 + branches) of the planned answers, sampled from the start
    cut         just before one of the `top` tokens of an answer with the highest entropy, drawn uniformly
    branches    as many answers for each first one, continued from its tokens before the cut

H_t is the entropy over the student's `width` most likely ids, nats. What a branch took over is read and judged with it,
and is learnt from in the first answer alone. All answers of a prompt form one group. Without a token to cut before (an
answer of one token), a branch is sampled from the start. Source: the released code of arXiv 2508.11016, bytedance/CURE,
which also passes over special tokens and tokens of one character (4 first answers, 3 branches each, 20 tokens; DAPO's
loss).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from opd.wire.types import PayloadSpec
from opd_zoo.prompts import refuse_episodes
from opd_zoo.strategies.entropies import entropies
from student.data.needs import STUDENT, Needs, SignalNeed
from student.data.streams import stream
from student.plugin.strategy import Strategy, StrategySettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opd.tasks.prompt import Prompt
    from student.data.plan import PlannedRow, StepPlan
    from student.data.row import Row
    from student.rollout.sampling import Sampling


class CureSettings(StrategySettings):
    """Settings of CURE."""

    branches: int = Field(3, ge=1, description="Number of answers that continue each answer sampled from the start.")
    top: int = Field(20, ge=1, description="Number of tokens with the highest entropy of which one is cut before.")
    width: int = Field(10, ge=2, le=4096, description="Number of most likely ids over which the entropy is computed.")
    seed: int = Field(0, ge=0, description="Seed of the choice of cuts.")


class Cure(Strategy[CureSettings]):
    """Continues answers of the group from their most uncertain tokens (CURE)."""

    evidence: ClassVar[str] = "text and code"
    traits = Traits(
        least_group=2,
        why={
            "works_ahead": "it samples only part of the planned answers from the start and branches the others",
            "least_group": "continues answers of a group from others of it",
        },
    )

    def needs(self) -> Needs:
        """The student's log-probs at its most likely ids."""
        gathered = PayloadSpec.gather(self.settings.width)
        return Needs(signals=(SignalNeed(STUDENT, gathered),), candidates=self.settings.width)

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts that are played: an episode does not begin with tokens of another.

        Raises:
            ConfigError: naming the first of them.
        """
        refuse_episodes(prompts, "rollout.strategy cure")

    def run(self, plan: StepPlan, sampling: Sampling) -> list[Row]:
        """See `Strategy.run`; metrics cure/branched_share, cure/cut_entropy and cure/kept, the share before a cut."""
        groups: dict[str, list[PlannedRow]] = {}
        for one in plan.rows:
            groups.setdefault(one.key.uid, []).append(one)
        # Whole families, the last of which may be smaller: with 3 branches, answers 0, 4, 8 ... of a group are first.
        size = 1 + self.settings.branches
        first = [one for mine in groups.values() for one in mine[::size]]
        rows = sampling.score(sampling.sample(first))
        family = dict(zip((one.key for one in first), rows, strict=True))
        branches = [
            self._branch(one, family[mine[place - place % size].key], sampling)
            for mine in groups.values()
            for place, one in enumerate(mine)
            if place % size
        ]
        rows += sampling.score(sampling.sample(branches))
        order = {one.key: place for place, one in enumerate(plan.rows)}
        return sorted(rows, key=lambda row: order[replace(row.key, parent=-1)])

    def _branch(self, one: PlannedRow, row: Row, sampling: Sampling) -> PlannedRow:
        """The planned row, continued from a cut of `row`; unchanged if there is no place to cut."""
        entropy = entropies(row, self.settings.width, "cure")
        able = np.argsort(-entropy[1:], kind="stable")[: self.settings.top] + 1  # a cut at 0 leaves nothing to share
        sampling.measure("cure/branched_share", float(bool(len(able))))
        if not len(able):
            return one
        rng = stream(self.settings.seed, "cure", one.key.step, one.key.uid, one.key.sample)
        cut = int(able[int(rng.integers(len(able)))])
        sampling.measure("cure/cut_entropy", float(entropy[cut]))
        sampling.measure("cure/kept", cut / row.length)
        return replace(
            one,
            key=replace(one.key, parent=row.key.sample),
            prefix_ids=tuple(row.response_ids[:cut].tolist()),
            max_new_tokens=max(1, one.max_new_tokens - cut),
        )
