"""Train on a random part of each response: the null hypothesis for window methods.

A window may help because it is a prefix, or because it has fewer tokens. This method trains on as many tokens of each
response, drawn at random, and so distinguishes the two. The rollout is not shortened, so no tokens are saved. With
aggregation constant, its gradient is `share` times an unbiased estimate of the full gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from student.data.streams import stream
from student.plugin.controllers import Controller, ControllerSettings
from student.plugin.early import reads_no_scores
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from student.data.row import Row
    from student.plugin.controllers import Services


class RandomTokensSettings(ControllerSettings):
    """Settings of the random part."""

    share: float = Field(
        0.25, gt=0, le=1, description="Share of each response's trained tokens that is kept; at least one token."
    )
    seed: int = Field(0, ge=0, description="Seed of the choice of tokens.")


class RandomTokens(Controller[RandomTokensSettings]):
    """A null arm: trains on a random part of each response."""

    traits = Traits(works_ahead=True)

    @reads_no_scores
    def compose(self, rows: list[Row]) -> list[Row]:
        """Draw the tokens of each row, as a function of its key alone."""
        for row in rows:
            trained = np.flatnonzero(row.loss_mask)
            count = max(1, round(self.settings.share * len(trained))) if len(trained) else 0
            names = (row.key.step, row.key.uid, row.key.sample, row.key.turn)
            kept = stream(self.settings.seed, "random_tokens", *names).permutation(trained)[:count]
            row.notes["dropped_tokens"] = len(trained) - count
            row.loss_mask = np.isin(np.arange(row.length), kept)
        return rows

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metric masked_share: the masked share of the tokens that would have been trained on."""
        dropped = sum(outcome.notes.get("dropped_tokens", 0.0) for outcome in services.outcomes)
        left = sum(outcome.tokens for outcome in services.outcomes)
        return {"masked_share": dropped / max(1.0, dropped + left)}
