"""Supervised terms that treat cross-entropy as one step of a policy gradient: OTR and CHORD's token weights.

    otr     loss_t = -(1 - beta) sg(p_t) log p_t,   p_t = pi(given token)
            the expectation over tokens v ~ pi of -r log pi(v) with r = 1 for the given token and beta for others
    chord   loss_t = -sg(p_t (1 - p_t)) log p_t

Both learn from given rows (method expert_rows). OTR's authors draw 256 tokens per position; the expectation used here
has the same gradient without the noise. CHORD's objective is (1 - mu) GRPO + mu times this term: give the terms
weights, or schedules {from: 0.9, to: 0.1, steps: 100}; its cosine schedule is not offered. Sources: OTR, arXiv
2509.26313 (text; beta is negative and small there, without a value); CHORD, 2508.11408 and the released code of
Trinity-RFT.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field
from typing_extensions import TypeVar

from student.data.needs import SCORES, Needs
from student.data.token_batch import TokenBatch, have
from student.plugin.terms import Term, TermOutput, TermSettings

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class GivenTokensSettings(TermSettings):
    """Settings that both terms share."""

    rows: Literal["all", "sampled", "expert"] = "expert"


GivenTokensSettings_co = TypeVar(
    "GivenTokensSettings_co", bound=GivenTokensSettings, covariant=True, default=GivenTokensSettings
)


class GivenTokens(Term[GivenTokensSettings_co]):
    """Base of weighted cross-entropy: subclasses give the weight of a token."""

    evidence: ClassVar[str] = "text and code"

    def needs(self) -> Needs:
        """The student's log-probs of the response tokens."""
        return Needs(student=frozenset({SCORES}))

    def weight(self, probability: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """[N] the weight of each token, from the detached probability of the given token."""
        raise TypeError(f"{type(self).__name__} does not implement weight")

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """Loss per position; metrics sft_nats and token_weight, means over the trained tokens."""
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

    beta: float = Field(-0.1, le=0, description="Reward of a drawn token that differs from the given one.")


class Otr(GivenTokens[OtrSettings]):
    """Cross-entropy on given tokens, weighted by their probability (OTR)."""

    evidence: ClassVar[str] = "text"

    def weight(self, probability: Tensor) -> Tensor:
        """[N] (1 - beta) p."""
        return (1.0 - self.settings.beta) * probability


class Chord(GivenTokens):
    """Cross-entropy on given tokens, weighted by p (1 - p) (CHORD)."""

    def weight(self, probability: Tensor) -> Tensor:
        """[N] p (1 - p)."""
        return probability * (1.0 - probability)
