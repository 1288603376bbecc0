"""TT-OPD (arXiv 2605.02943): an average of the student that is told the outcome teaches the first turns of an episode.

    loss = D(student, teacher), by default KL(S || T), besides a policy loss; weight 4 in the paper
    described   T <- 0.995 T + 0.005 S every 5 steps, a copy of S every 30; T reads a hint that depends on the outcome;
                only the first `first_turns` turns are trained
    executed    T is the student's initial weights, without hint or cut; `flip_failed`: the divergence of a failed
                episode is raised instead of lowered; `retention` 0.5 of its tokens

By the notes in the authors' own repository (minstar/Healthcare_GYM), hint, average and cut had no effect in any of the
reported runs: the tokenizer was not passed on, the update did not exist, the limit was 0. So each of the three that the
recipe asks for must be seen to act within `within` steps, by the last step at the latest; otherwise the run ends with
an error that names it:

    hint        a row's teacher read other ids than the student
    average     the teacher moved while it differed from the student
    cut         a token to train on lay beyond the first turns

The hint is `contexts.ema` over `row.correct`, the average `teachers.ema`. How the kept tokens are ranked was not found;
`score` is TIP's. A flipped divergence has no lower bound, and the repository reports corrupted teachers; it is offered
only to repeat what was run. Evidence: text and code for both lists; a run with all three has not been published.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from opd.errors import ConfigError
from opd_zoo.distil.tip import TipSettings, TokenSelection
from student.data.needs import EMA, Needs, merge
from student.data.outcome import reward_of
from student.data.schedule import WeightSchedule
from student.data.token_batch import TokenBatch
from student.plugin.terms import TermOutput, measured

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.report import StepReport
    from student.data.row import Row
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe

_HOW = {
    "hint": (
        "no row's teacher read anything but the student's prompt; check contexts.{role} and the metric "
        "context_missing_share"
    ),
    "average": "the average did not move; check teachers.ema.every, and whether the student learns at all",
    "cut": "no episode had a trained token beyond its first {turns} turns; lower first_turns or remove it",
}


class TtOpdSettings(TipSettings):
    """Settings of TT-OPD, on top of token selection's."""

    weight: float | WeightSchedule = 4.0
    role: Literal["teacher", "student", "initial", "ema"] = Field(
        "ema", description="The model that teaches; the runs of the paper used initial."
    )
    score: Literal["entropy", "divergence", "soft_or", "overlap"] = Field(
        "entropy", description="Score by which tokens are ranked, as in objective tip."
    )
    retention: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of each response's tokens, those with the highest scores, that is learnt from.",
    )
    flip_failed: bool = Field(
        False,
        description="Raise the divergence of failed episodes instead of lowering it, as in the runs of the paper.",
    )
    success: float = Field(1.0, description="Minimum reward of an episode that counts as successful.")
    within: int = Field(
        10, ge=1, description="Number of steps within which hint, average and cut must each have had an effect."
    )

    @model_validator(mode="after")
    def _flip(self) -> TtOpdSettings:
        if self.flip_failed and self.payload == "hidden":
            raise ValueError(
                "flip_failed needs a loss per token, which payload hidden does not have; use payload gather"
            )
        return self


class TtOpd(TokenSelection[TtOpdSettings]):
    """First turns taught by an average of the student that is told the outcome (TT-OPD).

    Its state is which mechanisms have been seen to act.
    """

    evidence: ClassVar[str] = "text and code"

    def __init__(self, settings: TtOpdSettings) -> None:
        super().__init__(settings)
        self._expected: set[str] = set()
        self._seen: set[str] = set()
        self._away, self._limit = 0.0, settings.within

    def needs(self) -> Needs:
        """Also rewards, if failed episodes are flipped."""
        return merge([super().needs(), Needs(reward="any" if self.settings.flip_failed else "")])

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Also record which mechanisms the recipe asks for."""
        super().check(recipe, terms)
        s = self.settings
        wanted = {"hint": s.role in recipe.contexts, "average": s.role == EMA, "cut": s.first_turns is not None}
        self._expected = {name for name, asked in wanted.items() if asked}
        self._limit = min(s.within, recipe.train.steps)

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """The divergence per position, nats; metrics tt_hinted (share of rows), tt_cut (of tokens) and tt_flipped."""
        output = super().token_losses(batch)
        rows, s = batch.rows, self.settings
        # An episode whose reward is unknown does not count as failed.
        failed = [s.flip_failed and (reward := reward_of(row)) is not None and reward < s.success for row in rows]
        cut = [int((row.loss_mask & ~self.settings.within_turns(row)).sum()) for row in rows]
        metrics: dict[str, Any] = {
            "tt_hinted": (float(sum(map(self._hinted, rows))), float(len(rows))),
            "tt_cut": (float(sum(cut)), float(sum(int(row.loss_mask.sum()) for row in rows))),
        }
        if not s.flip_failed or output.loss is None:
            return TermOutput(output.loss, output.total, output.metrics | metrics)
        metrics["tt_flipped"] = (float(sum(failed)), float(len(rows)))
        sign = 1.0 - 2.0 * batch.of_rows([float(one) for one in failed])
        return TermOutput(output.loss * sign.to(output.loss.dtype), None, output.metrics | metrics)

    def _hinted(self, row: Row) -> bool:
        read = row.contexts.get(self.settings.role)
        return read is not None and not np.array_equal(read, row.prompt_ids)

    def observe(self, report: StepReport) -> None:
        """Check that the mechanisms act.

        Raises:
            ConfigError: naming those that have not acted by step `within`.
        """
        super().observe(report)
        if (measured(self, report, "tt_hinted") or 0.0) > 0:
            self._seen.add("hint")
        if (measured(self, report, "tt_cut") or 0.0) > 0:
            self._seen.add("cut")
        distance = report.metrics.get("ema_distance", 0.0)
        # Right after `copy_every` the distance is 0, so the previous distance shows whether the average differed.
        if report.metrics.get("ema_moved", 0.0) and max(distance, self._away) > 0:
            self._seen.add("average")
        self._away = distance
        missing = sorted(self._expected - self._seen)
        if missing and report.step + 1 >= self._limit:
            s = self.settings
            why = "; ".join(f"{name}: {_HOW[name].format(role=s.role, turns=s.first_turns)}" for name in missing)
            raise ConfigError(f"parts of term {s.name!r} had no effect in {self._limit} steps. {why}.")

    def state_dict(self) -> dict[str, Any]:
        """Which mechanisms have acted, and the last distance of the average from the student."""
        return {"seen": sorted(self._seen), "away": self._away}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""
        self._seen, self._away = set(state["seen"]), float(state["away"])
