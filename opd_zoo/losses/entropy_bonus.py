"""A bonus on the entropy of the student's distribution, exact over the whole vocabulary, against entropy collapse.

    loss_t = -H(pi(. | prefix)) = KL(pi || uniform) - log V

The gradient is the exact gradient of the entropy at each sampled prefix; as in every entropy bonus of public code, the
effect of the policy on which prefixes occur is left out. The coefficient is `weight`, 0.001 to 0.01 in most recipes,
and may be a schedule. No logits are kept in memory: the entropy is computed as a divergence to a head of zeros, whose
distribution is uniform. Sources: arXiv 1602.01783 (A3C); the bonus inside EPO, T1 and LTE.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from opd import maths
from student.data.needs import HIDDEN, Needs
from student.data.token_batch import TokenBatch, have
from student.plugin.terms import Term, TermOutput
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from torch import Tensor


class EntropyBonus(Term, defaults={"rows": "sampled"}):
    """A bonus for the student's entropy, computed exactly."""

    evidence: ClassVar[str] = "text and code"
    traits = Traits(learns_from_stale_rows=True)  # exact, given the prefix

    def needs(self) -> Needs:
        """The student's hidden states and head."""
        return Needs(student=frozenset({HIDDEN}))

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """Minus the entropy as a weighted total, nats; metric student_entropy, nats per token."""
        result = from_uniform(batch, batch.weights)
        entropy = math.log(batch.valid_vocab) - result.per_token.detach()
        shown = entropy.where(batch.mask, entropy.new_zeros(()))
        return TermOutput(
            total=result.total - math.log(batch.valid_vocab) * batch.weights.sum(),
            metrics={"student_entropy": (shown.sum(), batch.mask.sum())},
        )


def from_uniform(batch: TokenBatch, token_weights: Tensor) -> maths.Divergence:
    """KL(pi || uniform) = log V - H(pi) per position, nats, and its total weighted by `token_weights` [N].

    Computed as a divergence to a head of zeros, so that no logits are kept.
    """
    hidden, head = have(batch.student.hidden, "hidden states"), have(batch.student.head, "head")
    return maths.linear_divergence(
        hidden,
        head,
        hidden.new_zeros(len(hidden), 1),
        head.weight.new_zeros(batch.valid_vocab, 1),
        kind="reverse_kl",
        temperature=batch.temperature,
        vocab_size=batch.valid_vocab,
        mask=batch.mask,
        token_weights=token_weights,
    )
