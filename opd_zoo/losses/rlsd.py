"""RLSD's mix (arXiv 2604.03128): the verifier sets a token's direction, a teacher that has read the solution its size.

    g_t     log T(y_t | x, hint) - log S(y_t | x), without gradient
    w_t     clip(exp(sign(A) g_t), 1 - band, 1 + band)
    A_t     A ((1 - l) + l w_t),   l in a straight line from 0.5 to 0 over 50 steps
    loss_t  the clipped surrogate with A_t

A is the credit of the row, from the advantage chain. w_t is positive, so the teacher never changes the sign of a
token's credit: a solution that was read but not reached cannot be copied against the verifier. By default T is a copy
of the student that is refreshed every few steps (`teachers.ema: {decay: 0, every: 10}`), and it reads `contexts.ema`.
Rows whose context is missing keep the credit A. Groups whose answers all agree have A = 0 and learn nothing here; a
re-implementation gives them 0.05, which no text of the authors was found to say. Evidence: text; released code was not
found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from opd.wire.types import PayloadKind, PayloadSpec
from student.data.needs import Needs, SignalNeed, merge
from student.data.schedule import WeightSchedule
from student.data.token_batch import TokenBatch, have
from student.plugin.terms import TermOutput
from student.rl.losses.policy_gradient import ClippedSettings, PolicyGradient

if TYPE_CHECKING:
    from torch import Tensor

    from student.data.row import Row


class RlsdSettings(ClippedSettings):
    """Settings of RLSD's mix."""

    role: Literal["teacher", "student", "initial", "ema"] = Field(
        "ema",
        description="The model that has read the solution. teacher: the one that the prompt is routed to; student, "
        "initial, ema: models in this process.",
    )
    band: float = Field(0.2, gt=0, lt=1, description="Largest distance of a token's weight from 1.")
    share: float | WeightSchedule = Field(
        default_factory=lambda: WeightSchedule(start=0.5, to=0.0, steps=50),
        description="l, the share of the credit that the teacher weights: a number, or a schedule {from, to, steps}.",
    )


class Rlsd(PolicyGradient[RlsdSettings]):
    """The clipped loss with credit weighted per token by a teacher that has read the solution (RLSD)."""

    evidence: ClassVar[str] = "text"

    def needs(self) -> Needs:
        """Also the log-probs of the response tokens under the model that has read the solution."""
        return merge([super().needs(), Needs(signals=(SignalNeed(self.settings.role, PayloadSpec.sampled()),))])

    def lacks(self, row: Row) -> bool:
        """As in `PolicyGradient`, but without the role's context the row keeps its plain credit."""
        return bool(row.unread) and any(need.role in row.unread for need in super().needs().signals)

    def surrogate(self, log_ratio: Tensor, advantage: Tensor, live: Tensor, batch: TokenBatch) -> TermOutput:
        """Loss per position; metrics clipped_share, hint_gap (mean g_t, nats), rlsd_moved (mean |A_t / A - 1|)."""
        import torch

        told = have(batch.signal(PayloadKind.SAMPLED, self.settings.role).sampled, "teacher's log-probs").to(live.dtype)
        read = batch.mask & ~batch.of_rows([self.settings.role in row.unread for row in batch.rows])
        gap = torch.where(read, told - live.detach(), torch.zeros_like(live))
        band, share = self.settings.band, self.settings.share
        shares = [share.at(row.key.step) if isinstance(share, WeightSchedule) else share for row in batch.rows]
        # With the sign of the credit: in a wrong answer, a token that the solution makes likelier is blamed less, so
        # the teacher never works against the verifier's direction.
        weight = (torch.sign(advantage) * gap).exp().clamp(1 - band, 1 + band)
        factor = 1 + batch.of_rows(shares).to(live.dtype) * (weight - 1)
        usual = super().surrogate(log_ratio, advantage * factor, live, batch)
        metrics: dict[str, Any] = {
            "hint_gap": (gap.sum(), read.sum()),
            "rlsd_moved": (torch.where(read, (factor - 1).abs(), torch.zeros_like(gap)).sum(), read.sum()),
        }
        return TermOutput(usual.loss, metrics=usual.metrics | metrics)
