"""RAPO's forward KL: a penalty for losing what the reference finds likely, to a flatter target for worse answers.

    loss_t = KL(q || pi) at each prefix,   q proportional to reference^phi,   phi = low + (1 - low) clip(reward, 0, 1)

On the prefixes of a bad answer the policy is held near a flattened reference, which lets it explore farther than the
reverse KL of GRPO does. The divergence is exact over the vocabulary, from the reference's hidden states; phi is rounded
to sixteenths and is at least one sixteenth. The coefficient is `weight`. The paper's entropy bonus is term
entropy_bonus. Rows without a reward are left out. Source: arXiv 2510.03865 (text in part: the form of phi is inferred,
its coefficients are not stated).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from opd import maths
from opd.errors import ConfigError
from opd.wire.types import PayloadKind, PayloadSpec
from student.data.needs import HIDDEN, REFERENCE, Needs, SignalNeed
from student.data.outcome import reward_of
from student.data.token_batch import TokenBatch, have
from student.plugin.terms import Term, TermOutput, TermSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from opd.heads import OutputHead
    from student.data.row import Row

_LEVELS = 16


class RapoKlSettings(TermSettings):
    """Settings of RAPO's forward KL; its coefficient is `weight`."""

    rows: Literal["all", "sampled", "expert"] = "sampled"
    low: float = Field(0.5, gt=0, le=1, description="phi of an answer with reward 0; 1 is the plain forward KL.")


class RapoKl(Term[RapoKlSettings]):
    """Forward KL to a reference that is flattened for bad answers (RAPO)."""

    evidence: ClassVar[str] = "inferred"
    traits = Traits(learns_from_stale_rows=True)  # exact, given the prefix

    def needs(self) -> Needs:
        """The hidden states of the reference and of the student, and rewards."""
        signals = (SignalNeed(REFERENCE, PayloadSpec.hidden()),)
        return Needs(signals=signals, student=frozenset({HIDDEN}), reward="any")

    def selects(self, row: Row) -> bool:
        """Whether the row has a reward."""
        return super().selects(row) and reward_of(row) is not None

    def phi(self, row: Row) -> float:
        """The power of the reference for a row, in (0, 1]."""
        reward = min(max(reward_of(row) or 0.0, 0.0), 1.0)
        # Never 0: that would be the uniform distribution, and a head cannot be scaled by 0.
        return max(1, round((self.settings.low + (1.0 - self.settings.low) * reward) * _LEVELS)) / _LEVELS

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """Forward KL as a weighted total, nats; metrics forward_kl (nats per token) and phi."""
        student = have(batch.student.head, "head")
        hidden = have(batch.student.hidden, "hidden states")
        signal = batch.signal(PayloadKind.HIDDEN, REFERENCE)
        reference = have(signal.head, "reference's head")
        powers = [self.phi(row) for row in batch.rows]
        total, value = hidden.new_zeros(()), hidden.new_zeros(())
        # A head has a single power, so each power takes a pass; `phi` rounds to keep them few.
        for power in sorted(set(powers)):
            mask = batch.mask & batch.of_rows([phi == power for phi in powers])
            result = maths.linear_divergence(
                hidden,
                student,
                have(signal.hidden, "reference's hidden states"),
                powered(reference, power),
                kind="forward_kl",
                temperature=batch.temperature,
                vocab_size=batch.valid_vocab,
                mask=mask,
                token_weights=batch.weights * mask,
            )
            total = total + result.total
            value = value + result.per_token.detach().where(mask, hidden.new_zeros(())).sum()
        shown = batch.of_tokens(powers).where(batch.mask, hidden.new_zeros((), dtype=batch.weights.dtype))
        count = batch.mask.sum()
        return TermOutput(total=total, metrics={"forward_kl": (value, count), "phi": (shown.sum(), count)})


def powered(head: OutputHead, power: float) -> OutputHead:
    """The head whose distribution is the normalised `power` of the given head's.

    Raises:
        ConfigError: for a head with a soft cap, which scaling the logits does not commute with.
    """
    if power != 1.0 and head.soft_cap:
        raise ConfigError(
            "rapo_kl needs a reference without a soft cap on its logits; use another reference, or set low to 1."
        )
    return head.times(power)
