"""RLTF (arXiv 2602.02482): the first attempt learns what the second attempt gained from feedback.

    y0, feedback c0, y1                                   an episode, for example of environment `again`
    sd   raise log S(y1 | x), without y0 and c0, by  A = R(y1) - mean over the group of R(y0)
    fm   raise log S(c0 | x, y0): predict the feedback

The baseline averages first attempts only, so that second attempts still teach if they are all right. Tokens of y1 whose
log-prob given x is below `floor` are left out. sd adds rows of origin hinted with reward A; use objective
policy_gradient with `rows: expert, ratio: none, advantage: {name: reinforce}` (without importance ratio: biased, with
low variance, as the authors chose). fm adds rows of origin expert; use sft with weight 0.1. Besides either, the authors
reinforce both attempts: policy_gradient with `advantage: {name: trloo, discount: 0.1}`. Their weight of sd rises to 0.1
(`weight: {from: 0, to: 0.1, steps: ...}`). Their feedback comes from a judge; here it is what the environment says.
With several updates per batch, ratio none does not correct for them. Evidence: text and code (lili-chen/rltf, read).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from student.data.needs import STUDENT, Needs
from student.data.row import Row, RowKey
from student.plugin.controllers import Controller, ControllerSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from student.data.row import Origin
    from student.plugin.controllers import Services


class RltfSettings(ControllerSettings):
    """Settings of what is learnt from feedback."""

    form: Literal["sd", "fm"] = Field(
        "sd", description="What is learnt: sd, second attempts without the feedback; fm, the feedback itself."
    )
    floor: float = Field(
        -5.0,
        lt=0,
        description="Minimum log-prob in nats of a second attempt's token, given the prompt alone, for it to be "
        "learnt.",
    )


class Rltf(Controller[RltfSettings]):
    """Learns second attempts without the feedback that led to them, or the feedback itself (RLTF)."""

    @property
    def traits(self) -> Traits:
        use = "policy_gradient with rows: expert and ratio: none" if self.settings.form == "sd" else "sft"
        return Traits(
            works_with_summaries=False,
            gives_rows=("expert",),
            gives_log_probs=True,
            gives_scored="none",
            why={
                "works_ahead": "the student that learns rereads second attempts, not the one that sampled them",
                "works_with_summaries": "it treats every turn as an attempt, which a summary is not",
                "gives_rows": f"add {use}",
            },
        )

    def needs(self) -> Needs:
        """Rewards, and the student, which reads second attempts without the feedback."""
        return Needs(reward="any", models=frozenset({STUDENT}))

    def compose(self, rows: list[Row]) -> list[Row]:
        """Add the rows; a group is whole on one rank, so its first attempts can be compared."""
        able = [row for row in rows if row.on_policy and row.trained and row.turns and row.turn_rewards]
        pairs = [row for row in able if len(row.turns) > 1]
        found = self._second(able, pairs) if self.settings.form == "sd" else [_feedback(row) for row in pairs]
        return [*rows, *(row for row in found if row.loss_mask.any())]

    def _second(self, able: Sequence[Row], pairs: Sequence[Row]) -> list[Row]:
        """Rows with y1 as the answer to x, and its advantage as the reward."""
        firsts: dict[str, list[float]] = {}
        for row in able:
            firsts.setdefault(row.key.group, []).append(row.turn_rewards[0])
        made = []
        for row in pairs:
            (start, end), before = row.turns[1], row.turns[1][0]
            one = _row(row, row.prompt_ids, row.response_ids[start:end], "hinted", "again")
            one.behaviour_prompt_ids = row.read_before(before)
            one.reward, one.rewarded = row.turn_rewards[1] - float(np.mean(firsts[row.key.group])), True
            made.append(one)
        for one, scores in zip(made, self.services.read(made), strict=True):
            one.behaviour_logp = np.asarray(scores.sampled, np.float32)
            one.loss_mask = one.behaviour_logp >= self.settings.floor
            one.notes["rltf_masked"] = float((~one.loss_mask).sum())
        return made

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metrics rltf_rows, and for sd rltf_advantage (mean) and rltf_masked (share of the tokens of y1)."""
        found = [outcome for outcome in services.outcomes if outcome.agent in ("again", "feedback")]
        metrics = {"rltf_rows": float(len(found))}
        if found and self.settings.form == "sd":
            masked = sum(outcome.notes.get("rltf_masked", 0.0) for outcome in found)
            metrics["rltf_advantage"] = float(np.mean([outcome.reward or 0.0 for outcome in found]))
            metrics["rltf_masked"] = masked / sum(outcome.length for outcome in found)
        return metrics


def _feedback(row: Row) -> Row:
    """A row with c0 as the response after y0: everything that the environment wrote between the two attempts."""
    (_, end), (start, _) = row.turns[:2]
    history = np.concatenate([row.prompt_ids, row.response_ids[:end]])
    return _row(row, history, row.response_ids[end:start], "expert", "feedback")


def _row(row: Row, prompt: NDArray[np.uint32], response: NDArray[np.uint32], origin: Origin, agent: str) -> Row:
    length = len(response)
    return Row(
        key=RowKey(row.key.step, row.key.uid, row.key.sample, 0, agent),
        prompt=row.prompt,
        prompt_ids=prompt,
        response_ids=response,
        behaviour_logp=np.full(length, np.nan, np.float32),
        policy_version=row.policy_version[:1].repeat(length),
        loss_mask=np.ones(length, np.bool_),
        truncated=False,
        text="",
        origin=origin,
        turns=((0, length),),
    )
