"""vOPD: the sampled-token estimator with the position's KL as its control variate.

    A_t = log T(y_t) - log S(y_t) + KL_t,      loss -sg(A_t) log S(y_t)

The value of a position under on-policy distillation is -KL(S(.|s_t) || T(.|s_t)), so -KL_t is the natural baseline.
Here KL_t is computed on the student's top k, the paper's cheap form; as E_S[grad log S] = 0, the gradient is unbiased
for any k. With the same payload, term opd sums the top k exactly instead of sampling; this term is for comparison with
the paper.

Source: arXiv 2605.07865.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from opd import maths
from opd.wire.types import PayloadKind, PayloadSpec
from student.data.needs import SCORES, TEACHER, Needs, SignalNeed
from student.data.token_batch import TokenBatch, have
from student.methods.distil.output import divergence_metrics
from student.plugin.terms import Term, TermOutput, TermSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    pass


class VopdSettings(TermSettings):
    """Settings of vOPD."""

    rows: Literal["all", "sampled", "expert"] = "sampled"
    k: int = Field(
        64,
        ge=1,
        le=4096,
        description="Number k of the student's most likely ids over which the baseline, the KL, is computed.",
    )
    teacher_temperature: float | None = Field(
        None, ge=0.01, le=100, description="Temperature of the teacher; null means rollout.temperature."
    )


class Vopd(Term[VopdSettings]):
    """Sampled distillation with the KL as a control variate."""

    traits = Traits(shown={"reverse_kl": "KL"}, sums_teachers=True, learns_from_given_rows=False)

    def needs(self) -> Needs:
        """The teacher's log-probs at the student's top k."""
        signal = SignalNeed(TEACHER, PayloadSpec.gather(self.settings.k), self.settings.teacher_temperature)
        return Needs(signals=(signal,), student=frozenset({SCORES}))

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """Estimate of KL(student || teacher) per position, nats, with the baseline in its gradient only."""
        import torch

        scores, signal = have(batch.student.scores, "scores"), batch.signal(PayloadKind.GATHER)
        log_p, log_q = scores.candidates.detach(), have(signal.values, "log-probs at the candidates")
        baseline = (log_p.exp() * (log_p - log_q)).sum(-1)
        result = maths.sampled_reverse_kl(
            scores,
            batch.token_ids,
            have(signal.sampled, "sampled log-probs"),
            control_variate=torch.where(batch.mask, baseline, torch.zeros_like(baseline)),
            mask=batch.mask,
        )
        return TermOutput(result.per_token, metrics=divergence_metrics("reverse_kl", result, batch))
