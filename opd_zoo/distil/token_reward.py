"""Base of the terms that replace the token reward log T(y) - log S(y) of sampled distillation by another one.

    loss = -sg(A(log S(y), log T(y))) log S(y),      y ~ S

If A is not the log-ratio, the gradient is not that of the reverse KL and the optimum may move, in exchange for
gradients that no single token dominates. Every A here is 0 where both models agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from typing_extensions import TypeVar

from opd.wire.types import PayloadKind, PayloadSpec
from student.data.needs import SCORES, TEACHER, Needs, SignalNeed
from student.data.token_batch import TokenBatch, have
from student.plugin.terms import Term, TermOutput, TermSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class TokenRewardSettings(TermSettings):
    """Settings that these terms share."""

    rows: Literal["all", "sampled", "expert"] = "sampled"
    teacher_temperature: float | None = Field(
        None, ge=0.01, le=100, description="Temperature of the teacher; null means rollout.temperature."
    )


TokenRewardSettings_co = TypeVar(
    "TokenRewardSettings_co", bound=TokenRewardSettings, covariant=True, default=TokenRewardSettings
)


class TokenReward(Term[TokenRewardSettings_co]):
    """A policy gradient on a reward per token, which subclasses define."""

    traits = Traits(shown={"reverse_kl": "KL"}, learns_from_given_rows=False)

    def needs(self) -> Needs:
        """The teacher's log-probs of the response tokens."""
        signal = SignalNeed(TEACHER, PayloadSpec.sampled(), self.settings.teacher_temperature)
        return Needs(signals=(signal,), student=frozenset({SCORES}))

    def reward(
        self, student: Float[Tensor, " n"], teacher: Float[Tensor, " n"], batch: TokenBatch
    ) -> tuple[Float[Tensor, " n"], dict[str, Any]]:
        """The reward of each response token, and metrics.

        Args:
            student: [N] log-probs, detached, 0 where masked.
            teacher: [N] log-probs, 0 where masked.
            batch: everything else.
        """
        raise TypeError(f"{type(self).__name__} does not implement reward")

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """The surrogate per position; metrics reverse_kl (k1 estimate, nats) and token_reward."""
        import torch

        live = have(batch.student.scores, "scores").sampled
        zero = torch.zeros_like(live)
        student = torch.where(batch.mask, live.detach(), zero)
        teacher = torch.where(batch.mask, have(batch.signal(PayloadKind.SAMPLED).sampled, "log-probs"), zero)
        reward, metrics = self.reward(student, teacher, batch)
        count = batch.mask.sum()
        metrics |= {"reverse_kl": ((student - teacher).sum(), count), "token_reward": (reward.sum(), count)}
        return TermOutput(-reward.detach() * live, metrics=metrics)
