"""G-OPD and ExOPD: distil towards T^lambda R^(1 - lambda), which for lambda above 1 goes beyond the teacher.

On-policy distillation is reinforcement learning with the token reward log T - log R and a KL penalty to R, both of
weight one, for any reference R. G-OPD scales the reward by lambda:

    maximise  lambda E_S[log T - log R] - KL(S || R)   =   -KL(S || T) + (lambda - 1) E_S[log T - log R]

lambda = 0 copies R; values between 0 and 1 interpolate (a dial for the length of answers); 1 is plain distillation and
needs no reference; 1.25 is ExOPD. R is `teachers.reference`: the student's initial weights, or the teacher's base model
before its reinforcement learning ("reward correction"). Domains route to their own teachers and may have their own
lambda.

    sampled   the paper's form: policy gradient on log S(y) - log T(y) - (lambda - 1) (log T(y) - log R(y))
    gather    exact on the student's top k, sampled on the tail; the gradient is unbiased, the value lacks the tail's
              share of log Z (`opd.maths.reference`)
    hidden    exact over the vocabulary, normalised

Published settings: payload sampled, reward_scale 1.25, importance_cap 5. Source: arXiv 2602.12125 and its code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import TypeVar

from opd import maths
from opd.wire.types import PayloadKind, PayloadSpec
from student.data.needs import HIDDEN, REFERENCE, SCORES, TEACHER, Needs, SignalNeed
from student.data.token_batch import TokenBatch, have
from student.methods.distil.given_rows import untied_tokens
from student.methods.distil.opd import tempered
from student.methods.distil.output import divergence_metrics, weighted
from student.methods.distil.token_set import token_ids
from student.methods.jumps.extrapolation import Extrapolation, Guards
from student.plugin.terms import Term, TermOutput, TermSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opd.maths import Divergence
    from student.data.row import Row


class GeneralisedOpdSettings(TermSettings):
    """Settings of G-OPD."""

    payload: Literal["sampled", "gather", "hidden"] = Field(
        "gather",
        description="What teacher and reference send: the sampled token's log-prob, log-probs at the student's top k "
        "(gather), or hidden states.",
    )
    k: int = Field(64, ge=1, le=4096, description="Number k of ids per position with payload gather.")
    reward_scale: float = Field(
        1.0, ge=0, le=10, description="lambda, the scale of the reward; 1 is plain distillation, 1.25 is ExOPD."
    )
    final_reward_scale: float | None = Field(
        None, ge=0, le=10, description="Value that lambda reaches linearly over scale_steps; null keeps reward_scale."
    )
    scale_steps: int = Field(100, ge=1, description="Number of steps until final_reward_scale is reached.")
    domain_reward_scale: dict[str, float] = Field(
        default_factory=dict,
        description="Mapping from a prompt's domain to its own lambda, which replaces reward_scale and "
        "final_reward_scale.",
    )
    guards: Guards = Field(default_factory=Guards, description="Bounds on the extrapolation when lambda is above 1.")
    teacher_temperature: float | None = Field(
        None, ge=0.01, le=100, description="Temperature of teacher and reference; null means rollout.temperature."
    )
    importance_cap: float | None = Field(
        None,
        gt=0,
        description="Weight what is estimated from the sampled token with min(p / behaviour, cap), as rows of "
        "older weights need. null does not weight; the paper's code has 5.",
    )

    @model_validator(mode="after")
    def _check(self) -> GeneralisedOpdSettings:
        negative = [domain for domain, scale in self.domain_reward_scale.items() if not scale >= 0]
        if negative:
            raise ValueError(f"domain_reward_scale of {negative[0]!r} is below 0; set it to 0 or more")
        if self.payload == "hidden" and self.importance_cap is not None:
            raise ValueError("importance_cap weights sampled tokens, which payload hidden does not use; remove it")
        if self.payload == "hidden" and self.guards.active:
            raise ValueError(
                "guards need log-probs of single tokens, which payload hidden does not compute; use payload gather"
            )
        if self.payload == "sampled" and self.guards.flip_cap is not None:
            raise ValueError(
                "guards.flip_cap compares candidates, which payload sampled does not have; use payload gather"
            )
        return self

    @property
    def needs_no_reference(self) -> bool:
        """Whether lambda is 1 for all domains and steps, so that no reference is needed."""
        # `or` treats a final lambda of 0 like None; the second half of the condition catches that case.
        scales = {self.reward_scale, self.final_reward_scale or self.reward_scale, *self.domain_reward_scale.values()}
        return scales == {1.0} and self.final_reward_scale != 0


GeneralisedOpdSettings_co = TypeVar(
    "GeneralisedOpdSettings_co", bound=GeneralisedOpdSettings, covariant=True, default=GeneralisedOpdSettings
)


class GeneralisedOpd(Term[GeneralisedOpdSettings_co]):
    """Distillation whose teacher reward, relative to a reference, is scaled by lambda."""

    @property
    def traits(self) -> Traits:
        s = self.settings
        why = f"with payload {s.payload} it is estimated from the sampled token; set importance_cap (5)"
        return Traits(
            shown={"reverse_kl_to_target": "KL to target"},
            sums_teachers=True,
            learns_from_given_rows=s.payload != "sampled",
            learns_from_stale_rows=s.payload == "hidden" or s.importance_cap is not None,
            why={"learns_from_stale_rows": why},
        )

    def __init__(self, settings: GeneralisedOpdSettings_co) -> None:
        super().__init__(settings)
        self._plain_ids: frozenset[int] = frozenset()

    def needs(self) -> Needs:
        """One payload from the teacher and, unless lambda is always 1, the same from the reference."""
        s = self.settings
        spec = PayloadSpec.named(s.payload, s.k)
        roles = (TEACHER,) if s.needs_no_reference else (TEACHER, REFERENCE)
        return Needs(
            signals=tuple(SignalNeed(role, spec, s.teacher_temperature) for role in roles),
            student=frozenset({HIDDEN if s.payload == "hidden" else SCORES}),
        )

    def bind(self, tokenizer: Any) -> None:
        """Look up the ids of the tokens that keep lambda = 1."""
        if self.settings.guards.plain_tokens is not None:
            self._plain_ids = token_ids(self.settings.guards.plain_tokens, tokenizer)

    def reward_scale(self, row: Row) -> float:
        """The lambda of a row: that of its domain, or else that of its step."""
        s = self.settings
        if row.prompt.domain in s.domain_reward_scale:
            return s.domain_reward_scale[row.prompt.domain]
        if s.final_reward_scale is None:
            return s.reward_scale
        done = min(1.0, max(0, row.key.step) / s.scale_steps)
        return s.reward_scale + done * (s.final_reward_scale - s.reward_scale)

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """Reverse KL to the target per position, nats; for sampled and gather up to the target's normaliser."""
        scales = [self.reward_scale(row) for row in batch.rows]
        if self.settings.payload == "hidden":
            return self._exact(batch, scales)
        extrapolation = Extrapolation(self.settings.guards, self._plain_ids, batch.of_rows(scales))
        result, metrics = (self._sampled if self.settings.payload == "sampled" else self._gather)(batch, extrapolation)
        metrics |= divergence_metrics("reverse_kl_to_target", result, batch)
        return TermOutput(result.per_token, metrics=metrics)

    def _sampled(self, batch: TokenBatch, extrapolation: Extrapolation) -> tuple[Divergence, dict[str, Any]]:
        teacher = have(batch.signal(PayloadKind.SAMPLED).sampled, "sampled log-probs")
        target = teacher
        metrics: dict[str, Any] = {}
        if not self.settings.needs_no_reference:
            reference = have(batch.signal(PayloadKind.SAMPLED, REFERENCE).sampled, "reference's log-probs")
            target = extrapolation.target(teacher, reference, batch.token_ids)
            metrics = extrapolation.metrics(teacher, reference, batch.mask)
        result = maths.sampled_reverse_kl(
            have(batch.student.scores, "scores"),
            batch.token_ids,
            target,
            mask=batch.mask,
            **weighted(batch, self.settings.importance_cap),
        )
        return result, metrics

    def _gather(self, batch: TokenBatch, extrapolation: Extrapolation) -> tuple[Divergence, dict[str, Any]]:
        teacher, ids = batch.signal(PayloadKind.GATHER), have(batch.candidates, "candidates")
        parts: tuple[Any, ...] = (teacher.values, teacher.sampled, teacher.log_tail)
        metrics: dict[str, Any] = {}
        if not self.settings.needs_no_reference:
            reference = batch.signal(PayloadKind.GATHER, REFERENCE)
            parts, metrics = extrapolation.payload(batch, teacher, reference)
        values, sampled, log_tail = parts
        result = maths.head_tail_reverse_kl(
            have(batch.student.scores, "scores"),
            untied_tokens(batch, ids),
            ids,
            have(values, "log-probs at the candidates"),
            have(sampled, "sampled log-probs"),
            log_tail,
            mask=batch.mask,
            **weighted(batch, self.settings.importance_cap),
        )
        return result, metrics

    def _exact(self, batch: TokenBatch, scales: Sequence[float]) -> TermOutput:
        """One call per distinct lambda; they add up because each masks out the rows of the others."""
        loss = None
        metrics: dict[str, Any] = {}
        for scale in sorted(set(scales)):
            # Compared row by row in float64: two lambdas that are one in float32 would each count the other's rows too.
            mask = batch.mask & batch.of_rows([own == scale for own in scales])
            result = self._exact_at(batch, scale, mask)
            loss = result.total if loss is None else loss + result.total
            found = divergence_metrics("reverse_kl_to_target", result, batch, mask)
            for name, (top, count) in found.items():
                before = metrics.get(name, (0.0, 0.0))
                metrics[name] = (before[0] + top, before[1] + count)
        return TermOutput(total=loss, metrics=metrics)

    def _exact_at(self, batch: TokenBatch, scale: float, mask: Any) -> Divergence:
        student, teacher = have(batch.student.head, "head"), batch.signal(PayloadKind.HIDDEN)
        head = have(teacher.head, "teacher's head")
        # One temperature divides all logits of the divergence: a teacher's own is put into its head.
        factor = batch.temperature / (self.settings.teacher_temperature or batch.temperature)
        reference = None
        if scale != 1.0:
            signal = batch.signal(PayloadKind.HIDDEN, REFERENCE)
            theirs = have(signal.head, "reference's head")
            reference = maths.Reference(
                have(signal.hidden, "reference's hidden states"), tempered(theirs, factor), scale
            )
        return maths.linear_divergence(
            have(batch.student.hidden, "hidden states"),
            student,
            have(teacher.hidden, "teacher's hidden states"),
            tempered(head, factor),
            kind="reverse_kl",
            temperature=batch.temperature,
            reference=reference,
            vocab_size=batch.valid_vocab,
            mask=mask,
            token_weights=batch.weights,
        )


class ExOpd(GeneralisedOpd, defaults={"reward_scale": 1.25}):
    """G-OPD with lambda 1.25, which extrapolates beyond the teacher."""
