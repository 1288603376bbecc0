"""Leave a set of tokens out of every loss: special and template tokens, on which teacher and student need not agree.

The tokens stay in the response and in the teacher's context; they are only left out of sums and denominators. Source:
the special-token mask of Revisiting OPD, arXiv 2603.25562. Do not put the end of sequence into the set, or the student
does not learn when to stop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from student.methods.distil.token_set import TokenSetSettings, token_ids
from student.plugin.controllers import Controller, ControllerSettings
from student.plugin.early import reads_no_scores
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from student.data.row import Row
    from student.plugin.controllers import Services


class MaskTokensSettings(ControllerSettings):
    """Settings of the mask."""

    tokens: TokenSetSettings = Field(description="Tokens that are left out of every loss.")


class MaskTokens(Controller[MaskTokensSettings]):
    """Leaves special tokens out of every loss."""

    traits = Traits(works_ahead=True)

    def __init__(self, settings: MaskTokensSettings) -> None:
        super().__init__(settings)
        self._ids = np.zeros(0, np.uint32)

    def start(self, services: Services) -> None:
        """Look up the ids."""
        self._ids = np.array(sorted(token_ids(self.settings.tokens, services.tokenizer)), np.uint32)

    @reads_no_scores
    def compose(self, rows: list[Row]) -> list[Row]:
        """Clear the mask; a row whose tokens are all in the set is no longer trained on."""
        for row in rows:
            hit = np.isin(row.response_ids, self._ids)
            row.notes["masked_tokens"] = int((hit & row.loss_mask).sum())
            row.loss_mask = row.loss_mask & ~hit
        return rows

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metric masked_share: the masked share of the tokens that would have been trained on."""
        masked = sum(outcome.notes.get("masked_tokens", 0.0) for outcome in services.outcomes)
        left = sum(outcome.tokens for outcome in services.outcomes)
        return {"masked_share": masked / max(1.0, masked + left)}
