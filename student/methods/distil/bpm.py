"""Byte-prefix marginalisation (objective "bpm"): a whole next-token distribution from a teacher with any tokenizer.

Where a token of the student and one of the teacher begin at the same byte, both models have read the same text. There
the probability of each of the teacher's k likeliest tokens goes to the student's longest token with which its bytes
begin,

    T'(v) = sum of T(u) over u whose longest prefix in the student's vocabulary is v

and all that goes to none, or lies outside the k, is one bucket. Minimises a divergence between T' and the student on
these ids and the bucket; at other positions there is no loss. With one tokenizer this is objective opd with payload
topk, for divergences that do not estimate from the sampled token.

It is an approximation: where the student would write a text with a longer token than the teacher, as "ab" for "a" and
then "b", the teacher's probability of "a" goes to the student's "a".

Source: arXiv 2607.22334.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field, model_validator

from opd import maths
from opd.errors import ConfigError
from opd.wire.types import PayloadKind, PayloadSpec
from student.data.needs import SCORES_AT_TEACHER, TEACHER, Needs, SignalNeed
from student.data.token_batch import TokenBatch, have
from student.methods.distil.output import divergence_metrics
from student.plugin.terms import Term, TermOutput, TermSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from torch import Tensor

    from opd.maths import TokenScores

_NOTHING = -80.0
"""Log-prob on both sides of an id that stands in an unused place: as good as no probability."""


class BpmSettings(TermSettings):
    """Settings of byte-prefix marginalisation."""

    k: int = Field(64, ge=1, le=4096, description="Number of the teacher's likeliest tokens per position.")
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = Field(
        "forward_kl",
        description="Divergence to minimise. reverse_kl is KL(student || teacher), forward_kl is KL(teacher || "
        "student).",
    )
    mixture: float | None = Field(None, gt=0, lt=1, description="Weight beta of jsd, which needs it.")
    teacher_temperature: float | None = Field(
        None, ge=0.01, le=100, description="Temperature of the teacher's distribution; null means rollout.temperature."
    )

    @model_validator(mode="after")
    def _check(self) -> BpmSettings:
        if (self.divergence == "jsd") != (self.mixture is not None):
            rule = "needs a mixture" if self.divergence == "jsd" else "takes no mixture"
            raise ValueError(f"divergence {self.divergence} {rule}, but mixture is {self.mixture}")
        return self


class BytePrefixMarginalisation(Term[BpmSettings]):
    """Distillation from a teacher with any tokenizer, its likely tokens put onto the student's by their bytes (BPM)."""

    @property
    def traits(self) -> Traits:
        name = self.settings.divergence
        shown = {name: "KL" if name == "reverse_kl" else name.replace("_kl", " KL"), "bpm_positions": "positions"}
        return Traits(shown=shown, sums_teachers=True, learns_from_given_rows=True, learns_from_stale_rows=True)

    def needs(self) -> Needs:
        """The teacher's likeliest tokens, and the student's log-probs at the ids that they are put onto."""
        s = self.settings
        need = SignalNeed(TEACHER, PayloadSpec.topk(s.k), s.teacher_temperature, spans=True)
        return Needs(signals=(need,), student=frozenset({SCORES_AT_TEACHER}))

    def bind(self, tokenizer: Any) -> None:
        """Refuse more ids than the student has.

        Raises:
            ConfigError: if k is larger than its vocabulary.
        """
        if self.settings.k > len(tokenizer):
            raise ConfigError(f"bpm's k is {self.settings.k}, but the student has {len(tokenizer)} tokens; lower it.")

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """Divergence per position, nats; 0 where no token of the teacher begins."""
        s, signal = self.settings, batch.signal(PayloadKind.TOPK)
        values = have(signal.values, "log-probs")
        unused = values.isneginf()
        known = batch.mask & ~unused.all(-1)
        result = maths.topk_divergence(
            _joined(have(batch.student.scores_at_teacher, "scores_at_teacher"), unused),
            have(signal.ids, "ids"),
            torch.where(unused, _NOTHING, values),
            signal.log_tail,
            kind=s.divergence,
            weight=s.mixture,
            mask=known,
        )
        metrics = divergence_metrics(s.divergence, result, batch, known)
        return TermOutput(result.per_token, None, metrics | {"bpm_positions": (known.sum(), batch.mask.sum())})


def _joined(student: TokenScores, unused: Tensor) -> TokenScores:
    """The student's scores with the probability of unused places in the tail, as the teacher's is."""
    moved = torch.where(unused, student.candidates, _NOTHING).logsumexp(-1)
    tail = torch.where(unused.any(-1), torch.logaddexp(student.log_tail, moved), student.log_tail)
    return replace(student, candidates=torch.where(unused, _NOTHING, student.candidates), log_tail=tail)
