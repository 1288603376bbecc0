"""The training loop, shared by distillation and reinforcement learning.

plan   = plan_step(step)         which prompts, how many samples, how long
rows   = strategy.run(plan)      rounds of sampling; a row leaves the sampler as soon as it is finished ...
signal = score(row)              ... and is scored at once
batch  = compose(rows)           filter, replay, re-weight
for update in updates(batch):    epochs of minibatches, or a method's own order
    learner.update(update)       objective, backward, clip, optimizer
after_update()                   jumps, refreshes
observe(report)                  strategy, terms, rewards and controllers learn from the step
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from opd.tasks.prompt import Prompt
from opd.telemetry.tracing import Spans
from student.data.outcome import Outcome, gather_outcomes
from student.data.plan import StepPlan, plan_step
from student.data.report import StepReport
from student.data.row import Row
from student.job.evaluation import Evaluations, metrics_of
from student.job.job import Job
from student.job.saving import LoopState, Saver, Unfinished
from student.job.steering import acted, composed, ordered, planned
from student.learning.updates import Update, Updated, make_updates, plan_updates
from student.plugin.controllers import Controller
from student.report.row_counts import outcome_metrics, step_metrics
from student.report.samples import entries, sample_of
from student.report.telemetry import StageClock, Telemetry
from student.rollout.sampling import Sampling
from student.run.interrupts import Interrupts
from student.scoring.rewards.rounds import StepRewards
from student.scoring.stops import stop_log_ratios
from student.state.named_states import names_of


class Loop:
    """The steps of one job.

    Args:
        job: the parts of the run.
        state: what outlives a step; see `student.job.saving`.
        saver: writes checkpoints of it.
        sinks: take the metrics of each step.
        interrupts: tells whether to stop.
        spans: records a span for each step.

    Attributes:
        evaluations: evaluates the current weights on held-out prompts.
    """

    def __init__(
        self, job: Job, state: LoopState, saver: Saver, sinks: Telemetry, interrupts: Interrupts, spans: Spans
    ) -> None:
        self.job, self.state, self.saver, self.sinks = job, state, saver, sinks
        self.interrupts, self.spans = interrupts, spans
        self.recipe, self.ranks = job.recipe, job.learner.ranks
        self.evaluations = Evaluations(job, sinks.log, self._keep_samples, state.before)
        # `learner.updates` when the current step began; None once a method orders the updates and may move weights.
        self._updates: int | None = job.learner.updates
        self._early = job.learns_early
        labels = job.source.labels() or frozenset()
        self._groups = {
            "domain": {domain or "none" for _, domain in labels},
            "teacher": job.scorer.teachers(labels),
        }

    @property
    def moved(self) -> bool:
        """Whether the weights may have moved since the current step began."""
        return self.job.learner.updates != self._updates

    def step(self, step: int) -> None:
        """Take a step; if it fails before its first update, the state is that after the last step."""
        with self.spans.span("opd.step", {"opd.step": step + 1}):
            self._step(step)

    def finish(self, unfinished: Unfinished) -> None:
        """Run what follows the updates of a step that was interrupted after them."""
        clock = self._clock()
        # The record of the step also counts the time that it took before the interruption.
        clock.seconds = unfinished.seconds
        self._follow_up(unfinished, clock)

    def _step(self, step: int) -> None:
        job, clock = self.job, self._clock()
        # Until an update begins, a failure on any rank leaves the state of every rank as it was after the last step.
        job.cursor.begin()
        self._updates = job.learner.updates
        sampling = Sampling(
            job.sampler,
            job.scorer,
            StepRewards(job.plugins.rewards, job.services),
            lambda prompts: self._plan(step, prompts),
            job.cursor,
            self.ranks,
            clock,
            self.interrupts.poll,
            ahead=job.ahead,
            early=self._early,
        )
        with closing(sampling):
            rows = sampling.run(job.plugins.strategy.run, self._planned(step))
            version, weights = (step, None) if job.ahead is None else job.ahead.weights(step)
            mismatch = job.mismatch.measure(rows, version, weights)
            costs = job.services.costs
            costs.sampled("train", sampling.rows)
            costs.scored("train", job.scorer.positions(sampling.scored))
            # After the costs, which count every row that was sampled and scored, even if a method drops it.
            rows = composed(job.controllers, rows)
            outcomes = self._assess(rows, step, sampling, clock)
        stops = self._stop_ratios(rows)  # may ask the fleet, whose failure must not come after the updates
        updated = self._learn(rows, step, clock)
        # The weights have moved: the step counts as done, and a run interrupted from here on resumes after it.
        moved = job.local.kept.after_step(step)
        self.state.steps = step + 1
        if job.ahead is not None:
            job.ahead.done(self.state.steps)
        job.sampler.moved(self.state.steps)
        self._show_samples(rows)
        job.cursor.commit()
        measured = updated.metrics() | moved | outcome_metrics(outcomes, self._groups) | mismatch
        measured |= step_metrics(job, rows, sampling, stops, step) | clock.beside
        self.state.tokens += int(measured["response_tokens"])
        self.state.unfinished = Unfinished(measured, outcomes, clock.seconds)
        self._follow_up(self.state.unfinished, clock)
        if updated.failure is not None:
            raise updated.failure

    def _assess(self, rows: Sequence[Row], step: int, sampling: Sampling, clock: StageClock) -> list[Outcome]:
        """Show the terms the whole step; if some scores are still on their way, begin the gradient without them."""
        outcomes, places = gather_outcomes(rows, self.ranks)
        self.job.learner.objective.assess(rows, outcomes, places)
        if not self._early:
            return outcomes
        late = self.job.scorer.late(rows)
        if self.ranks.any(late > 0):
            with clock.stage("learn"):
                self.job.learner.begin(rows, step, sampling.arrive)
        self.ranks.agree(lambda: sampling.arrive(rows))  # including rows that no term learns from
        sampling.measure("scored_while_learning", late, len(rows))
        return gather_outcomes(rows, self.ranks)[0]  # again: outcomes include sums of the scores, which have arrived

    def _show_samples(self, rows: Sequence[Row]) -> None:
        """Write the first rows of the step to the run's samples, every `samples.every` steps."""
        shown = self.recipe.samples
        if shown.every and self.state.steps % shown.every == 0:
            samples = [sample_of(row, self.job.tokenizer) for row in rows[: shown.count]]
            self._keep_samples(entries(samples, step=self.state.steps, label="train"))

    def _stop_ratios(self, rows: Sequence[Row]) -> list[float]:
        job = self.job
        return stop_log_ratios(rows, job.scorer.head_of, len(job.tokenizer), self.recipe.rollout.temperature)

    def _learn(self, rows: Sequence[Row], step: int, clock: StageClock) -> Updated:
        """Make all optimizer updates of a step."""
        train, job = self.recipe.train, self.job
        if any(type(method).updates is not Controller.updates for method in job.controllers):
            self._updates = None
        updates: Iterable[Update] = plan_updates(
            rows,
            epochs=train.epochs,
            minibatches=train.minibatches,
            seed=self.recipe.seed,
            step=step,
            ranks=self.ranks,
        )
        if job.learner.objective.recomputes:
            # For the first update the scores are already those of the weights that it starts from.
            updates = (replace(update, recompute=number > 0) for number, update in enumerate(updates))
        updates = ordered(job.controllers, updates, job.services)
        # Once the weights have moved, the step cannot be taken again, so a signal waits until the updates are made.
        with clock.stage("learn"), self.interrupts.held():
            made = make_updates(job.learner, updates, step, job.services.costs, job.scorer.reread)
        if made.skipped:
            self.sinks.log(
                f"step {step + 1}: {made.skipped} of {made.made + made.skipped} updates had no row to learn "
                "from and were skipped"
            )
        return made

    def _clock(self) -> StageClock:
        return StageClock(self.spans, self.state.steps)

    def _planned(self, step: int) -> StepPlan:
        """The plan of a step; with sampling ahead, first launch the later steps that these weights have to sample."""
        cursor, ahead, count = self.job.cursor, self.job.ahead, self.recipe.rollout.prompts_per_step
        if ahead is None:
            return self._plan(step, cursor.take(count))
        for later in ahead.due(step):
            ahead.launch(self._plan(later, cursor.take(count)), version=step)
            cursor.commit()  # a checkpoint holds the plan, and so these prompts
        return ahead.plan(step)

    def _plan(self, step: int, prompts: Sequence[Prompt]) -> StepPlan:
        """The plan for the `prompts` of all ranks, after the controllers have rewritten it."""
        rollout = self.recipe.rollout
        plan = plan_step(
            step,
            prompts,
            samples=rollout.samples_per_prompt,
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
        )
        return planned(self.job.controllers, plan)

    def _follow_up(self, left: Unfinished, clock: StageClock) -> None:
        """Run what follows the updates of a step; a resumed run continues with the controller it had reached."""
        job, metrics, step = self.job, left.metrics, self.state.steps - 1
        job.services.outcomes = left.outcomes
        with clock.stage("after_update"):
            for name, controller in zip(names_of(job.controllers), job.controllers, strict=True):
                if name in left.acted:
                    continue
                job.services.costs.take()  # discard the costs of a call that was interrupted
                job.cursor.begin()
                measured = acted(controller, step, job.services)
                for cost, value in self.ranks.total(job.services.costs.take()).items():
                    metrics[cost] = metrics.get(cost, 0.0) + value
                metrics |= measured
                # `left` is part of the saved state: a run interrupted from here on resumes after this controller.
                left.acted.append(name)
                job.cursor.commit()
        job.sampler.moved(self.state.steps)  # controllers may have written to the weights
        if not left.observed:  # the step is observed once, even if the evaluation below is interrupted and repeated
            report = StepReport(step, metrics, left.outcomes)
            job.learner.objective.observe(report)
            job.plugins.strategy.observe(report)
            job.plugins.rewards.observe(report)
            for controller in job.controllers:
                controller.observe(report)
            left.observed = True
        if self.evaluations.due(self.state.steps):
            with clock.stage("evaluate"):
                evaluation = self.evaluations.run(f"step {self.state.steps}", self.state.steps)
            metrics |= metrics_of(evaluation) if evaluation is not None else {}
        self.state.unfinished, self.state.last = None, (metrics, clock.seconds)
        self.saver.outdate()  # an interruption may have left a checkpoint of this step in its unfinished state
        self._save_now_and_then(clock)
        self.sinks.step(self.state.steps, metrics | self.saver.metrics(), clock.seconds)

    def _keep_samples(self, lines: Sequence[Mapping[str, Any]]) -> None:
        if self.job.accelerator.is_main_process:
            self.sinks.samples(lines)

    def _save_now_and_then(self, clock: StageClock) -> None:
        last = self.state.steps == self.recipe.train.steps
        every = self.recipe.train.checkpoint_every
        if last or (every and self.state.steps % every == 0):
            with clock.stage("checkpoint"):
                self.saver.save(self.state, wait=False)
        else:
            self.saver.settle(patient=False)
