"""Reports: what a finished step did, and what an evaluation found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from student.data.outcome import Outcome


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did: its metrics by name, and the outcomes of its rows.

    Attributes:
        step: index of the step, counted from 0.
        metrics: metrics by name, reduced over micro-batches and ranks.
        outcomes: outcomes of the batch's rows on all ranks; the same if the run was resumed after the update.
    """

    step: int
    metrics: Mapping[str, float]
    outcomes: Sequence[Outcome]


@dataclass(frozen=True, slots=True)
class EvalReport:
    """An evaluation on prompts with a verifier.

    Attributes:
        accuracy: mean verdict over prompts with a known verdict, 0 to 1.
        per_prompt: mean verdict of each prompt; None if unknown.
        mean_length: mean tokens per response.
        truncated: fraction of responses that hit the length limit.
        reverse_kl: KL(student || teacher), nats per token; None if it was not measured.
        tokens: response tokens sampled.
        by_domain: accuracy and number of judged prompts of each domain that prompts name.
        judged: number of prompts with a known verdict, which `accuracy` is the mean over.
        accuracy_half_width: half the 95 % interval of `accuracy` over prompts; None below two judged prompts.
        pass_at: k -> (pass@k, half its interval), over prompts with at least k judged answers; values in between do
            not count as correct. Empty for single answers.
        bytes_per_token: bytes of the text of the answers on which `reverse_kl` was measured, per token.
        reverse_kl_estimator: how `reverse_kl` was measured; "" if it was not.
        repetition: share of 4-grams that occur earlier in their response, mean over responses.
        modes: figures of modes by name, see `student.data.mode_figures`; empty for a run without modes.
        samples: answers to the first prompts, from `student.report.samples.sample_of`, if they were asked for.
    """

    accuracy: float
    per_prompt: tuple[float | None, ...]
    mean_length: float
    truncated: float
    reverse_kl: float | None
    tokens: int
    by_domain: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    judged: int = 0
    accuracy_half_width: float | None = None
    pass_at: Mapping[int, tuple[float, float | None]] = field(default_factory=dict)
    bytes_per_token: float | None = None
    reverse_kl_estimator: str = ""
    repetition: float = 0.0
    modes: Mapping[str, float] = field(default_factory=dict)
    samples: Sequence[Mapping[str, Any]] = ()

    @property
    def reverse_kl_per_byte(self) -> float | None:
        """The reverse KL in nats per byte of text, which compares between tokenizers; None if it was not measured."""
        return self.reverse_kl / self.bytes_per_token if self.reverse_kl is not None and self.bytes_per_token else None
