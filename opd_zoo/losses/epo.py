"""EPO: an entropy bonus that also holds each token's entropy in a band around the mean of earlier steps.

    loss_t = v (-H_t + penalty max(0, low h - H_t, H_t - high h)),   h the mean entropy of the turn in earlier steps
    v      1, with `phases` 1 - 0.2 (1 - exp(-2 p)) in the first half of the run and 0.8 exp(-3 p) in the second,
           p from 0 to 1 within each half

The coefficient is `weight`, 0.001 in the authors' scripts. Outside the band their penalty is the constant 0.1, which
has no gradient, so that only the bonus acts; here the penalty grows with the distance from the band. For what their
code does, use `entropy_bonus`. Both are exact over the vocabulary. Turns are those of episodes; a single answer is one
turn. Source: the released code of arXiv 2509.22576, WujiangXu/EPO; the growing penalty is ours.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from opd_zoo.losses.entropy_bonus import from_uniform
from student.data.needs import HIDDEN, SCORES, Needs
from student.data.token_batch import TokenBatch, have
from student.plugin.terms import Term, TermOutput, TermSettings, measured
from student.plugin.traits import Traits
from student.rl.losses.ratios import turn_in_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.report import StepReport
    from student.settings.recipe import Recipe

_BY_TURN = "entropy_by_turn/"


class EpoSettings(TermSettings):
    """Settings of EPO; its coefficient is `weight`."""

    rows: Literal["all", "sampled", "expert"] = "sampled"
    low: float = Field(
        0.8, ge=0, description="Lower end of the band, in multiples of the mean entropy of earlier steps."
    )
    high: float = Field(
        1.2, gt=0, description="Upper end of the band, in multiples of the mean entropy of earlier steps."
    )
    penalty: float = Field(
        0.5, gt=0, lt=1, description="Slope of the penalty outside the band, relative to that of the bonus."
    )
    memory: float = Field(0.9, ge=0, lt=1, description="Share of a turn's mean entropy that each step keeps.")
    phases: bool = Field(
        False, description="Let the term fade out over the run, slowly in its first half (EPO's phases)."
    )


class Epo(Term[EpoSettings]):
    """An entropy bonus with a penalty outside a band around earlier entropies (EPO).

    Its state is the mean entropy of each turn.
    """

    evidence: ClassVar[str] = "text and code"
    traits = Traits(learns_from_stale_rows=True)  # exact, given the prefix

    def __init__(self, settings: EpoSettings) -> None:
        super().__init__(settings)
        self.means: dict[int, float] = {}
        self._steps = 0

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Keep the length of the run, of which the phases are halves."""
        super().check(recipe, terms)
        self._steps = recipe.train.steps

    def phase(self, step: int) -> float:
        """V of the module's formula in a step."""
        if not self.settings.phases:
            return 1.0
        half, p = divmod(2.0 * step / max(1, self._steps), 1.0)
        return 0.8 * math.exp(-3.0 * p) if half else 1.0 - 0.2 * (1.0 - math.exp(-2.0 * p))

    def needs(self) -> Needs:
        """The student's entropies, hidden states and head."""
        return Needs(student=frozenset({SCORES, HIDDEN}))

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """Loss as a weighted total, nats.

        Metrics student_entropy (nats per token), outside_share (tokens outside the band), phase and entropy_by_turn/N.
        """
        import torch

        entropy = have(batch.student.scores, "scores").entropy.detach()
        turn = turn_in_row(batch)
        # Means of earlier steps: those of this micro-batch would depend on how the rows were split into micro-batches.
        known = {int(t): self.means.get(int(t)) for t in turn.unique()}
        below, above = torch.zeros_like(batch.mask), torch.zeros_like(batch.mask)
        for number, mean in known.items():
            if mean is not None:
                mine = batch.mask & (turn == number)
                below |= mine & (entropy < self.settings.low * mean)
                above |= mine & (entropy > self.settings.high * mean)
        slope = 1.0 + self.settings.penalty * (below.to(entropy.dtype) - above.to(entropy.dtype))
        phase = batch.of_rows([self.phase(row.key.step) for row in batch.rows])
        weights = batch.weights * (slope * phase).to(batch.weights.dtype)
        result = from_uniform(batch, weights)
        zero, count = torch.zeros_like(entropy), batch.mask.sum()
        metrics: dict[str, Any] = {
            "student_entropy": (torch.where(batch.mask, entropy, zero).sum(), count),
            "outside_share": ((below | above).sum(), count),
            "phase": (torch.where(batch.mask, phase, zero).sum(), count),
        }
        for number in known:
            mine = batch.mask & (turn == number)
            metrics[f"{_BY_TURN}{number}"] = (torch.where(mine, entropy, zero).sum(), mine.sum())
        # KL to the uniform distribution is log V minus the entropy.
        level = math.log(batch.valid_vocab) * weights.sum()
        return TermOutput(total=result.total - level, metrics=metrics)

    def observe(self, report: StepReport) -> None:
        """Move the mean entropy of each turn towards that of the step."""
        turns = sorted({int(n) for name in report.metrics for _, found, n in [name.rpartition(_BY_TURN)] if found})
        for turn in turns:
            value = measured(self, report, f"{_BY_TURN}{turn}")
            if value is not None:
                old = self.means.get(turn, value)
                self.means[turn] = self.settings.memory * old + (1.0 - self.settings.memory) * value

    def state_dict(self) -> dict[str, Any]:
        """The mean entropy of each turn."""
        return {"means": {str(turn): mean for turn, mean in self.means.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.means = {int(turn): float(mean) for turn, mean in state["means"].items()}
