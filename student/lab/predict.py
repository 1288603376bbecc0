"""`opd premise`: a look at a student and its teachers, without training, that says which methods can pay.

The student answers a few prompts, the teachers score the answers, nothing is trained. Measured, and what follows from
it:

    reverse KL by decile of the response; how often the student's token is the teacher's first choice
    preference: chance that the teacher likes a correct answer better, relative to the student, than a wrong one (0.5:
        it cannot tell them apart, and distillation moves nothing towards correctness)
    stop: log-ratio at the student's stop token; far below 0, the teacher ends its turns with another token
    windows: cosine of each prefix's gradient with the full one; a window method can pay where a prefix passes 0.71. As
        many tokens at random, whose gradient is the full one's on average, have a cosine of 1 but for noise (and save
        no sampling): where theirs is far from 1, the answers are too few to judge by

What ExOPD's extrapolation is worth and whether EffOPD's jumps may land takes weights: `student.lab.predict_weights`.
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
from student.data.plan import plan_step
from student.data.row import Row
from student.job import Job, build_job
from student.methods.windows.admissibility import cross_fitted, published
from student.methods.windows.gradient_metric import GradientMetric
from student.methods.windows.probe import Prober, ProbeSpec
from student.recipe import Recipe
from student.scoring.needs import TEACHER
from student.scoring.verify import Verification

ADMITTED = math.sqrt(0.5)
"""Cosine from which ADWIN admits a window."""
DECILES = 10
_TOP = 8
_FOLDS = 4
_STRANGE_STOP = -5.0
_CLEAR = 0.55
"""Preference from which the teacher is said to tell correct from wrong answers."""


@dataclass(frozen=True, slots=True)
class Window:
    """A prefix of `tokens` tokens: cosines of its gradient with the full one; nan where a gradient drowned in noise."""

    tokens: int
    published: float
    cross_fitted: float
    random: float

    @property
    def pays(self) -> bool:
        """Whether the prefix is admissible."""
        return self.cross_fitted >= ADMITTED

    @property
    def clear(self) -> bool:
        """Whether the answers are enough to find a cosine that is there: that of random tokens, which is 1."""
        return self.random >= ADMITTED


@dataclass(frozen=True, slots=True)
class PremiseReport:
    """What was measured; see the module.

    Attributes:
        rows: answers.
        accuracy: of the student's answers; nan where no verdict is known.
        length: mean, tokens.
        reverse_kl: log-ratio of the sampled tokens, mean over tokens, nats.
        by_decile: the same by decile of the response.
        agreement: share of tokens that are the teacher's first choice, by decile.
        preference: see the module; nan without both correct and wrong answers.
        stop: mean log T - log S at the student's stop token; nan where every answer was cut.
        windows: by length, longest last; empty for responses too short to cut.
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
    """Measure the premises on the recipe's student, teachers and training prompts.

    Args:
        recipe: its objective and methods are left aside.
        rows: answers, one per prompt, at least 8.

    Raises:
        ConfigError: for fewer rows, or a recipe without teachers.
        OpdError: as `opd train` would.
    """
    if rows < 2 * _FOLDS:
        raise ConfigError(f"{rows} answers are too few to measure anything; give at least {2 * _FOLDS}.")
    if recipe.teachers is None:
        raise ConfigError("the recipe names no teachers, so there is nothing to predict; give it the group teachers.")
    term = {"name": "opd", "payload": "topk", "k": _TOP, "aggregation": "constant"}
    recipe = recipe.model_copy(update={"objective": [term], "methods": []})
    with ExitStack() as stack:
        job = build_job(recipe, stack, poll=lambda: None)
        job.local.start(job.models.local)
        settings = recipe.rollout
        prompts = job.services.training_prompts(rows, seed_names=("premise",))
        plan = plan_step(
            0, prompts, samples=1, max_new_tokens=settings.max_new_tokens, temperature=settings.temperature
        )
        found = job.services.score(job.services.rollout(plan))
        # A run without rewards judges nothing in training, but what the teacher prefers is told by verdicts.
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
            raise ConfigError("the teachers sent no log-probs; see their log.")
        # Of an episode the student's own tokens alone: what the environment wrote has no log-probs.
        own = row.loss_mask
        ratio = scores.sampled[own].astype(np.float64) - row.behaviour_logp[own]
        place = (np.arange(row.length) * DECILES // max(1, row.length))[own]
        # Not sums[place] += ...: of the many tokens of a decile that would add the last one alone.
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
    """Share of pairs in which the correct answer has the higher value; ties count half."""
    pairs = [0.5 if a == b else float(a > b) for a, b in itertools.product(correct, wrong)]
    return sum(pairs) / len(pairs) if pairs else math.nan


def verdicts(report: PremiseReport) -> list[str]:
    """What follows, a sentence each."""
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
    # Of noise alone one passes the bound in a third of the cases: it counts where that of random tokens was found too.
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
