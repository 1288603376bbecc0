"""On-policy distillation over spans of text, for a teacher with any tokenizer (objective "span_opd").

The student's text is read by the teacher in its own template and tokens (`student.scoring.translate`). A span m is a
shortest run of the student's tokens whose bytes are also a run of the teacher's. Minimises, on the student's samples,

    sum_m r_m,     r_m = log S(m) - log T(m) = sum_{i in m} log s(y_i) - sum_{j in m} log t(z_j)

as a policy gradient: each token y_i of m gets the credit -r_m, and with `discount` also that of later spans,
discounted by the number of tokens between. With one tokenizer this is objective opd with payload sampled.

The regime: T is the teacher's probability of its canonical tokens of the text, which is at most that of the text, the
sum over all its tokenizations; docs/estimators.md measures the difference. Tokens without a counterpart, such as a cut
character or a special token that the teacher lacks, have no loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from pydantic import Field, model_validator

from opd import maths
from opd.errors import IncompatibleTeacherError
from opd.wire.types import PayloadKind, PayloadSpec
from student.data.needs import SCORES, TEACHER, Needs, SignalNeed
from student.data.token_batch import TokenBatch, have
from student.methods.distil.output import divergence_metrics, weighted
from student.methods.distil.return_to_go import future_surrogate
from student.plugin.terms import Term, TermOutput, TermSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from student.data.row import Row
    from student.methods.distil.output import Metrics


class SpanOpdSettings(TermSettings):
    """Settings of distillation over spans of text."""

    teacher_temperature: float | None = Field(
        None, ge=0.01, le=100, description="Temperature of the teacher's distribution; null means rollout.temperature."
    )
    discount: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Also credit a token with the log-ratios of later spans, discounted by this factor per position; 0 "
        "credits it with its own span alone, 1 with all that follows.",
    )
    length_normalised: bool = Field(
        False, description="With discount: divide the return-to-go by the number of later tokens, as MiniLLM does."
    )
    importance_cap: float | None = Field(
        None,
        gt=0,
        description="Weight a span with min(p / behaviour, cap), as rows of older weights need; null does not weight.",
    )
    min_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Least share of an update's tokens that must have a counterpart among the teacher's; below it the "
        "run stops. The metric span_tokens has the share.",
    )

    @model_validator(mode="after")
    def _check(self) -> SpanOpdSettings:
        if self.discount and self.importance_cap is not None:
            raise ValueError(
                f"importance_cap weights single spans, not the returns of discount {self.discount:g}; set only one"
            )
        return self


class SpanDistillation(Term[SpanOpdSettings]):
    """On-policy distillation over spans of text: reverse KL to a teacher with any tokenizer."""

    @property
    def traits(self) -> Traits:
        s = self.settings
        why = (
            "with discount it sums log-ratios over later spans, which no weight corrects; set discount: 0"
            if s.discount
            else "it estimates the reverse KL from the sampled text; set importance_cap (2, for example)"
        )
        stale = s.importance_cap is not None
        return Traits(
            shown={"reverse_kl": "KL", "span_tokens": "tokens with a signal"},
            sums_teachers=True,
            learns_from_given_rows=False,
            learns_from_stale_rows=stale,
            why={} if stale else {"learns_from_stale_rows": why},
        )

    def needs(self) -> Needs:
        """Log-probs of the sampled text from both models."""
        need = SignalNeed(TEACHER, PayloadSpec.sampled(), self.settings.teacher_temperature, spans=True)
        return Needs(signals=(need,), student=frozenset({SCORES}))

    def prepare(self, rows: Sequence[Row]) -> None:
        """Also refuse rows of which too little has a counterpart among the teacher's tokens.

        Raises:
            IncompatibleTeacherError: with the share, and an example.
        """
        super().prepare(rows)
        seen = [
            (row, translation, int((translation.aligned & row.loss_mask).sum()))
            for row in rows
            if self.selects(row)
            for translation in row.translations.values()
        ]
        share = sum(found for _, _, found in seen) / max(1, sum(int(row.loss_mask.sum()) for row, _, _ in seen))
        if seen and share < self.settings.min_share:
            row, translation, _ = min(seen, key=lambda one: one[2] / max(1, one[0].length))
            teacher = next(name for name, one in row.translations.items() if one is translation)
            raise IncompatibleTeacherError(
                f"only {share:.0%} of the update's tokens have a counterpart among those of teacher {teacher!r}, less "
                f"than min_share {self.settings.min_share:g} of objective {self.settings.name}: of {row.text[:80]!r}, "
                f"{int((~translation.aligned).sum())} of {row.length} tokens have none. Use another teacher, or lower "
                "min_share."
            )

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """Reverse KL per position, nats: that of a span, in equal parts at its tokens."""
        s = self.settings
        signal, scores = batch.signal(PayloadKind.SAMPLED), have(batch.student.scores, "scores")
        every = torch.arange(len(batch.mask), device=batch.mask.device)
        span = every if signal.span is None else signal.span
        result = maths.span_reverse_kl(
            scores,
            span,
            have(signal.sampled, "sampled log-probs"),
            mask=batch.mask,
            **weighted(batch, s.importance_cap),
        )
        loss = result.per_token
        if s.discount:
            ratio = maths.sum_over_spans(scores.sampled.detach() - have(signal.sampled, "sampled log-probs"), span)
            # At the first token of a span, so that a span is later than its own tokens to none of them.
            ratio = torch.where(span == every, ratio, torch.zeros_like(ratio))
            loss = loss + future_surrogate(batch, s.discount, length_normalised=s.length_normalised, ratio=ratio)
        return TermOutput(loss, None, divergence_metrics("reverse_kl", result, batch) | _metrics(batch, span))


def _metrics(batch: TokenBatch, span: Tensor) -> Metrics:
    """How much of the rows has a signal, and how large the spans are."""
    aligned = batch.mask & (span >= 0)
    found: Metrics = {"span_tokens": (aligned.sum(), batch.mask.sum())}
    rows = [(row, one) for row in batch.rows for one in row.translations.values()]
    if rows:
        sizes = [(one.sizes[one.aligned & row.loss_mask].sum(), one.sizes[row.loss_mask].sum()) for row, one in rows]
        spans = sum(len(np.unique(one.span[one.aligned])) for _, one in rows)
        found |= {
            "span_bytes": (float(sum(top for top, _ in sizes)), float(sum(bottom for _, bottom in sizes))),
            "spans_per_row": (float(spans), float(len(rows))),
            "student_tokens_per_span": (float(sum(one.aligned.sum() for _, one in rows)), float(spans)),
            "teacher_tokens_per_span": (float(sum((one.of >= 0).sum() for _, one in rows)), float(spans)),
        }
    return found
