"""Supervised terms that see cross-entropy as one step of a policy gradient: OTR and CHORD's token weights.

    otr     loss_t = -(1 - beta) sg(p_t) log p_t,   p_t = pi(given token)
            the expectation over tokens v ~ pi of -r log pi(v) with r = 1 for the given token and beta for others
    chord   loss_t = -sg(p_t (1 - p_t)) log p_t

Both learn from given rows (method expert_rows). The authors of OTR draw 256 tokens per position; the expectation has
the same gradient and no noise. CHORD is (1 - mu) GRPO + mu of this: give the terms weights, or schedules
{from: 0.9, to: 0.1, steps: 100}; its cosine is not offered. Sources: OTR, arXiv 2509.26313 (text; beta is negative and
small there, without a value); CHORD, 2508.11408 and the released code of Trinity-RFT.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from student.learning.terms import Term, TermOutput, TermSettings, TokenBatch, have
from student.scoring.needs import SCORES, Needs

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class GivenTokensSettings(TermSettings):
    """Settings that both share."""

    rows: Literal["all", "sampled", "expert"] = "expert"


class GivenTokens(Term):
    """The base: subclasses give the weight of a token."""

    settings_type = GivenTokensSettings
    settings: GivenTokensSettings
    evidence: ClassVar[str] = "text and code"

    def needs(self) -> Needs:
        """The student's log-probs of the response tokens."""
        return Needs(student=frozenset({SCORES}))

    def weight(self, probability: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """[N] the weight, from the detached probability of the given token."""
        raise TypeError(f"{type(self).__name__} does not implement weight")

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """See the module; metrics sft_nats and token_weight."""
        import torch

        live = have(batch.student.scores, "scores").sampled
        weight = self.weight(live.detach().exp())
        zero, count = torch.zeros_like(live.detach()), batch.mask.sum()
        return TermOutput(
            -weight * live,
            metrics={
                "sft_nats": (torch.where(batch.mask, -live.detach(), zero).sum(), count),
                "token_weight": (torch.where(batch.mask, weight, zero).sum(), count),
            },
        )


class OtrSettings(GivenTokensSettings):
    """Settings of OTR."""

    beta: float = Field(-0.1, le=0, description="Reward of a drawn token that is not the given one.")


class Otr(GivenTokens):
    """OTR; see the module for the formula."""

    settings_type = OtrSettings
    settings: OtrSettings
    evidence: ClassVar[str] = "text"

    def weight(self, probability: Tensor) -> Tensor:
        """See the module."""
        return (1.0 - self.settings.beta) * probability


class Chord(GivenTokens):
    """CHORD's weights; see the module for the formula."""

    def weight(self, probability: Tensor) -> Tensor:
        """See the module."""
        return probability * (1.0 - probability)
