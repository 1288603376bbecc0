"""The report of an evaluation, made from verified answers, and the protocol of the measures of reverse KL.

`student.job.evaluator` samples, verifies and scores the answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from opd.tasks.verdict import VerdictStatus
from student.data.figures import half_width, ks_up_to, pass_at_k, repetition
from student.data.needs import Needs
from student.data.report import EvalReport
from student.data.row import Row
from student.data.token_batch import TokenBatch
from student.learning.learner import Learner


class EvalMeasure(Protocol):
    """Measures KL(student || teacher) on scored answers; `student.job.plugins.build_measure` chooses an implementation.

    Attributes:
        estimator: short description of the estimator, for reports.
    """

    estimator: str

    def needs(self) -> Needs:
        """What the measure needs from the models that score the answers."""

    def measure(
        self, learner: Learner, rows: Sequence[Row], *, look: Callable[[TokenBatch], object] = lambda batch: None
    ) -> tuple[float, float]:
        """Return the sum of the divergence over the trained tokens of `rows` in nats, and the number of these tokens.

        No gradient is computed. `look` is called with each micro-batch. Ranks may have different numbers of rows,
        including none.
        """


@dataclass(frozen=True, slots=True)
class Answer:
    """The facts about an answer that a report needs. They are kept small because every rank receives those of all.

    Attributes:
        place: index of its row in the plan of all ranks.
        value: value of its verdict; None if unknown.
        correct: whether the verdict is CORRECT; False if it is unknown.
        domain: domain of its prompt, if it has one.
        length: number of response tokens.
        truncated: whether the response hit the length limit.
        repetition: share of its 4-grams that occur earlier in it.
    """

    place: int
    value: float | None
    correct: bool
    domain: str | None
    length: int
    truncated: bool
    repetition: float

    @classmethod
    def of(cls, row: Row, place: int) -> "Answer":
        """The facts about a verified row."""
        verdict = row.verdict if row.verdict and row.verdict.known else None
        return cls(
            place,
            None if verdict is None else verdict.value,
            verdict is not None and verdict.status is VerdictStatus.CORRECT,
            row.prompt.domain,
            row.length,
            row.truncated,
            repetition(row.response_ids),
        )


def report(
    answers: Sequence[Answer],
    samples: int,
    reverse_kl: float | None,
    estimator: str = "",
) -> EvalReport:
    """Make the report of an evaluation.

    Args:
        answers: the answers of all ranks in the order of the plan, so that each prompt has `samples` in a row.
        samples: number of answers per prompt.
        reverse_kl: KL(student || teacher) in nats per token; None if it was not measured.
        estimator: description of how it was measured.
    """
    per_prompt: list[float | None] = []
    domains: dict[str, list[float]] = {}
    right: list[tuple[int, int]] = []
    for start in range(0, len(answers), samples):
        group = answers[start : start + samples]
        found = [answer.value for answer in group if answer.value is not None]
        per_prompt.append(sum(found) / len(found) if found else None)
        right.append((sum(answer.correct for answer in group), len(found)))
        domain = group[0].domain
        if found and domain is not None:
            domains.setdefault(domain, []).append(per_prompt[-1] or 0.0)
    # A prompt without a judged answer is left out of the means, because unknown is not wrong.
    judged = [value for value in per_prompt if value is not None]
    tokens, count = sum(answer.length for answer in answers), max(1, len(answers))
    return EvalReport(
        accuracy=sum(judged) / len(judged) if judged else float("nan"),
        per_prompt=tuple(per_prompt),
        mean_length=tokens / count,
        truncated=sum(answer.truncated for answer in answers) / count,
        reverse_kl=reverse_kl,
        tokens=tokens,
        by_domain={name: (sum(means) / len(means), len(means)) for name, means in sorted(domains.items())},
        judged=len(judged),
        accuracy_half_width=half_width(judged),
        pass_at=_pass_at(right, samples),
        reverse_kl_estimator=estimator if reverse_kl is not None else "",
        repetition=sum(answer.repetition for answer in answers) / count,
    )


def _pass_at(right: Sequence[tuple[int, int]], samples: int) -> dict[int, tuple[float, float | None]]:
    """Mean pass@k and the half-width of its 95 % interval, by k, over the prompts with at least k judged answers.

    `right` has the numbers of correct and of judged answers of each prompt.
    """
    found = {}
    for k in ks_up_to(samples) if samples > 1 else []:
        values = [pass_at_k(correct, judged, k) for correct, judged in right if judged >= k]
        if values:
            found[k] = (sum(values) / len(values), half_width(values))
    return found
