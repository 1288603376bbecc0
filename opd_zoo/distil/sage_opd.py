"""SAGE-OPD's loss (arXiv 2606.19659): the reverse KL, weighted per turn by a judge and by the teacher's certainty.

    L_t   w_k(t) / mean w  D( S(.|s_t), T(.|s_t) )

w_k is the weight that method `sage` gave to turn k. The mean is over the trained tokens of the step on all ranks, so
the mean weight of a token is 1. D is that of objective `opd` with payload topk, whose first value is the teacher's
certainty; a tail bucket stands for the tokens outside the top k, where the authors use the whole vocabulary. If every
turn of a step is skipped, nothing is learnt from it. Evidence: text at second hand.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from opd.errors import ConfigError
from opd_zoo.curricula.sage import NOTE, Sage
from student.data.token_batch import TokenBatch
from student.methods.distil.opd import OnPolicyDistillation, OpdSettings
from student.plugin.controllers import CONTROLLERS
from student.plugin.terms import TermOutput
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from student.data.outcome import Outcome
    from student.data.row import Row
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe


class SageOpdSettings(OpdSettings):
    """Settings of the weighted divergence."""

    payload: Literal["sampled", "gather", "topk", "hidden"] = Field(
        "topk", description="What the teacher sends; only topk is supported."
    )


class SageOpd(OnPolicyDistillation[SageOpdSettings]):
    """Distillation with turns weighted by a judge and by the teacher's certainty (SAGE-OPD)."""

    @property
    def traits(self) -> Traits:
        return replace(super().traits, sums_teachers=False, reads=("turn_weights",))

    def __init__(self, settings: SageOpdSettings) -> None:
        super().__init__(settings)
        if settings.payload != "topk":
            raise ConfigError(
                f"objective sage_opd reads the teacher's top k; set payload to topk, not {settings.payload}."
            )
        self._mean = 1.0

    def remarks(self, recipe: Recipe, terms: Sequence[Term]) -> list[str]:
        """Also warn if the method that weights the turns is missing, so that all turns weigh the same."""
        found = super().remarks(recipe, terms)
        if not any(issubclass(CONTROLLERS.load(str(entry["name"])), Sage) for entry in recipe.methods):
            found.append(f"without method sage, all turns in term {self.settings.name!r} have weight 1")
        return found

    def assess(self, rows: Sequence[Row], outcomes: Sequence[Outcome], places: Sequence[int]) -> None:
        """Compute the mean weight of a token."""
        weighed = [(token_weights(one.notes, one.turns.spans, one.length), one) for one in outcomes if one.trained]
        # Tokens of a turn are all trained or none is, but for those of the environment, which have no weight.
        total = sum(float(weights.sum()) for weights, _ in weighed)
        count = sum(sum(end - start for start, end in one.turns.spans) or one.tokens for _, one in weighed)
        self._mean = total / count if count else 1.0

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """Weighted divergence per position, nats; metrics are those of `opd` and turn_weight, whose mean is 1."""
        found = [token_weights(row.notes, row.turns, row.length) / (self._mean or 1.0) for row in batch.rows]
        weights = batch.of_tokens([part.astype(np.float32) for part in found])
        # Into the weights for divergences that apply them, and into the loss, as the objective keeps its own weights.
        output = super().token_losses(replace(batch, weights=batch.weights * weights))
        metrics = {**output.metrics, "turn_weight": ((weights * batch.mask).sum(), batch.mask.sum())}
        return TermOutput(None if output.loss is None else output.loss * weights, output.total, metrics)


def token_weights(notes: Mapping[str, float], turns: Sequence[tuple[int, int]], length: int) -> NDArray[np.float64]:
    """[T] the weight w_k of each token's turn, 0 between turns; ones for a row without weights."""
    if not any(name.startswith(NOTE) for name in notes):
        return np.ones(length)
    found = np.zeros(length)
    for k, (start, end) in enumerate(turns or ((0, length),)):
        found[start:end] = notes.get(f"{NOTE}{k}", 0.0)
    return found
