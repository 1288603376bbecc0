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

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from opd.errors import CancelledError, OpdError, PluginError, RunFolderError
from opd.fleet.membership.outage import Outage, OutageHooks
from opd.fleet.metrics import register_metrics
from opd.tasks.prompt import Prompt
from student.data.outcome import Outcome, gather_outcomes
from student.data.plan import StepPlan, plan_step
from student.data.report import EvalReport, StepReport
from student.data.row import Row
from student.job.evaluation import Evaluations, metrics_of, to_json
from student.job.job import Job, build_job, fleet_fingerprints
from student.job.saving import Saver, Unfinished
from student.job.stages import StepStages
from student.job.steering import acted, composed, ordered, planned
from student.learning.blame import blaming
from student.learning.updates import Update, Updated, make_updates, plan_updates
from student.model.meeting import join
from student.plugin.controllers import Controller
from student.plugin.rounds import Rollouts
from student.report.ending import RunEnding
from student.report.row_counts import outcome_metrics, step_metrics
from student.report.samples import entries, sample_of
from student.report.spans import Spans
from student.report.telemetry import StageClock, Telemetry, check_port
from student.report.trackers import check_trackers
from student.run.changes import changes_since
from student.run.folder import RESUMABLE, RunFolder
from student.run.interrupts import Interrupts
from student.run.space import Space
from student.scoring.stops import stop_log_ratios
from student.settings.recipe import Recipe
from student.state.named_states import names_of


def train(recipe: Recipe, *, resume: bool = False, telemetry: Telemetry | None = None) -> dict[str, Any]:
    """Run a student job to its end.

    Args:
        recipe: what to train, on what, and how.
        resume: continue from the newest intact checkpoint of the run folder.
        telemetry: sinks for metrics; None makes those that the recipe asks for.

    Returns:
        The summary, which the main process also writes to summary.json.

    Raises:
        CancelledError: after a signal that asks to stop, once there is nothing left to save.
        OpdError: for anything else that stops a run; each subclass has its own exit code.
    """
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts(starting=True))
        watch = join(recipe.train.rank_patience, stack)
        folder, checkpoint = _open(recipe, resume, stack)
        model_path = str(checkpoint / "model") if checkpoint is not None else None
        hooks = OutageHooks(  # called from within `run` alone
            waiting=lambda outage: run.sinks.log(outage.sentence()),
            emergency=lambda outage: run.save_in_outage(outage),  # noqa: PLW0108 (made below)
            recovered=lambda outage: run.sinks.log(f"teacher {outage.teacher!r} is back after {outage.seconds:.0f} s"),
        )
        job = build_job(recipe, stack, model_path=model_path, poll=interrupts.poll, watch=watch, hooks=hooks)
        main = job.accelerator.is_main_process
        if main and folder is None:
            folder = stack.enter_context(RunFolder.create(recipe).alone())
            stack.push(folder.discard_unused)
            folder.write_provenance(fleet_fingerprints(job.models.infos))
        if folder is None:
            folder = RunFolder(recipe.run)
        sinks = telemetry or Telemetry.of(recipe, folder, main=main)
        stack.callback(sinks.close)
        for change in changes_since(folder, job) if main else ():
            sinks.log(f"warning: {change}")
        spans = Spans.from_environment(recipe.tracing)
        stack.callback(spans.close)
        folder.space = Space(recipe.train.disk_patience, lambda: interrupts.requested, sinks.log)
        job.sampler.wait_for(folder.space)
        if job.fleet is not None:
            register_metrics(job.fleet, sinks.registry)
        # Exits run in reverse order: `rename` comes first, so `RunEnding` records the lost rank, not torch's error.
        if main:
            stack.push(RunEnding(folder, job.fleet, report=sinks.folder is not None))
        stack.push(job.watch.rename)
        run = _Run(job, folder, sinks, interrupts, checkpoint, spans)
        interrupts.starting = False  # from here on, it is polled
        stack.callback(run.saver.settle)
        return run.run()


def _open(recipe: Recipe, resume: bool, stack: ExitStack) -> tuple[RunFolder | None, Path | None]:
    check_trackers(recipe.trackers)
    if not resume:
        # Refuse a folder in use before any model loads; create it only once everything else has been checked.
        RunFolder.check_new(recipe.run)
        check_port(recipe.metrics_port, recipe.metrics_host)
        return None, None
    folder = stack.enter_context(RunFolder.reopen(recipe).alone())
    return folder, folder.newest(recipe)


class _Run:
    """The loop of one job. `state` holds what outlives a step; see `student.job.saving`."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        sinks: Telemetry,
        interrupts: Interrupts,
        checkpoint: Path | None,
        spans: Spans,
    ) -> None:
        self.job, self.folder, self.sinks, self.interrupts = job, folder, sinks, interrupts
        self.recipe = job.recipe
        self.spans = spans
        self.ranks = job.learner.ranks
        interrupts.shared = self.ranks.count > 1
        self.evaluations = Evaluations(job, sinks.log, self._keep_samples)
        self.saver = Saver(job, folder, sinks.log, sinks.saved)
        self.state = self.saver.open(checkpoint)
        self.evaluations.start = self.state.before
        # `learner.updates` when the current step began; None once a method orders the updates and may move weights.
        self._updates: int | None = job.learner.updates
        labels = job.source.labels() or frozenset()
        self._groups = {
            "domain": {domain or "none" for _, domain in labels},
            "teacher": job.scorer.teachers(labels),
        }
        job.local.start(job.models.local, fresh=checkpoint is None)

    def run(self) -> dict[str, Any]:
        """Take all remaining steps and return the summary; an error that stops them is raised after saving."""
        # The sampler must know the resumed weights before `begin`, in which a controller may already sample.
        self.job.sampler.moved(self.state.steps)
        with blaming(self.ranks.count):
            for controller in self.job.controllers:
                controller.begin(self.job.services)
        try:
            after = self.ranks.agree(self._told)
        except OpdError as error:
            # Either saving itself failed, or the other ranks wait in a collective that this rank will not join.
            if isinstance(error, RunFolderError) or self.ranks.apart:
                raise
            self.interrupts.unsaved = False
            steps = self.state.steps
            done, stopped = f"{steps} of {self.recipe.train.steps} steps", isinstance(error, CancelledError)
            # Before the first update there is nothing to save: a resumed run would start from the beginning anyway.
            torn = steps > 0 and self.ranks.any(isinstance(error, PluginError) and self.state.acting)
            path = self.saver.save(self.state) if steps and not torn else None
            said = f"stopped after {done}" if stopped else f"{error} The run stopped after {done}"
            left = f", saved in {path}" if path else ", unsaved because weights may be changed by half" if torn else ""
            resumes = path or isinstance(error, RESUMABLE) or (torn and self.folder.used)
            error.args = (f"{said}{left}; {'continue with --resume' if resumes else 'start it again'}.",)
            raise
        except Exception as error:
            self._rescue(error)
            raise
        return self._finish(after)

    def _rescue(self, error: Exception) -> None:
        """After an unexpected exception, save the finished steps, unless the failed step has moved the weights."""
        steps, moved = self.state.steps, self.job.learner.updates != self._updates
        if not steps or moved or self.state.unfinished is not None or self.ranks.count > 1:
            return
        with suppress(Exception):  # the original exception is the one to report
            path = self.saver.save(self.state)
            error.add_note(f"{steps} of {self.recipe.train.steps} steps are saved in {path}; continue with --resume.")

    def save_in_outage(self, outage: Outage) -> None:
        """Save the finished steps while a teacher is away, unless this rank cannot do so by itself."""
        if self.state.unfinished is not None or self.interrupts.holding or self.saver.sharded:
            return  # Updates have moved the weights, a controller may be trying others, or other ranks hold shards.
        path = self.saver.save(self.state, together=False)
        self.sinks.log(f"teacher {outage.teacher!r} is away for {outage.seconds:.0f} s; saved {path}")

    def _told(self) -> EvalReport | None:
        """Run `_train`; if it fails on this rank, notify the other ranks, which may be waiting in any collective."""
        try:
            with blaming(self.ranks.count):
                return self._train()
        except OpdError as error:
            if not isinstance(error, RunFolderError):  # all ranks raise this one together
                self.job.watch.ending(error)
            raise

    def _train(self) -> EvalReport | None:
        """Evaluate, take all remaining steps, and evaluate again; returns the last evaluation."""
        if self.state.steps == 0:
            for remark in self.job.remarks:
                self.sinks.log(f"note: {remark}")
            self._check_stops()
            self.state.before = self.evaluations.run("before", 0)
            if self.state.before is not None:
                self.sinks.evaluated(metrics_of(self.state.before))
        self.sinks.start(self.state.steps, self.job.learner.objective.shown())
        if self.state.unfinished is not None:  # resumed from a checkpoint taken between updates and controllers
            clock = self._clock()
            # The record of the step also counts the time that it took before the interruption.
            clock.seconds = self.state.unfinished.seconds
            self._follow_up(self.state.unfinished, clock)
        elif self.state.last is not None:
            self.sinks.recall(self.state.steps, *self.state.last)
        while self.state.steps < self.recipe.train.steps and not self._finished():
            if self.ranks.any(self.interrupts.requested):  # the signal may have reached only one of the ranks
                raise CancelledError("stopped by a signal")
            with self.spans.span("opd.step", **{"opd.step": self.state.steps + 1}):
                self._step(self.state.steps)
        return self.evaluations.run("after", self.state.steps)

    def _finished(self) -> bool:
        return self.ranks.any(any(controller.finished() for controller in self.job.controllers))

    def _check_stops(self) -> None:
        check = self.job.stop_check
        if check is not None:
            for line in self.ranks.agree(lambda: list(check.lines(self.interrupts.poll))):
                self.sinks.log(line)

    def _step(self, step: int) -> None:
        job, clock = self.job, self._clock()
        # Until an update begins, a failure on any rank leaves the state of every rank as it was after the last step.
        job.cursor.begin()
        self._updates = job.learner.updates
        stages = StepStages(job, step, clock, self.interrupts.poll)
        rollouts = Rollouts(stages, lambda prompts: self._plan(step, prompts), job.cursor, self.ranks)
        stages.any = rollouts.any
        with closing(stages):
            rows = rollouts.run(job.strategy.run, self._planned(step))
            version, weights = (step, None) if job.ahead is None else job.ahead.weights(step)
            mismatch = job.mismatch.measure(rows, version, weights)
            costs = job.services.costs
            costs.sampled("train", rollouts.rows)
            costs.scored("train", job.scorer.positions(rollouts.scored))
            # After the costs, which count every row that was sampled and scored, even if a method drops it.
            rows = composed(job.controllers, rows)
            outcomes = self._assess(rows, stages, rollouts)
        stops = self._stop_ratios(rows)  # may ask the fleet, whose failure must not come after the updates
        updated = self._learn(rows, step, clock)
        # The weights have moved: the step counts as done, and a run interrupted from here on resumes after it.
        moved = job.local.after_step(step)
        self.state.steps = step + 1
        if job.ahead is not None:
            job.ahead.done(self.state.steps)
        job.sampler.moved(self.state.steps)
        self._show_samples(rows)
        job.cursor.commit()
        measured = updated.metrics() | moved | outcome_metrics(outcomes, self._groups) | mismatch
        measured |= step_metrics(job, rows, rollouts, stops, step) | clock.beside
        self.state.tokens += int(measured["response_tokens"])
        self.state.unfinished = Unfinished(measured, outcomes, clock.seconds)
        self._follow_up(self.state.unfinished, clock)
        if updated.failure is not None:
            raise updated.failure

    def _assess(self, rows: Sequence[Row], stages: StepStages, rollouts: Rollouts) -> list[Outcome]:
        """Show the terms the whole step; if some scores are still on their way, begin the gradient without them."""
        outcomes, places = gather_outcomes(rows, self.ranks)
        self.job.learner.objective.assess(rows, outcomes, places)
        if not self.job.learns_early:
            return outcomes
        late = self.job.scorer.late(rows)
        if self.ranks.any(late > 0):
            with stages.clock.stage("learn"):
                self.job.learner.begin(rows, stages.step, stages.arrive)
        self.ranks.agree(lambda: stages.arrive(rows))  # including rows that no term learns from
        rollouts.measure("scored_while_learning", late, len(rows))
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
        return StageClock(self.spans, self.sinks.timeline, self.state.steps)

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
                found = acted(controller, step, job.services)
                for cost, value in self.ranks.total(job.services.costs.take()).items():
                    metrics[cost] = metrics.get(cost, 0.0) + value
                metrics |= found
                # `left` is part of the saved state: a run interrupted from here on resumes after this controller.
                left.acted.append(name)
                job.cursor.commit()
        job.sampler.moved(self.state.steps)  # controllers may have written to the weights
        if not left.observed:  # the step is observed once, even if the evaluation below is interrupted and repeated
            report = StepReport(step, metrics, left.outcomes)
            job.learner.objective.observe(report)
            job.strategy.observe(report)
            job.rewards.observe(report)
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

    def _finish(self, after: EvalReport | None) -> dict[str, Any]:
        state = self.state
        # Built on every rank, because all ranks save together.
        summary = {
            "run": str(self.folder.path),
            "checkpoint": str(self.saver.save(state)),
            "steps": state.steps,
            "response_tokens": state.tokens,
            "seconds": time.monotonic() - state.began,
            "before": None if state.before is None else to_json(state.before),
            "after": None if after is None else to_json(after),
        }
        if self.job.accelerator.is_main_process:
            self.folder.write_json("summary.json", summary)
        return summary
