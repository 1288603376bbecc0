"""A penalty for moving away from a reference: KL(student || reference) on the student's samples.

The reference is `teachers.reference`, usually the student's initial weights. It counters length inflation and
truncation collapse in distillation (StableOPD, arXiv 2604.08527), and is the KL term of GRPO (arXiv 2402.03300).

    sampled   policy gradient on log S(y) - log R(y): unbiased; or `form` k3_loss, as GRPO's code differentiates it,
              whose expected gradient is that of the forward KL(R || S)
    gather    exact on the student's top k, sampled on the tail
    hidden    exact

Both sides use the temperature of the rollouts, so a student equal to its reference has no penalty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from opd import maths
from opd.wire.types import PayloadKind, PayloadSpec
from student.data.needs import HIDDEN, REFERENCE, SCORES, Needs, SignalNeed
from student.data.token_batch import TokenBatch, have
from student.methods.distil.given_rows import untied_tokens
from student.methods.distil.output import weighted
from student.plugin.terms import Term, TermOutput, TermSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from opd.maths import Divergence
    from student.methods.distil.output import Metrics


class ReferenceKlSettings(TermSettings):
    """Settings of the penalty; its strength is `weight`."""

    rows: Literal["all", "sampled", "expert"] = "sampled"
    payload: Literal["sampled", "gather", "hidden"] = Field(
        "sampled",
        description="What the reference sends: the sampled token's log-prob, log-probs at the student's top k "
        "(gather), or hidden states.",
    )
    k: int = Field(64, ge=1, le=4096, description="Number k of ids per position with payload gather.")
    form: Literal["policy_gradient", "k2", "k3_loss"] = Field(
        "policy_gradient",
        description="Estimator with payload sampled. policy_gradient and k2 have the gradient of KL(student || "
        "reference); k3_loss reproduces GRPO's code, whose gradient is that of KL(reference || student).",
    )
    importance_cap: float | None = Field(
        None,
        gt=0,
        description="Weight what is estimated from the sampled token with min(p / behaviour, cap), as rows of older "
        "weights need: in later updates of a step, or under train.max_staleness. null does not weight. Payload hidden "
        "does not need it.",
    )

    @model_validator(mode="after")
    def _check(self) -> ReferenceKlSettings:
        if self.payload != "sampled" and self.form != "policy_gradient":
            raise ValueError(f"form {self.form} needs payload sampled, not {self.payload}; remove it")
        if self.payload == "sampled" and self.rows != "sampled":
            raise ValueError(f"payload sampled needs rows: sampled, but rows is {self.rows}; use payload gather")
        if self.payload == "hidden" and self.importance_cap is not None:
            raise ValueError("importance_cap weights sampled tokens, which payload hidden does not use; remove it")
        return self


class ReferenceKl(Term[ReferenceKlSettings]):
    """A KL penalty for moving away from a reference model."""

    @property
    def traits(self) -> Traits:
        s = self.settings
        why = (
            f"with payload {s.payload} it is estimated from the sampled token; set importance_cap (2, for example), or "
            "use payload hidden"
        )
        exact = s.payload == "hidden" or s.importance_cap is not None
        shown = {"reference_kl": "reference KL"}
        return Traits(shown=shown, learns_from_stale_rows=exact, why={"learns_from_stale_rows": why})

    def needs(self) -> Needs:
        """One payload from the reference."""
        s = self.settings
        spec = PayloadSpec.named(s.payload, s.k)
        view = HIDDEN if s.payload == "hidden" else SCORES
        return Needs(signals=(SignalNeed(REFERENCE, spec),), student=frozenset({view}))

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """KL to the reference per position, nats; metric reference_kl."""
        if self.settings.payload == "hidden":
            return self._exact(batch)
        scores, signal = (
            have(batch.student.scores, "scores"),
            batch.signal(PayloadKind(self.settings.payload), REFERENCE),
        )
        sampled = have(signal.sampled, "reference's sampled log-probs")
        weight = weighted(batch, self.settings.importance_cap)
        if self.settings.payload == "sampled":
            form = self.settings.form
            result = maths.sampled_reverse_kl(
                scores,
                batch.token_ids,
                sampled,
                form=form,
                mask=batch.mask,
                acknowledge_bias=form == "k3_loss",
                **weight,
            )
        else:
            ids = have(batch.candidates, "candidates")
            values = have(signal.values, "reference's log-probs")
            result = maths.head_tail_reverse_kl(
                scores, untied_tokens(batch, ids), ids, values, sampled, signal.log_tail, mask=batch.mask, **weight
            )
        return TermOutput(result.per_token, metrics=self._metrics(result))

    def _exact(self, batch: TokenBatch) -> TermOutput:
        student, signal = have(batch.student.head, "head"), batch.signal(PayloadKind.HIDDEN, REFERENCE)
        reference = have(signal.head, "reference's head")
        result = maths.linear_divergence(
            have(batch.student.hidden, "hidden states"),
            student,
            have(signal.hidden, "reference's hidden states"),
            reference,
            kind="reverse_kl",
            temperature=batch.temperature,
            vocab_size=batch.valid_vocab,
            mask=batch.mask,
            token_weights=batch.weights,
        )
        return TermOutput(total=result.total, metrics=self._metrics(result))

    @staticmethod
    def _metrics(result: Divergence) -> Metrics:
        return {"reference_kl": (result.per_token.detach().sum(), result.count)}
