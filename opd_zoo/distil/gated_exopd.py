"""Gated ExOPD: the teacher's reward is extrapolated only at tokens on which the student agrees with the teacher.

    x = log T(y) - log S(y),   q = exp(-(e^x - x - 1) / tau),   A = x + gamma q (log T(y) - log R(y))

so that lambda is 1 + gamma q: 1 where they differ, 1 + gamma where they agree. At the published tau of 0.007 q is
nearly the indicator of |x| < 0.1. The reference R is `teachers.reference`.

After REOPD, arXiv 2608.11698; evidence: one detailed digest, no code. Its budget for gamma per batch could not be
read completely and is not implemented; in the paper's ablation the gate with a fixed gamma is as good (47.66 both).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from opd.wire.types import PayloadKind, PayloadSpec
from opd_zoo.distil.token_reward import TokenReward, TokenRewardSettings
from student.data.needs import REFERENCE, SCORES, TEACHER, Needs, SignalNeed
from student.data.token_batch import have

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from student.data.token_batch import TokenBatch


class GatedExOpdSettings(TokenRewardSettings):
    """Settings of gated extrapolation."""

    gamma: float = Field(
        0.25, ge=0, le=10, description="lambda - 1, the extrapolation at tokens where student and teacher agree."
    )
    tau: float = Field(
        0.007,
        gt=0,
        description="Width of the agreement gate in nats: the smaller, the closer student and teacher must be.",
    )


class GatedExOpd(TokenReward[GatedExOpdSettings]):
    """ExOPD only at tokens where student and teacher agree."""

    def needs(self) -> Needs:
        """The log-probs of teacher and reference at the response tokens."""
        level = self.settings.teacher_temperature
        signals = tuple(SignalNeed(role, PayloadSpec.sampled(), level) for role in (TEACHER, REFERENCE))
        return Needs(signals=signals, student=frozenset({SCORES}))

    def reward(self, student: Tensor, teacher: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Any]]:
        """See the module; metric gate, the mean of q."""
        import torch

        found = have(batch.signal(PayloadKind.SAMPLED, REFERENCE).sampled, "reference's log-probs")
        reference = torch.where(batch.mask, found, torch.zeros_like(found))
        ratio = teacher - student
        open_ = gate(ratio, self.settings.tau)
        metrics = {"gate": (torch.where(batch.mask, open_, torch.zeros_like(open_)).sum(), batch.mask.sum())}
        return ratio + self.settings.gamma * open_ * (teacher - reference), metrics


def gate(ratio: Float[Tensor, " n"], tau: float) -> Float[Tensor, " n"]:
    """The gate exp(-(e^x - x - 1) / tau), in [0, 1]; 1 where x = 0."""
    # e^x - x - 1 is about x^2 / 2 near 0, where exp(x) - 1 - x would cancel to rounding noise larger than tau.
    return (-(ratio.expm1() - ratio) / tau).exp()
