"""`opd premise`: predicts from a student and its teachers, without training, which methods can pay.

The student answers a few prompts and the teachers score the answers. Measured are:

    reverse KL and agreement   by decile of the response; agreement is the share of the student's tokens that are the
                               teacher's first choice
    preference                 probability that log T - log S per token is higher for a correct answer than for a wrong
                               one; at 0.5 the teacher cannot tell them apart, and distillation does not favour
                               correctness
    stop                       log T - log S at the student's stop token; if it is far below 0, the teacher ends its
                               turns with another token
    windows                    cosine of each prefix's gradient with that of the full response; a window method can pay
                               if a prefix reaches 0.71. The same number of random tokens has the full gradient in
                               expectation, and so a cosine of 1 but for noise (it saves no sampling): if theirs is far
                               from 1, there are too few answers to judge by

To predict ExOPD's extrapolation and EffOPD's jumps takes the teacher's weights: see `opd_lab.predict_weights`.
"""

import itertools
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opd.errors import ConfigError
from opd.wire.types import PayloadKind
from student.data.needs import TEACHER
from student.data.plan import plan_step
from student.data.row import Row
from student.job.job import Job, build_job
from student.methods.windows.admissibility import cross_fitted, published
from student.methods.windows.gradient_metric import GradientMetric
from student.methods.windows.probe import Prober, ProbeSpec
from student.scoring.verify import Verification
from student.settings.recipe import Recipe

ADMITTED = math.sqrt(0.5)
"""Least cosine at which ADWIN admits a window."""
DECILES = 10
_TOP = 8
_FOLDS = 4
_STRANGE_STOP = -5.0
_CLEAR = 0.55
"""Least preference at which the teacher is said to tell correct from wrong answers."""


@dataclass(frozen=True, slots=True)
class Window:
    """Cosines of a prefix's gradient with the full one; nan where a gradient is lost in noise.

    Attributes:
        tokens: length of the prefix.
        published: cosine by the published estimator.
        cross_fitted: cosine by cross-fitting, which noise does not bias.
        random: cross-fitted cosine of the same number of random tokens.
    """

    tokens: int
    published: float
    cross_fitted: float
    random: float

    @property
    def pays(self) -> bool:
        """Whether ADWIN would admit the prefix, by its cross-fitted cosine."""
        return self.cross_fitted >= ADMITTED

    @property
    def clear(self) -> bool:
        """Whether there are enough answers to judge by: the cosine of random tokens, truly 1, is found to be high."""
        return self.random >= ADMITTED


@dataclass(frozen=True, slots=True)
class PremiseReport:
    """The measurements; see the module.

    Attributes:
        rows: number of answers.
        accuracy: accuracy of the student's answers; nan if no verdict is known.
        length: mean tokens of an answer.
        reverse_kl: mean of log S - log T over the sampled tokens, in nats per token.
        by_decile: the same by decile of the response.
        agreement: share of tokens that are the teacher's first choice, by decile.
        preference: see the module; nan unless there are both correct and wrong answers.
        stop: mean log T - log S at the student's stop token; nan if every answer was cut.
        windows: windows by length, longest last; empty for responses too short to cut.
    """

    rows: int
    accuracy: float
    length: float
    reverse_kl: float
    by_decile: list[float] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)
    preference: float = math.nan
    stop: float = math.nan
    windows: list[Window] = field(default_factory=list)


def measure(recipe: Recipe, *, rows: int = 64) -> PremiseReport:
    """Measure on the recipe's student, teachers and training prompts.

    Args:
        recipe: the recipe; its objective and methods are ignored.
        rows: number of answers, one per prompt, at least 8.

    Raises:
        ConfigError: for fewer rows, or a recipe without teachers.
        OpdError: as `opd train` would.
    """
    if rows < 2 * _FOLDS:
        raise ConfigError(f"--rows is {rows}, too few answers to measure anything; give at least {2 * _FOLDS}.")
    if recipe.teachers is None:
        raise ConfigError("the recipe has no teachers, so there is nothing to predict; add the group teachers to it.")
    term = {"name": "opd", "payload": "topk", "k": _TOP, "aggregation": "constant"}
    recipe = recipe.model_copy(update={"objective": [term], "methods": []})
    with ExitStack() as stack:
        job = build_job(recipe, stack, poll=lambda: None)
        job.local.kept.start(job.models.local)
        settings = recipe.rollout
        prompts = job.services.training_prompts(rows, seed_names=("premise",))
        plan = plan_step(
            0, prompts, samples=1, max_new_tokens=settings.max_new_tokens, temperature=settings.temperature
        )
        found = job.services.score(job.services.rollout(plan))
        # A job without rewards does not judge training answers, but the preference needs verdicts.
        verification = Verification(job.source, settings.verify_workers)
        stack.callback(verification.close)
        verification.collect(found)
        return _report(found, _windows(job, plan, max(row.length for row in found)))


def _windows(job: Job, plan: Any, longest: int) -> list[Window]:
    """Cosines at a sixteenth, an eighth, a quarter and a half of the longest response."""
    edges = tuple(sorted({max(1, longest // part) for part in (16, 8, 4, 2)} - {longest}))
    if not edges:
        return []
    metric = GradientMetric("full", 1 << 16, 1, seed=0)
    limit = job.recipe.rollout.max_new_tokens
    spec = ProbeSpec((*edges, limit), _FOLDS, metric, null=True, background=False)
    result = Prober(job.services.workbench()).start(plan, spec).result()
    gram, null = result.grams[""], result.nulls[""]
    columns = published(gram), cross_fitted(gram), cross_fitted(null)
    return [
        Window(edge, *(float(values[i]) for values in columns))
        for i, edge in enumerate(edges)  # the full one is 1
    ]


def _report(rows: Sequence[Row], windows: list[Window]) -> PremiseReport:
    sums, hits, counts = np.zeros(DECILES), np.zeros(DECILES), np.zeros(DECILES)
    stops: list[float] = []
    likes: dict[bool, list[float]] = {True: [], False: []}
    for row in rows:
        scores = row.signals[TEACHER, PayloadKind.TOPK]
        if scores.sampled is None or scores.ids is None:
            raise ConfigError("the teachers sent no log-probs; look into the servers' logs.")
        # Only the student's own tokens of an episode: those of the environment have no log-probs.
        own = row.loss_mask
        ratio = scores.sampled[own].astype(np.float64) - row.behaviour_logp[own]
        place = (np.arange(row.length) * DECILES // max(1, row.length))[own]
        # Not sums[place] += ..., which would add only the last of a decile's tokens.
        np.add.at(sums, place, -ratio)
        np.add.at(hits, place, (row.response_ids == scores.ids[:, 0])[own])
        np.add.at(counts, place, 1.0)
        if not row.truncated:
            stops.append(float(ratio[-1]))
        if row.verdict_value is not None:
            likes[row.verdict_value >= 1.0].append(float(ratio.mean()))
    judged = len(likes[True]) + len(likes[False])
    filled = np.where(counts > 0, counts, np.nan)
    return PremiseReport(
        rows=len(rows),
        accuracy=len(likes[True]) / judged if judged else math.nan,
        length=float(np.mean([row.length for row in rows])),
        reverse_kl=float(sums.sum() / counts.sum()),
        by_decile=(sums / filled).tolist(),
        agreement=(hits / filled).tolist(),
        preference=_preference(likes[True], likes[False]),
        stop=float(np.mean(stops)) if stops else math.nan,
        windows=windows,
    )


def _preference(correct: Sequence[float], wrong: Sequence[float]) -> float:
    """Share of pairs in which the correct answer has the higher value; ties count half. nan if there are no pairs."""
    pairs = [0.5 if a == b else float(a > b) for a, b in itertools.product(correct, wrong)]
    return sum(pairs) / len(pairs) if pairs else math.nan


def verdicts(report: PremiseReport) -> list[str]:
    """The conclusions on distillation, windows and stop tokens, a sentence each."""
    found = []
    if math.isnan(report.preference):
        found.append("distillation: all answers are right, all wrong or none judged; what the teacher prefers is open.")
    elif report.preference >= _CLEAR:
        found.append(f"distillation can pay: the teacher prefers correct answers in {report.preference:.0%} of pairs.")
    else:
        found.append(
            "distillation is unlikely to raise accuracy: the teacher prefers correct answers in "
            f"{report.preference:.0%} of pairs, about half."
        )
    # By noise alone, some prefix passes the bound in a third of the cases. So it counts only if the cosine of random
    # tokens was found to be high too.
    paying = [window for window in report.windows if window.pays]
    sure = next((window.tokens for window in paying if window.clear), None)
    if sure is not None:
        found.append(f"windows can pay: the first {sure} tokens point where the whole answer does.")
    elif paying or (report.windows and not any(window.clear for window in report.windows)):
        found.append("windows: the answers are too few to judge them by; give more --rows.")
    elif report.windows:
        found.append("windows are unlikely to pay: no prefix points where the whole answer does.")
    if report.stop < _STRANGE_STOP:
        found.append(
            f"stop: the teacher finds the student's end improbable ({report.stop:.1f} nats); set teachers.map_stops or "
            "rollout.stop_tokens before anything is judged."
        )
    return found
