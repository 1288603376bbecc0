"""Supervised terms that reshape next-token prediction for a later or simultaneous reinforcement.

    precision   loss_t = -sg(p_t^beta) log p_t + top sum_{v in K, v != y} p(v) + tail sum_{v not in K, v != y} p(v)
    rmt         loss_t = -log p_t  on the share s of each response's tokens with the lowest entropy, 0 on the others
                s      from `first` to 1 in a straight line over `steps`

precision reads cross-entropy as one step of a policy gradient in which the given token y earns p^(beta - 1) and others
earn -top if they are among the K most likely ids, else -tail: beta above 0 makes the distribution more precise, below
0 more diverse, and `tail` alone keeps alternatives alive while it empties the tail. With beta, top and tail 0 it is
cross-entropy. rmt learns easy tokens first; entropies are the present student's. Both learn from given rows (method
expert_rows). Sources: Diversity or Precision, arXiv 2512.22955, and RMT, 2509.24375 (both inferred from abstracts: what
is scaled and what is chosen is theirs, the forms are ours; RMT's falling token budget is method stages, and its rewards
are a term beside this one).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from opd.errors import ConfigError
from opd_zoo.distil.selection import top_share
from opd_zoo.losses.given_tokens import GivenTokens, GivenTokensSettings
from student.data.needs import SCORES, Needs
from student.data.token_batch import TokenBatch, have
from student.plugin.terms import TermOutput
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from student.plugin.terms import Term
    from student.settings.recipe import Recipe


class PrecisionSettings(GivenTokensSettings):
    """Settings of the reshaped cross-entropy."""

    beta: float = Field(0.25, ge=-1, le=2, description="Exponent of the given token's probability in its weight.")
    k: int = Field(8, ge=1, le=4096, description="Number of the student's most likely ids that are told from the tail.")
    top: float = Field(0.0, description="Weight of the probability of the k most likely ids but the given one.")
    tail: float = Field(0.1, description="Weight of the probability of all other ids but the given one.")


class Precision(GivenTokens[PrecisionSettings]):
    """Cross-entropy with a weight by probability and penalties by rank (Diversity or Precision)."""

    evidence: ClassVar[str] = "inferred"

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse what is cross-entropy.

        Raises:
            ConfigError: with the settings to change.
        """
        s = self.settings
        super().check(recipe, terms)
        if not (s.beta or s.top or s.tail):
            raise ConfigError("term 'precision' with beta, top and tail 0 is cross-entropy; change one, or use sft.")

    def needs(self) -> Needs:
        """The student's log-probs of the response tokens and of its most likely ids."""
        return Needs(student=frozenset({SCORES}), candidates=self.settings.k)

    def weight(self, probability: Tensor) -> Tensor:
        """[N] p^beta."""
        return probability.pow(self.settings.beta)

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """Loss per position; metrics sft_nats, token_weight and tail_mass, the probability outside the k ids."""
        import torch

        output, scores = super().token_losses(batch), have(batch.student.scores, "scores")
        others = have(batch.candidates, "candidates")[:, : self.settings.k] != batch.token_ids[:, None]
        top = torch.where(others, scores.candidates[:, : self.settings.k].exp(), 0.0).sum(-1)
        # Everything but the given token, less what is among the k.
        tail = (1.0 - scores.sampled.exp() - top).clamp(min=0.0)
        loss = have(output.loss, "loss") + self.settings.top * top + self.settings.tail * tail
        mass = (torch.where(batch.mask, tail.detach(), torch.zeros_like(tail)).sum(), batch.mask.sum())
        return TermOutput(loss, metrics=output.metrics | {"tail_mass": mass})


class RmtSettings(GivenTokensSettings):
    """Settings of RMT's curriculum of tokens."""

    first: float = Field(0.3, gt=0, lt=1, description="Share of a response's tokens that is learnt at first.")
    steps: int = Field(100, ge=1, description="Number of steps over which the share rises to 1.")


class Rmt(GivenTokens[RmtSettings]):
    """Cross-entropy on the tokens of low entropy first, and on more of them step by step (RMT)."""

    evidence: ClassVar[str] = "inferred"

    @property
    def traits(self) -> Traits:
        return Traits(ranks_tokens=True)

    def share(self, step: int) -> float:
        """S of the module's formula in a step."""
        return min(1.0, self.settings.first + (1.0 - self.settings.first) * step / self.settings.steps)

    def weight(self, probability: Tensor) -> Tensor:
        """[N] 1."""
        return probability * 0.0 + 1.0

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """Loss per position; metrics sft_nats, token_weight, selected_share and selected_entropy (nats)."""
        import torch

        entropy, output = have(batch.student.scores, "scores").entropy, super().token_losses(batch)
        step = max((row.key.step for row in batch.rows), default=0)
        chosen, factor = top_share(-entropy, batch.row, batch.mask, self.share(step))
        loss = have(output.loss, "loss") * torch.where(chosen, factor, torch.zeros_like(factor))
        picked = torch.where(chosen, entropy, torch.zeros_like(entropy)).sum()
        metrics: dict[str, Any] = {
            "selected_share": (chosen.sum(), batch.mask.sum()),
            "selected_entropy": (picked, chosen.sum()),
        }
        return TermOutput(loss, metrics=output.metrics | metrics)
