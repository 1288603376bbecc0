"""SPAE's probes: how certain the student is of an answer, and of the right one, at each step of its reasoning.

    Acc    mean over the tokens of the reference answer of pi(token), read after the step and the text `before`
    Conf   mean over the same tokens of exp(-H), H the student's entropy there over its `width` likeliest ids and the
           rest as one, nats
    Phi    1.5 Acc Conf + 0.5 Acc - Conf, from -1 (certain and wrong) to 1 (certain and right)

A step ends with `mark`; Phi is read at the start of each step, and noted for advantage `spae`. The reward itself stays
as it is, and nothing of a probe enters the student's input. Source: arXiv 2601.03823 and the probe of cii030/SPAE-RL,
which samples five short answers after each step where this reads the reference answer, without sampling; its mark is a
full stop and an empty line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from opd.wire.types import PayloadSpec
from opd_zoo.text_spans import ends_of, pieces_of
from student.data.needs import STUDENT, Needs
from student.plugin.traits import Traits
from student.rl.rewards.reference import reference_item, reference_of
from student.scoring.rewards.base import Reward, RewardSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opd.tasks.prompt import Prompt
    from opd.wire.types import Scores
    from student.data.row import Row
    from student.scoring.rewards.base import RewardServices

PHI, START = "spae/phi/", "spae/start/"
"""Prefixes of a row's notes about step k: its potential, and the token at which it starts."""


class SpaeSettings(RewardSettings):
    """Settings of SPAE's probes."""

    mark: str = Field(".\n\n", min_length=1, description="Text with which a step of the reasoning ends.")
    before: str = Field(
        "\nThe answer is ", description="Text put between the steps so far and the reference answer, which is read."
    )
    steps: int = Field(16, ge=2, description="Maximum number of steps of a response; what follows joins the last one.")
    width: int = Field(20, ge=1, le=4096, description="Number of likeliest ids over which the entropy is computed.")


class Spae(Reward[SpaeSettings]):
    """Notes how certain and how right the student is at each step, and pays nothing for it (SPAE's probes)."""

    evidence = "text"
    by_group = False
    traits = Traits(gives=("step_potentials",), why={"gives": "use advantage spae"})

    def needs(self) -> Needs:
        """Verdicts, and the student, which reads the reference answers."""
        return Needs(reward="verdict", models=frozenset({STUDENT}))

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts without a reference answer.

        Raises:
            DataError: naming the first of them.
        """
        for prompt in prompts:
            reference_of(prompt, self.label)

    def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
        """Note the potentials; metrics potential (at the start of a step) and steps (of a response).

        Raises:
            DataError: for a prompt without a reference answer.
        """
        places = [(row, place) for row in rows for place in self._starts(row, services.tokenizer)]
        items = [
            reference_item(row.prompt, self.label, row.read_before(place), self.settings.before, services.tokenizer)
            for row, place in places
        ]
        counts = dict.fromkeys(map(id, rows), 0)
        for (row, place), scores in zip(
            places, services.read(items, PayloadSpec.topk(self.settings.width, "f32")), strict=True
        ):
            k, phi = counts[id(row)], potential(scores)
            counts[id(row)] += 1
            row.notes |= {f"{PHI}{k}": phi, f"{START}{k}": float(place)}
            self.fire("potential", phi)
        self.fire("steps", float(len(places)), float(len(rows)))

    def _starts(self, row: Row, tokenizer: Any) -> list[int]:
        ends = ends_of(pieces_of(row.response_ids, tokenizer), self.settings.mark)
        return [0, *(end for end in ends if end < row.length)][: self.settings.steps]


def potential(scores: Scores) -> float:
    """Phi of the module's formula, from the student's scores of a reference answer.

    Raises:
        ValueError: for scores without the likeliest ids.
    """
    if scores.values is None or scores.log_tail is None:
        raise ValueError("the potential needs scores of payload topk")
    logs = np.concatenate([scores.values, scores.log_tail[:, None]], axis=1).astype(np.float64)
    entropy = -np.where(logs > -np.inf, np.exp(logs) * np.maximum(logs, -1e9), 0.0).sum(1)
    right, certain = float(np.exp(np.asarray(scores.sampled, np.float64)).mean()), float(np.exp(-entropy).mean())
    return 1.5 * right * certain + 0.5 * right - certain
