"""Gates: decide whether candidate weights beat the accepted ones; used by EffOPD's search.

    accuracy     mean verdict of sampled answers, strictly higher (authors' code) or at least as high (paper's prose).
                 50 prompts with one sample each have a standard error of 7 points at accuracy 1/2
    paired       the same prompts and random numbers for both; accepted if the mean difference over prompts is at least
                 `sigmas` standard errors above 0. Ours
    reverse_kl   label-free: KL(student || teacher) on answers to fixed prompts must be lower by the share `gain`, while
                 the mean length changes by at most `length_tolerance` and the truncated share rises by at most
                 `truncation_tolerance`. The two guards exclude the ways to a low KL per token without imitation:
                 stopping early and repeating. Ours

Every evaluation of a search costs prompts * samples answers, counted under cost/gate.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from opd.config import Settings

if TYPE_CHECKING:
    from student.data.report import EvalReport


class GateSettings(Settings):
    """Settings of a gate."""

    kind: Literal["accuracy", "paired", "reverse_kl"] = Field(
        "accuracy",
        description="What must improve: accuracy, the mean verdict; paired, the verdict by some standard errors on "
        "the same prompts; reverse_kl, the divergence to the teacher.",
    )
    prompts: int = Field(
        50, ge=2, description="Number of training prompts in an evaluation, the same ones throughout a run."
    )
    samples: int = Field(1, ge=1, description="Number of answers per prompt.")
    strict: bool = Field(
        True,
        description="With kind accuracy: require a higher accuracy (the authors' code) instead of an equal one (the "
        "paper).",
    )
    sigmas: float = Field(
        1.0, ge=0, description="With kind paired: number of standard errors that the gain must reach."
    )
    gain: float = Field(0.02, ge=0, lt=1, description="With kind reverse_kl: required relative decrease.")
    length_tolerance: float = Field(
        0.2, gt=0, description="With kind reverse_kl: largest accepted relative change of the mean length."
    )
    truncation_tolerance: float = Field(
        0.02,
        ge=0,
        le=1,
        description="With kind reverse_kl: largest accepted increase of the share of truncated answers.",
    )


def passes(settings: GateSettings, candidate: EvalReport, accepted: EvalReport) -> bool:
    """Whether `candidate` beats `accepted`."""
    if settings.kind == "accuracy":
        if settings.strict:
            return candidate.accuracy > accepted.accuracy
        return candidate.accuracy >= accepted.accuracy
    if settings.kind == "paired":
        return _paired(settings, candidate, accepted)
    return _reverse_kl(settings, candidate, accepted)


def _paired(settings: GateSettings, candidate: EvalReport, accepted: EvalReport) -> bool:
    pairs = zip(candidate.per_prompt, accepted.per_prompt, strict=True)
    gains = [a - b for a, b in pairs if a is not None and b is not None]
    if len(gains) < 2:
        return False
    mean = sum(gains) / len(gains)
    variance = sum((gain - mean) ** 2 for gain in gains) / (len(gains) - 1)
    return mean > 0 and mean >= settings.sigmas * math.sqrt(variance / len(gains))


def _reverse_kl(settings: GateSettings, candidate: EvalReport, accepted: EvalReport) -> bool:
    if candidate.reverse_kl is None or accepted.reverse_kl is None:
        return False
    stretch = candidate.mean_length / max(1.0, accepted.mean_length)
    # An estimate from sampled tokens may be negative, so `gain` is a share of its absolute value.
    decrease = settings.gain * abs(accepted.reverse_kl)
    return (
        candidate.reverse_kl < accepted.reverse_kl - decrease
        and 1 / (1 + settings.length_tolerance) <= stretch <= 1 + settings.length_tolerance
        and candidate.truncated <= accepted.truncated + settings.truncation_tolerance
    )
