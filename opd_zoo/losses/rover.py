"""ROVER: the log-ratio as the value function of a uniformly random policy, fitted by regression.

    Q_t      = rho (log pi(y_t) - log pi_old(y_t))
    next_t   = rho mean over the vocabulary of [log pi(v) - log pi_old(v)] at the next token, 0 at the last one
    loss_t   = (Q_t - sg(A + scale next_t))^2

A is the reward minus the group's mean, on every token; pi_old is the student when the rows were scored. Its hidden
states are kept, so that the means over the vocabulary are exact and no logits are stored. Nothing is clipped and there
is no reference model. In the first update next_t is 0 and the gradient is -2 rho A grad log pi. The authors' script for
mathematics also divides A by the group's deviation (advantage group_mean, scale std) and samples at temperature 0.6.
Sources: arXiv 2509.24981 and the released code, tinnerhrhe/ROVER.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from opd import maths
from opd.wire.types import PayloadKind, PayloadSpec
from student.data.needs import STUDENT, Needs, SignalNeed, merge
from student.data.token_batch import TokenBatch, have
from student.plugin.terms import TermOutput
from student.rl.losses.policy_gradient import PolicyGradient, PolicyGradientSettings
from student.rl.losses.settings import advantage_field

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class RoverSettings(PolicyGradientSettings):
    """Settings of ROVER."""

    rho: float = Field(1.0, gt=0, description="rho, the temperature of the values.")
    scale: float = Field(1.0, ge=0, description="Weight of the next state's value; 0 uses the reward alone.")
    advantage: dict[str, Any] | list[dict[str, Any]] = advantage_field(name="group_mean", scale="none")


class Rover(PolicyGradient[RoverSettings]):
    """Fits log-ratios to the reward plus the next token's mean log-ratio (ROVER)."""

    evidence: ClassVar[str] = "text and code"
    bounds: ClassVar[tuple[str, ...]] = ()
    unread: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "dual_clip")

    def needs(self) -> Needs:
        """Also the student's hidden states when the rows were scored."""
        return merge([super().needs(), Needs(signals=(SignalNeed(STUDENT, PayloadSpec.hidden()),))])

    def surrogate(self, log_ratio: Tensor, advantage: Tensor, live: Tensor, batch: TokenBatch) -> TermOutput:
        """Loss per position; metrics rover_q and rover_next, means of Q_t and next_t, nats times `rho`."""
        import torch

        old, old_mean = self._before(batch)
        zero, count = torch.zeros_like(live.detach()), batch.mask.sum()
        now_mean = have(batch.student.scores, "scores").mean_log_prob.detach()
        rho = self.settings.rho
        value = rho * torch.where(batch.mask, live - old.to(live.dtype), torch.zeros_like(live))
        following = rho * at_next(torch.where(batch.mask, now_mean - old_mean.to(now_mean.dtype), zero), batch)
        loss = (value - (advantage + self.settings.scale * following)) ** 2
        metrics: dict[str, Any] = {"rover_q": (value.detach().sum(), count), "rover_next": (following.sum(), count)}
        return TermOutput(loss, metrics=metrics)

    def _before(self, batch: TokenBatch) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """[N] log pi_old of the response tokens, and [N] its mean over the vocabulary, nats."""
        import torch

        signal = batch.signal(PayloadKind.HIDDEN, STUDENT)
        head = have(signal.head, "old head")
        with torch.no_grad():
            scores = maths.linear_token_scores(
                have(signal.hidden, "old hidden states"),
                head,
                sampled_ids=batch.token_ids,
                temperature=batch.temperature,
                vocab_size=batch.valid_vocab,
                mask=batch.mask,
            )
        return scores.sampled, scores.mean_log_prob


def at_next(values: Float[Tensor, " n"], batch: TokenBatch) -> Float[Tensor, " n"]:
    """[N] at each trained position the value at the row's next trained position; 0 at the last and elsewhere."""
    import torch

    places = batch.mask.nonzero()[:, 0]
    here, after = places[:-1], places[1:]
    same = batch.row[here] == batch.row[after]
    found = torch.zeros_like(values)
    found[here] = torch.where(same, values[after], torch.zeros_like(values[after]))
    return found
