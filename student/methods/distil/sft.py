"""Supervised fine-tuning: cross-entropy on given answers, loss -log S(y_t) per token.

With method expert_rows (`cold_steps`) this is the cold start before on-policy distillation. On teacher answers from a
file it is sequence-level distillation (Kim and Rush, arXiv 1606.07947), the off-policy baseline.
"""

from __future__ import annotations

from student.data.needs import SCORES, Needs
from student.data.token_batch import TokenBatch, have
from student.plugin.terms import Term, TermOutput


class SupervisedFineTuning(Term, defaults={"rows": "expert"}):
    """Cross-entropy on given answers."""

    def needs(self) -> Needs:
        """The student's log-probs of the response tokens."""
        return Needs(student=frozenset({SCORES}))

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """Cross-entropy per position, nats; metric sft_nats."""
        import torch

        loss = -have(batch.student.scores, "scores").sampled
        value = torch.where(batch.mask, loss.detach(), torch.zeros_like(loss)).sum()
        return TermOutput(loss, metrics={"sft_nats": (value, batch.mask.sum())})
