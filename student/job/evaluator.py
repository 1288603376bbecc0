"""Evaluates the current weights: they answer held-out prompts, the verifier judges the answers, teachers score them.

Each rank answers a share of the prompts, and every rank gets the report over all prompts. With modes, whose figures
compare answers to the same problem, every rank answers all prompts.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, overload

from opd.tasks.prompt import Prompt
from student.data.costs import Costs, Purpose, positions
from student.data.mode_figures import is_trained, judge_budgets, mode_figures
from student.data.plan import StepPlan, plan_step
from student.data.report import EvalReport
from student.data.row import Row
from student.data.token_batch import TokenBatch
from student.job.evaluate import Answer, EvalMeasure, report
from student.job.leakage import leakage as measure_leakage
from student.plugin.controllers import Workbench
from student.report.samples import sample_of
from student.report.token_view import view_of_batch
from student.scoring.score import Scoring
from student.scoring.verify import Verification
from student.settings.recipe import Recipe

QUIET_SECONDS = 15.0
"""Seconds between lines of progress."""


@dataclass(frozen=True, slots=True)
class EvaluationTask:
    """This rank's part of an evaluation.

    Attributes:
        plan: the answers that this rank samples.
        places: their indices in the plan of all ranks.
        other: plan of further answers, sampled at the temperature of rollouts, on which the divergence is measured;
            None if `plan` has that temperature, and its answers serve for both.
        seed_names: names of the random streams.
        scorer: gets the scores that the measure needs; None if no divergence is measured.
        keep: number of answers, from the first on, that the report contains as text.
        shown: number of these that come with a divergence.
    """

    plan: StepPlan
    places: tuple[int, ...]
    other: StepPlan | None
    seed_names: tuple[object, ...]
    scorer: Scoring | None
    keep: int
    shown: int


class Progress:
    """Lines of progress, at most one in some seconds.

    Args:
        log: called with a line.
        clock: gives the time in seconds.
    """

    def __init__(self, log: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._last = 0.0

    def begin(self) -> None:
        """Something begins; it is silent as long as it is short."""
        self._last = self._clock()

    def say(self, line: str) -> None:
        """Log `line` if the last one is long ago."""
        now = self._clock()
        if now - self._last >= QUIET_SECONDS:
            self._last = now
            self._log(line)


class Evaluator:
    """Evaluates the current weights.

    Args:
        recipe: the run's recipe.
        bench: the weights, and what samples from them.
        tokenizer: the student's tokenizer.
        verification: judges answers.
        measure: the measure of reverse KL, and the scorer for its needs; None if it cannot be measured.
        costs: counts the tokens and positions spent.
        log: called with a line of progress from time to time.

    Attributes:
        scorer: gets the scores that the measure needs; None if nothing can be measured.
    """

    def __init__(
        self,
        recipe: Recipe,
        bench: Workbench,
        tokenizer: Any,
        verification: Verification,
        measure: tuple[EvalMeasure, Scoring] | None,
        costs: Costs,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._recipe, self._tokenizer, self._verification = recipe, tokenizer, verification
        self._learner, self._sampler, self._poll = bench.learner, bench.sampler, bench.poll
        self._measure: EvalMeasure | None = None if measure is None else measure[0]
        self.scorer: Scoring | None = None if measure is None else measure[1]
        self._costs = costs
        self._progress = Progress(log)
        ranks = bench.learner.ranks
        # The index of this rank's share of the answers, and the number of shares.
        self._index, self._shares = (0, 1) if recipe.modes else (ranks.index, ranks.count)

    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        seed_names: Sequence[object],
        samples: int,
        reverse_kl: bool,
        temperature: float | None,
        purpose: Purpose | None,
        keep: int,
        leakage: int,
        slack: float,
    ) -> EvalReport:
        """Evaluate the current weights; the arguments are those of `student.job.services.LoopServices.evaluate`."""
        asked = self._ask(prompts, seed_names, samples, temperature, keep, slack, measured=reverse_kl)
        return self._learner.ranks.agree(lambda: self._run(asked, samples, purpose, leakage))

    def _run(self, asked: EvaluationTask, samples: int, purpose: Purpose | None, leakage: int) -> EvalReport:
        rows, scored = self._learner.ranks.agree(lambda: self._answer(asked))
        if purpose is not None:
            self._count(asked, rows, scored, purpose)
        value = self._divergence(asked, scored)
        judge_budgets(rows, self._recipe.modes)
        modes = mode_figures(rows, self._recipe.modes) | self._leakage(asked, scored, leakage)
        report = replace(self._report(asked, rows, samples, value), modes=modes)
        # Where every rank judged all answers, a verifier may have timed out on one rank only. Controllers that read
        # the report must decide the same on all ranks, so all ranks take rank 0's.
        return report if self._shares > 1 else self._learner.ranks.gather(report)[0]

    def _ask(
        self,
        prompts: Sequence[Prompt],
        seed_names: Sequence[object],
        samples: int,
        temperature: float | None,
        keep: int,
        slack: float,
        *,
        measured: bool,
    ) -> EvaluationTask:
        usual = self._recipe.rollout.temperature
        level = usual if temperature is None else temperature
        prompts = [replace(p, max_new_tokens=_stretched(p.max_new_tokens, slack)) for p in prompts]
        longest = _stretched(self._recipe.rollout.max_new_tokens, slack)
        plan = plan_step(0, prompts, samples=samples, max_new_tokens=longest, temperature=level)
        whole, mine = {row.key: at for at, row in enumerate(plan.rows)}, plan.shard(self._index, self._shares)
        other = plan_step(0, prompts, samples=1, max_new_tokens=longest, temperature=usual)
        return EvaluationTask(
            plan=mine,
            places=tuple(whole[row.key] for row in mine.rows),
            other=None if level == usual else other.shard(self._index, self._shares),
            seed_names=tuple(seed_names),
            scorer=self.scorer if measured else None,
            keep=keep,
            shown=min(keep, self._recipe.samples.count),
        )

    def _answer(self, asked: EvaluationTask) -> tuple[list[Row], list[Row]]:
        """The judged answers, and the scored answers on which the divergence is measured."""
        scorer = asked.scorer
        self._progress.begin()
        rows = self._sampled(asked.plan, asked.seed_names, scorer if asked.other is None else None)
        scored: list[Row] = [] if scorer is None else rows
        if scorer is not None and asked.other is not None:
            scored = self._sampled(asked.other, asked.seed_names, scorer)
            # Each answer that is shown needs its own divergence, and it is not among those that are measured.
            shown = [row for at, row in zip(asked.places, rows, strict=True) if at < asked.shown]
            for row in shown:
                scorer.ask(row)
            scorer.wait(shown, poll=self._poll)
        if scorer is not None:
            scorer.wait(scored, poll=self._poll)
        self._verification.collect(rows, poll=self._poll)
        return rows, scored

    def _sampled(self, plan: StepPlan, seed_names: Sequence[object], scorer: Scoring | None) -> list[Row]:
        """Sample a plan from the current weights, with the random streams named by `seed_names`."""
        done, level = 0, plan.rows[0].temperature if plan.rows else 0.0

        def on_row(row: Row) -> None:
            nonlocal done
            self._poll()
            done += 1
            self._progress.say(f"evaluation: {done} of {len(plan.rows)} answers at temperature {level:g}")
            if scorer is not None:
                scorer.ask(row)

        return self._sampler.sample(plan.rows, purpose=("eval", *seed_names), on_row=on_row, poll=self._poll)

    def _count(self, asked: EvaluationTask, rows: Sequence[Row], scored: Sequence[Row], purpose: Purpose) -> None:
        self._costs.sampled(purpose, rows)
        if asked.scorer is not None:
            self._costs.scored(purpose, asked.scorer.positions(scored))
            # The measure takes one more forward pass of the student.
            self._costs.add(purpose, "decoded_positions", positions(scored))
            if asked.other is not None:
                self._costs.sampled(purpose, scored)

    def _divergence(self, asked: EvaluationTask, scored: Sequence[Row]) -> tuple[float, float] | None:
        """The mean divergence of all ranks' answers, in nats per token, and bytes per token; None if unmeasured."""
        if asked.scorer is None or self._measure is None:
            return None
        trained = [row for row in scored if is_trained(row, self._recipe.modes)]
        self._progress.say(f"evaluation: measuring the reverse KL of {len(trained)} answers")
        with self._learner.whole():
            part = self._measure.measure(self._learner, trained)
        parts = self._gathered((*part, sum(len(row.text.encode()) for row in trained)))
        total, tokens, size = (sum(column) for column in zip(*parts, strict=True))
        return total / max(1.0, tokens), size / max(1.0, tokens)

    def _gathered(self, value: Any) -> list[Any]:
        return self._learner.ranks.gather(value) if self._shares > 1 else [value]

    def _leakage(self, asked: EvaluationTask, scored: Sequence[Row], problems: int) -> dict[str, float]:
        if asked.scorer is None or self._measure is None or not problems or not self._recipe.modes:
            return {}
        return measure_leakage(
            scored,
            self._recipe.modes,
            problems,
            scorer=asked.scorer,
            measure=self._measure,
            learner=self._learner,
            tokenizer=self._tokenizer,
            poll=self._poll,
        )

    def _report(
        self, asked: EvaluationTask, rows: Sequence[Row], samples: int, value: tuple[float, float] | None
    ) -> EvalReport:
        """The report of all ranks' answers."""
        placed = list(zip(asked.places, rows, strict=True))
        kept = self._samples([(at, row) for at, row in placed if at < asked.keep], 0 if value is None else asked.shown)
        # Modes that are not trained have their own figures and do not count towards the report's.
        mine = [Answer.of(row, at) for at, row in placed if is_trained(row, self._recipe.modes)]
        shares = self._gathered((mine, kept))
        answers = sorted((answer for share, _ in shares for answer in share), key=lambda answer: answer.place)
        lines = {at: sample for _, share in shares for at, sample in share.items()}
        per_token, size = value or (None, None)
        whole = report(answers, samples, per_token, "" if self._measure is None else self._measure.estimator)
        whole = replace(whole, bytes_per_token=size)
        return replace(whole, samples=[lines[at] for at in sorted(lines)])

    def _samples(self, rows: Sequence[tuple[int, Row]], measured: int) -> dict[int, dict[str, Any]]:
        """The answers for samples.jsonl by index; those with an index below `measured` have their divergence."""
        samples = {}
        with self._learner.whole():
            for at, row in rows:
                kl: float | None = None
                seen: list[TokenBatch] = []
                if at < measured and self._measure is not None:
                    top, tokens = self._measure.measure(self._learner, [row], look=seen.append)
                    kl = top / max(1.0, tokens)
                view = [token for batch in seen for token in view_of_batch(batch)]
                samples[at] = sample_of(row, self._tokenizer, kl, view)
        return samples


@overload
def _stretched(limit: int, slack: float) -> int: ...
@overload
def _stretched(limit: None, slack: float) -> None: ...
def _stretched(limit: int | None, slack: float) -> int | None:
    return None if limit is None else ceil(limit * slack)
