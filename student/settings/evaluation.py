"""The settings of evaluations, `eval` in a recipe."""

from pydantic import Field

from opd.config import Settings


class EvalSettings(Settings):
    """Evaluation on held-out prompts."""

    every: int = Field(
        0, ge=0, description="Steps between evaluations; 0 evaluates only before the first step and after the last."
    )
    prompts: int = Field(256, ge=0, description="Number of held-out prompts to evaluate on; 0 turns evaluation off.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature of evaluations; 0 is greedy.")
    samples: int = Field(
        1,
        ge=1,
        description="Number n of responses per prompt. Above 1, pass@k is estimated without bias for k up to n.",
    )
    reverse_kl: bool = Field(True, description="Also measure the reverse KL, KL(student || teacher), on the responses.")
    mode_slack: float = Field(
        1.0,
        ge=1,
        description="How long an answer in a mode may become, in multiples of the mode's budget; above 1 it shows how "
        "far the student would go. Answers over the budget count as wrong in any case.",
    )
    leakage: int = Field(
        0,
        ge=0,
        description="Number of problems whose answers in every mode are scored by the teachers of all modes, which "
        "shows how far modes leak into each other; 0 turns this off.",
    )


class SampleSettings(Settings):
    """Which answers are written to samples.jsonl in the run folder."""

    every: int = Field(
        10,
        ge=0,
        description="Steps between those whose answers are kept; 0 keeps only the answers of evaluations, which are "
        "always kept.",
    )
    count: int = Field(8, ge=0, description="Number of answers kept per such step or evaluation; 0 keeps none.")
