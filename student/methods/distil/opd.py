"""On-policy distillation: a divergence between student and teacher on the student's own samples.

With y ~ S = pi_theta and prefixes s_t = (x, y_<t) held fixed ("discount 0"):

    L = sum_t D( S(.|s_t), T(.|s_t) ),      D = KL(S || T) by default

The payload decides how much of T is known, and so how D is computed. For the reverse KL, every payload gives its
gradient in expectation, given the prefix. Over whole responses the estimates stay unbiased with aggregation constant;
means divide by lengths, which depend on the sampled tokens, and this biases sampled most, gather and topk less, and
hidden not at all (docs/estimators.md):

    sampled   policy gradient on log S(y_t) - log T(y_t)              4 bytes per token, the highest variance
    gather    exact on the student's top k, sampled on the tail       default: about a tenth of that variance
    topk      the same on the teacher's top k
    hidden    exact over the vocabulary, from hidden states and the teacher's head

Divergences other than the reverse KL sum over the k ids and one bucket for the tail with gather and topk, and over the
vocabulary with hidden.

The teacher is the model that the prompt's route names or, by the setting `role`, a model in this process: ema (the
moving average of the student's weights), initial (its first weights) or student (the student itself, reading the row
under another context, contexts.student).

On rows that the student did not sample (origin expert), the response token is not a sample from S. There gather and
topk sum their k ids and give every token of the tail the mean log-ratio that follows from both models' tail masses
(`given_rows`), hidden is exact, and sampled is refused. With method expert_rows this is GKD's mixture of on-policy and
fixed data: a share 1 - lambda of the rows is given.

Sources: MiniLLM (arXiv 2306.08543), GKD (2306.13649), Qwen3 report (2505.09388).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import TypeVar

from opd import maths
from opd.errors import ConfigError
from opd.wire.types import PayloadKind, PayloadSpec
from student.data.needs import EMA, HIDDEN, INITIAL, SCORES, SCORES_AT_TEACHER, STUDENT, Needs, SignalNeed
from student.data.token_batch import TokenBatch, have
from student.methods.distil.given_rows import untied_tokens
from student.methods.distil.output import divergence_metrics, weighted
from student.methods.distil.return_to_go import future_surrogate
from student.plugin.terms import Term, TermOutput, TermSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opd.heads import OutputHead
    from opd.maths import Divergence
    from student.methods.distil.output import Metrics
    from student.settings.recipe import Recipe

DivergenceName = Literal["reverse_kl", "forward_kl", "jsd", "skew_forward_kl", "skew_reverse_kl"]


class OpdSettings(TermSettings):
    """Settings of on-policy distillation."""

    role: Literal["teacher", "student", "initial", "ema"] = Field(
        "teacher",
        description="The model that teaches. teacher: the one that the prompt is routed to; student, initial, ema: "
        "the student's current weights, its first ones or their moving average, which are in this process and need no "
        "route.",
    )
    payload: Literal["sampled", "gather", "topk", "hidden"] = Field(
        "gather", description="What the teacher sends; the table in docs/estimators.md compares them."
    )
    k: int = Field(64, ge=1, le=4096, description="Number k of ids per position with payload gather or topk.")
    divergence: DivergenceName = Field(
        "reverse_kl",
        description="Divergence to minimise. reverse_kl is KL(student || teacher), forward_kl is KL(teacher || "
        "student).",
    )
    mixture: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Weight beta of jsd, or alpha of the skewed divergences, which need it; the KLs do not take it.",
    )
    teacher_temperature: float | None = Field(
        None,
        ge=0.01,
        le=100,
        description="Temperature of the teacher's distribution; null means that of the student's.",
    )
    student_temperature: float | None = Field(
        None,
        ge=0.01,
        le=100,
        description="Temperature of the student's distribution in the divergence; null means rollout.temperature. "
        "Only payload hidden can use another one, because the others estimate from tokens sampled at "
        "rollout.temperature.",
    )
    discount: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Also credit a token with the log-ratios of later tokens, discounted by this factor per position "
        "(MiniLLM has 1). 0 is on-policy distillation as its papers run it; other values need divergence reverse_kl.",
    )
    length_normalised: bool = Field(
        False, description="With discount: divide the return-to-go by the number of later tokens, as MiniLLM does."
    )
    importance_cap: float | None = Field(
        None,
        gt=0,
        description="Weight what is estimated from the sampled token with min(p / behaviour, cap), as rows of "
        "older weights need; null does not weight.",
    )

    watch_topk: int | None = Field(
        None,
        ge=1,
        description="Report overlap and probability mass of the k most likely ids of both models as metrics. Only for "
        "payload hidden (topk and gather always report them), where it slows the divergence down.",
    )

    @model_validator(mode="after")
    def _check(self) -> OpdSettings:
        if self.watch_topk is not None and self.payload != "hidden":
            raise ValueError(f"watch_topk needs payload hidden, but payload is {self.payload}; remove it")
        if self.payload == "sampled" and self.divergence != "reverse_kl":
            raise ValueError(
                f"payload sampled estimates reverse_kl only, not {self.divergence}; use payload topk, gather or hidden"
            )
        mixed = self.divergence in ("jsd", "skew_forward_kl", "skew_reverse_kl")
        if mixed != (self.mixture is not None):
            rule = "needs a mixture" if mixed else "takes no mixture"
            raise ValueError(f"divergence {self.divergence} {rule}, but mixture is {self.mixture}")
        if self.student_temperature is not None and self.payload != "hidden":
            raise ValueError(
                f"student_temperature needs payload hidden, but payload is {self.payload}; change rollout.temperature "
                "instead"
            )
        if self.discount and self.divergence != "reverse_kl":
            raise ValueError(f"discount needs divergence reverse_kl, not {self.divergence}; set it to 0")
        if self.importance_cap is not None and (self.payload == "hidden" or self.divergence != "reverse_kl"):
            raise ValueError(
                f"importance_cap weights what is estimated from the sampled token, but payload {self.payload} with "
                f"divergence {self.divergence} does not use it; remove importance_cap"
            )
        if self.discount and self.importance_cap is not None:
            raise ValueError(
                f"importance_cap weights single tokens, not the returns of discount {self.discount:g}; set only one "
                "of them"
            )
        return self


OpdSettings_co = TypeVar("OpdSettings_co", bound=OpdSettings, covariant=True, default=OpdSettings)


class OnPolicyDistillation(Term[OpdSettings_co]):
    """On-policy distillation: a divergence to the teacher on the student's own samples."""

    @property
    def traits(self) -> Traits:
        s = self.settings
        # A sum over ids holds for any policy that sampled; an estimate from the sampled token needs a weight.
        why = (
            f"with payload {s.payload} it estimates the reverse KL from the sampled token; set importance_cap (2, for "
            "example), or use payload hidden or another divergence"
        )
        if s.payload == "hidden" or s.divergence != "reverse_kl" or s.importance_cap is not None:
            why = ""
        if s.discount:
            why = "with discount it sums log-ratios over later tokens, which no weight corrects; set discount: 0"
        name = s.divergence
        return Traits(
            shown={name: "KL" if name == "reverse_kl" else name.replace("_kl", " KL").replace("_", " ")},
            sums_teachers=True,
            learns_from_given_rows=s.payload != "sampled",
            learns_from_stale_rows=not why,
            why={"learns_from_stale_rows": why},
        )

    def needs(self) -> Needs:
        """One payload from the teacher, and the matching view of the student's distribution."""
        s = self.settings
        spec = PayloadSpec.named(s.payload, s.k)
        view = {"topk": SCORES_AT_TEACHER, "hidden": HIDDEN}.get(s.payload, SCORES)
        signals, views = [SignalNeed(s.role, spec, s.teacher_temperature, s.student_temperature)], {view}
        if s.discount:
            views.add(SCORES)
            if s.payload == "hidden":
                signals.append(SignalNeed(s.role, PayloadSpec.sampled(), s.teacher_temperature))
        # Candidates are kept for the metric topk_overlap; they cost no request.
        candidates = s.k if s.payload == "topk" else 0
        return Needs(signals=tuple(signals), candidates=candidates, student=frozenset(views))

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse role student without a context of its own: under the student's prompt, it would teach nothing.

        Raises:
            ConfigError: for role student without contexts.student.
        """
        if self.settings.role == STUDENT and STUDENT not in recipe.contexts:
            raise ConfigError(
                f"term {self.settings.name!r} has the student as its own teacher, which teaches nothing under the "
                "same prompt; give it another prompt in contexts.student, or set role to ema or initial."
            )

    def remarks(self, recipe: Recipe, terms: Sequence[Term]) -> list[str]:
        """Also warn if the only teacher is the student's own starting point, under the same prompt."""
        s, found = self.settings, super().remarks(recipe, terms)
        level = s.student_temperature or recipe.rollout.temperature
        alike = s.teacher_temperature in (None, level)
        if s.role in (EMA, INITIAL) and s.role not in recipe.contexts and alike and len(recipe.objective) == 1:
            found.append(
                f"the teacher of term {s.name!r} equals the student at the start (role {s.role}), and no other term "
                f"changes the student; give the teacher another prompt in contexts.{s.role}, or add a term"
            )
        return found

    def bind(self, tokenizer: Any) -> None:
        """Refuse a watch_topk that is larger than the vocabulary.

        Raises:
            ConfigError: if it is.
        """
        watched = self.settings.watch_topk
        if watched is not None and watched > len(tokenizer):
            raise ConfigError(f"watch_topk is {watched}, but the tokenizer has {len(tokenizer)} ids; lower it.")

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """Divergence per position, nats, reported under the name of the divergence."""
        result = {"sampled": self._sampled, "gather": self._partial, "topk": self._partial, "hidden": self._exact}[
            self.settings.payload
        ](batch)
        metrics = divergence_metrics(self.settings.divergence, result, batch)
        metrics |= self._overlap(batch)
        exact = self.settings.payload == "hidden"
        # `linear_divergence` computes its gradient in the forward pass, with the weights that it is given.
        loss, total = (None, result.total) if exact else (result.per_token, None)
        if self.settings.discount:
            s = self.settings
            future = future_surrogate(batch, s.discount, length_normalised=s.length_normalised, role=s.role)
            loss = None if loss is None else loss + future
            total = None if total is None else total + (future * batch.weights).sum()
        return TermOutput(loss, total, metrics)

    def _overlap(self, batch: TokenBatch) -> Metrics:
        """Share of the student's k most likely ids at rollout that are among the teacher's top k."""
        if self.settings.payload != "topk" or batch.candidates is None:
            return {}
        k = self.settings.k
        teacher_ids = have(batch.signal(PayloadKind.TOPK, self.settings.role).ids, "ids")[:, :k]
        shared = maths.topk_overlap(batch.candidates[:, :k], teacher_ids)
        return {"topk_overlap": ((shared * batch.mask).sum(), batch.mask.sum())}

    def _sampled(self, batch: TokenBatch) -> Divergence:
        return maths.sampled_reverse_kl(
            have(batch.student.scores, "scores"),
            batch.token_ids,
            have(batch.signal(PayloadKind.SAMPLED, self.settings.role).sampled, "sampled log-probs"),
            mask=batch.mask,
            **weighted(batch, self.settings.importance_cap),
        )

    def _partial(self, batch: TokenBatch) -> Divergence:
        kind = PayloadKind(self.settings.payload)
        signal = batch.signal(kind, self.settings.role)
        # Compare at the ids for which the teacher sent log-probs: the student's candidates, or the teacher's top k.
        gather = kind is PayloadKind.GATHER
        ids = have(batch.candidates if gather else signal.ids, "candidates")
        scores = have(batch.student.scores if gather else batch.student.scores_at_teacher, "scores")
        values = have(signal.values, "log-probs at the candidates")
        if self.settings.divergence == "reverse_kl":
            return maths.head_tail_reverse_kl(
                scores,
                untied_tokens(batch, ids),
                ids,
                values,
                have(signal.sampled, "sampled log-probs"),
                signal.log_tail,
                mask=batch.mask,
                **weighted(batch, self.settings.importance_cap),
            )
        return maths.topk_divergence(
            scores,
            ids,
            values,
            signal.log_tail,
            kind=self.settings.divergence,
            weight=self.settings.mixture,
            mask=batch.mask,
        )

    def _exact(self, batch: TokenBatch) -> Divergence:
        signal = batch.signal(PayloadKind.HIDDEN, self.settings.role)
        student, teacher = have(batch.student.head, "head"), have(signal.head, "teacher's head")
        temperature = self.settings.student_temperature or batch.temperature
        return maths.linear_divergence(
            have(batch.student.hidden, "hidden states"),
            student,
            have(signal.hidden, "teacher's hidden states"),
            tempered(teacher, temperature / (self.settings.teacher_temperature or temperature)),
            kind=self.settings.divergence,
            weight=self.settings.mixture,
            temperature=temperature,
            vocab_size=batch.valid_vocab,
            mask=batch.mask,
            token_weights=batch.weights,
            topk=self.settings.watch_topk,
        )


def tempered(head: OutputHead, factor: float) -> OutputHead:
    """A teacher's head with its logits multiplied by `factor`, the student's temperature over the teacher's.

    Raises:
        ConfigError: for a head with a soft-cap unless `factor` is 1: capped logits cannot be scaled through the head.
    """
    if factor != 1.0 and head.soft_cap:
        raise ConfigError(
            "a soft-capped teacher head cannot have a temperature of its own with payload hidden; set "
            "teacher_temperature to rollout.temperature or use payload gather."
        )
    return head.times(factor)
