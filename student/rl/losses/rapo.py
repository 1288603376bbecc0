"""RAPO's forward KL: a penalty for losing what a reference holds likely, flatter the worse the answer.

    loss_t = KL(q || pi) at each prefix,   q proportional to reference^phi,   phi = low + (1 - low) clip(reward, 0, 1)

A bad answer's prefixes are held near a flat reference, which lets the policy look farther than the reverse KL of GRPO.
The divergence is exact over the vocabulary, from the reference's hidden states; phi is rounded to sixteenths, at
least one of them. The coefficient is `weight`; the paper adds an entropy bonus, which is term entropy_bonus. Rows
without a reward are left out. Source: arXiv 2510.03865 (text in part: the form of phi is inferred, its coefficients are
not stated).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from opd import maths
from opd.errors import ConfigError
from opd.wire.types import PayloadKind, PayloadSpec
from student.data.outcome import reward_of
from student.learning.terms import Term, TermOutput, TermSettings, TokenBatch, have
from student.scoring.needs import HIDDEN, REFERENCE, Needs, SignalNeed

if TYPE_CHECKING:
    from opd.heads import OutputHead
    from student.data.row import Row

_LEVELS = 16


class RapoKlSettings(TermSettings):
    """Settings of the penalty; its coefficient is `weight`."""

    rows: Literal["all", "sampled", "expert"] = "sampled"
    low: float = Field(0.5, gt=0, le=1, description="phi of an answer of reward 0; 1 is the plain forward KL.")


class RapoKl(Term):
    """The term; see the module for the formula."""

    settings_type = RapoKlSettings
    settings: RapoKlSettings
    evidence: ClassVar[str] = "inferred"
    why_not_stale = ""  # exact, given the prefix

    def needs(self) -> Needs:
        """The reference's hidden states, the student's, and rewards."""
        signals = (SignalNeed(REFERENCE, PayloadSpec.hidden()),)
        return Needs(signals=signals, student=frozenset({HIDDEN}), reward="any")

    def selects(self, row: Row) -> bool:
        """Whether the row has a reward."""
        return super().selects(row) and reward_of(row) is not None

    def phi(self, row: Row) -> float:
        """The power of the reference under a row."""
        reward = min(max(reward_of(row) or 0.0, 0.0), 1.0)
        # Never 0: the power would be another distribution, and no head has the scale 0.
        return max(1, round((self.settings.low + (1.0 - self.settings.low) * reward) * _LEVELS)) / _LEVELS

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """Forward KL per position, nats, as a weighted total; metrics forward_kl and phi."""
        student = have(batch.student.head, "head")
        hidden = have(batch.student.hidden, "hidden states")
        signal = batch.signal(PayloadKind.HIDDEN, REFERENCE)
        reference = have(signal.head, "reference's head")
        powers = [self.phi(row) for row in batch.rows]
        total, value = hidden.new_zeros(()), hidden.new_zeros(())
        # A head has one power, so a pass for each; rows are rounded to few of them, see `phi`.
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
    """The head whose distribution is the given one's to a power, normalised.

    Raises:
        ConfigError: for a head with a soft cap, whose logits are not a multiple of another head's.
    """
    if power != 1.0 and head.soft_cap:
        raise ConfigError("rapo_kl needs a reference without a soft cap on its logits; set low to 1.")
    return head.times(power)
