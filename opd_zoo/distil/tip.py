"""TIP: on-policy distillation on the tokens that carry the signal.

The informative tokens are those at which the student is uncertain, and those at which it is confident and wrong. Each
score is scaled to [0, 1] within the response; h is the student's entropy and d the divergence KL(T || S) over the
candidates and a tail bucket:

    entropy      h, the first-order rule: in the paper, half of the tokens do as well as all of them
    divergence   d, which finds confident mistakes
    soft_or      h + d - h d, both
    overlap      share of the student's candidates among the teacher's (payload topk): keeps tokens at which the
                 teacher's signal is reliable, because successful runs gain in overlap (arXiv 2604.13016)

The gradient is that of the chosen tokens alone, a bias that is intended. Source: arXiv 2604.14084; there, scores are
scaled and cut within a batch with the top 2 % of entropies clipped; here within a response (see `selection`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator
from typing_extensions import TypeVar

from opd import maths
from opd.wire.types import PayloadKind
from opd_zoo.distil.selection import spread, top_share
from student.data.needs import SCORES, Needs
from student.data.token_batch import TokenBatch, have
from student.methods.distil.opd import OnPolicyDistillation, OpdSettings
from student.plugin.terms import TermOutput
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class TipSettings(OpdSettings):
    """Settings of token selection, on top of on-policy distillation's."""

    score: Literal["entropy", "divergence", "soft_or", "overlap"] = Field(
        "soft_or",
        description="Score by which tokens are ranked: entropy (the student's), divergence, soft_or (both), or "
        "overlap (of the candidates with the teacher's).",
    )
    retention: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of each response's tokens, those with the highest scores, that is learnt from.",
    )

    @model_validator(mode="after")
    def _check_score(self) -> TipSettings:
        if self.score in ("divergence", "soft_or") and self.payload not in ("gather", "topk"):
            raise ValueError(f"score {self.score} needs payload gather or topk, not {self.payload}; use score entropy")
        if self.score == "overlap" and self.payload != "topk":
            raise ValueError(f"score overlap needs payload topk, which has the teacher's ids, not {self.payload}")
        return self


TipSettings_co = TypeVar("TipSettings_co", bound=TipSettings, covariant=True, default=TipSettings)


class TokenSelection(OnPolicyDistillation[TipSettings_co]):
    """Distillation on the tokens with the highest entropy or divergence (TIP)."""

    @property
    def traits(self) -> Traits:
        return replace(super().traits, sums_teachers=False, ranks_tokens=True)

    def needs(self) -> Needs:
        """What distillation needs, the student's entropy, and its candidates for the overlap."""
        base = super().needs()
        candidates = self.settings.k if self.settings.score == "overlap" else base.candidates
        return dataclasses.replace(base, candidates=candidates, student=base.student | {SCORES})

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """The divergence at the chosen tokens, nats, and 0 elsewhere; metric selected_share."""
        chosen, factor = top_share(self._score(batch), batch.row, batch.mask, self.settings.retention)
        # With payload hidden, the divergence applies the weights itself, so the factor goes into the weights. With the
        # others the objective applies its own weights, so the factor goes into the loss.
        output = super().token_losses(
            dataclasses.replace(batch, mask=chosen, weights=batch.weights * chosen.float() * factor)
        )
        share = {"selected_share": (chosen.sum(), batch.mask.sum())}
        loss = None if output.loss is None else output.loss * factor
        return TermOutput(loss, output.total, output.metrics | share)

    def _score(self, batch: TokenBatch) -> Float[Tensor, " n"]:
        scores, name = have(batch.student.scores, "scores"), self.settings.score
        if name == "overlap":
            theirs = have(batch.signal(PayloadKind.TOPK, self.settings.role).ids, "teacher's top k")
            return maths.topk_overlap(have(batch.candidates, "candidates"), theirs)
        entropy = spread(scores.entropy, batch.row, batch.mask)
        if name == "entropy":
            return entropy
        kind = PayloadKind(self.settings.payload)
        signal = batch.signal(kind, self.settings.role)
        ours = have(scores if kind is PayloadKind.GATHER else batch.student.scores_at_teacher, "scores")
        figures = maths.support_figures(
            ours.candidates,
            ours.log_tail,
            have(signal.values, "log-probs at the candidates"),
            have(signal.log_tail, "log tail"),
        )
        divergence = spread(figures["bucket_forward_kl"], batch.row, batch.mask)
        return divergence if name == "divergence" else entropy + divergence - entropy * divergence
