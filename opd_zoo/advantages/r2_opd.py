"""R2-OPD (reward-aligned): a teacher's reward per token, shifted to tokens where its sign agrees with the verdict.

    d_t   log T(y_t) - log mu(y_t), mu the policy that sampled;   z = 1 for a right answer, -1 for a wrong one
    g_t   sigmoid(beta z d_t / nu),   nu the median of |d| over the answer, at least 1e-8
    A_t = Z g_t d_t,   Z so that the sum of |A| over the answer is that of |d|

In a right answer tokens that the teacher likes weigh more, in a wrong answer tokens that it dislikes; no sign changes.
With beta 0 it is distillation alone, as it is for answers that the length limit cut. Most tokens of a language model
have d near 0, so nu is small and the authors' beta of 0.001 moves only what lies far from it. Use it with objective
policy_gradient without a clip. Another method of this name drops spans by their progress (arXiv 2608.19408) and is not
offered. Source: arXiv 2609.35517 (notes on its text, which give these equations; no code is public).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from opd.errors import ConfigError
from opd.wire.types import PayloadSpec
from student.data.needs import TEACHER, Needs, SignalNeed
from student.plugin.traits import Traits
from student.rl.advantages.base import Advantage, AdvantageSettings, Credit, known, teacher_gaps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from student.data.outcome import Outcome
    from student.data.row import Row
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe

_LEAST = 1e-8


class R2OpdSettings(AdvantageSettings):
    """Settings of R2-OPD."""

    beta: float = Field(
        1e-3,
        ge=0,
        description="How much weight moves to tokens on which teacher and verdict agree; 0 is distillation alone.",
    )
    threshold: float = Field(0.5, description="Minimum reward of an answer that counts as right.")


class R2Opd(Advantage[R2OpdSettings]):
    """A teacher's log-ratio per token, shifted to tokens where the verdict agrees (R2-OPD).

    Metric moved: half the sum of |A - d|, as a share of the sum of |d|.
    """

    evidence = "abstract"
    traits = Traits(
        learns_from_equal=True, shift_free="group", scale_free="group", sees_threshold=True, reads=("behaviour",)
    )

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse a gate that is the same everywhere.

        Raises:
            ConfigError: with the setting to raise.
        """
        if not self.settings.beta:
            raise ConfigError(
                "advantage 'r2_opd' with beta 0 is distillation alone; raise beta, or use objective opd with payload "
                "sampled."
            )

    def needs(self) -> Needs:
        """The teacher's log-probs of the response tokens."""
        return Needs(signals=(SignalNeed(TEACHER, PayloadSpec.sampled()),))

    def estimate(self, outcomes: Sequence[Outcome], credit: Sequence[Credit] | None) -> list[Credit]:
        """The sign z of each row; 0 for an answer that was cut, whose verdict reflects the length limit."""
        self.fired = {}
        least = self.settings.threshold
        return [0.0 if o.truncated else 1.0 if known(o) >= least else -1.0 for o in outcomes]

    def refine(self, row: Row, credit: Credit) -> Credit:
        """[T] float32 A of each token; 0 where it is not trained on."""
        mask, found, gaps = row.loss_mask, np.zeros(row.length), teacher_gaps(row)
        found[mask] = self.by_token(gaps, float(np.mean(credit)))
        moved, whole = self.fired.get("moved", (0.0, 0.0))
        change = float(np.abs(found[mask] - gaps).sum()) / 2.0
        self.fired = {"moved": (moved + change, whole + float(np.abs(gaps).sum()))}
        return found.astype(np.float32)

    def by_token(self, gaps: NDArray[np.float64], sign: float) -> NDArray[np.float64]:
        """A of each token, from d and the answer's z, both in float64."""
        size = np.abs(gaps)
        if not sign or not size.any():
            return gaps
        # The sigmoid by way of tanh, which cannot overflow.
        gate = 0.5 * (1.0 + np.tanh(0.5 * self.settings.beta * sign * gaps / max(float(np.median(size)), _LEAST)))
        mass = float((gate * size).sum())
        # Every gate may underflow to 0, when all tokens go against the verdict: then d is kept.
        return gate * gaps * (float(size.sum()) / mass) if mass > 0.0 else gaps
