"""A session of a run: opens it, drives its loop, and saves when the loop is done, stopped or fails.

    open or resume  ->  evaluate  ->  steps (`student.job.loop`)  ->  evaluate  ->  summary

A signal, an error or the outage of a teacher may come between: what is done is saved, and the message says how to go
on.
"""

import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from opd.errors import CancelledError, OpdError, PluginError, RunFolderError
from opd.fleet.membership.outage import Outage, OutageHooks
from opd.telemetry.tracing import Spans
from student.data.report import EvalReport
from student.job.evaluation import metrics_of, to_json
from student.job.job import Job, build_job, devices, fleet_fingerprints
from student.job.loop import Loop
from student.job.saving import Saver
from student.learning.blame import blaming
from student.model.meeting import join
from student.model.ranks import launched_ranks
from student.plugin.controllers import begin
from student.report.ending import RunEnding
from student.report.telemetry import Telemetry, check_port
from student.run.changes import changes_since
from student.run.folder import RESUMABLE, RunFolder
from student.run.interrupts import Interrupts
from student.run.space import Space, tight
from student.settings.recipe import Recipe


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
        interrupts = stack.enter_context(Interrupts(starting=True, shared=launched_ranks() > 1))
        watch = join(recipe.train.rank_patience, stack)
        folder, checkpoint = _open(recipe, resume, stack)
        model_path = str(checkpoint / "model") if checkpoint is not None else None

        def log(line: str) -> None:  # called from within the session alone, which is made below
            session.sinks.log(line)

        hooks = OutageHooks(
            waiting=lambda outage: log(outage.sentence()),
            emergency=lambda outage: session.save_in_outage(outage),  # noqa: PLW0108
            recovered=lambda outage: log(f"teacher {outage.teacher!r} is back after {outage.seconds:.0f} s"),
        )
        space = Space(recipe.train.disk_patience, lambda: interrupts.requested, log)
        job = build_job(
            recipe, stack, model_path=model_path, poll=interrupts.poll, watch=watch, hooks=hooks, space=space, log=log
        )
        main = job.accelerator.is_main_process
        if main and folder is None:
            folder = stack.enter_context(RunFolder.create(recipe).alone())
            stack.push(folder.discard_unused)
            folder.write_provenance(fleet_fingerprints(job.models.infos), devices(job.accelerator))
        if folder is None:
            folder = RunFolder(recipe.run)
        sinks = telemetry or Telemetry.of(recipe, folder, main=main)
        stack.callback(sinks.close)
        sinks.introduce(recipe, devices(job.accelerator))
        for change in changes_since(folder, job) if main else ():
            sinks.log(f"warning: {change}")
        spans = Spans.from_environment("opd-student", recipe.tracing, sinks.timeline)
        stack.callback(spans.close)
        folder.space = space
        if job.fleet is not None:
            sinks.show_fleet(job.fleet)
        # Exits run in reverse order: `rename` comes first, so `RunEnding` records the lost rank, not torch's error.
        if main:
            stack.push(RunEnding(folder, job.fleet, report=sinks.folder is not None))
        stack.push(job.watch.rename)
        session = Session(job, folder, sinks, interrupts, checkpoint, spans)
        interrupts.starting = False  # from here on, it is polled
        stack.callback(session.saver.settle)
        return session.run()


def _open(recipe: Recipe, resume: bool, stack: ExitStack) -> tuple[RunFolder | None, Path | None]:
    if not resume:
        # Refuse a folder in use before any model loads; create it only once everything else has been checked.
        RunFolder.check_new(recipe.run)
        check_port(recipe.metrics_port, recipe.metrics_host)
        return None, None
    folder = stack.enter_context(RunFolder.reopen(recipe).alone())
    return folder, folder.newest(recipe)


class Session:
    """The choreography around the loop of one job: it begins, ends, and what is done is saved.

    Attributes:
        sinks: take lines and metrics.
        saver: writes checkpoints.
    """

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
        self.recipe, self.ranks = job.recipe, job.learner.ranks
        self.saver = Saver(job, folder, sinks.log, sinks.saved)
        self.state = self.saver.open(checkpoint)
        self.loop = Loop(job, self.state, self.saver, sinks, interrupts, spans)
        job.local.kept.start(job.models.local, fresh=checkpoint is None)

    def run(self) -> dict[str, Any]:
        """Take all remaining steps and return the summary; an error that stops them is raised after saving."""
        # The sampler must know the resumed weights before `begin`, in which a controller may already sample.
        self.job.sampler.moved(self.state.steps)
        with blaming(self.ranks.count):
            for controller in self.job.controllers:
                begin(controller, self.job.services)
        try:
            after = self.ranks.agree(self._reporting)
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
        steps = self.state.steps
        if not steps or self.loop.moved or self.state.unfinished is not None or self.ranks.count > 1:
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

    def _reporting(self) -> EvalReport | None:
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
        loop, state = self.loop, self.state
        if state.steps == 0:
            for remark in self.job.plugins.remarks:
                self.sinks.log(f"note: {remark}")
            if said := tight(self.folder.path, self._checkpoint_bytes(), self.recipe.train.keep_checkpoints):
                self.sinks.log(f"warning: {said}")
            self._check_stops()
            state.before = loop.evaluations.run("before", 0)
            if state.before is not None:
                self.sinks.evaluated(metrics_of(state.before))
        self.sinks.start(state.steps, self.job.learner.objective.shown())
        if state.unfinished is not None:  # resumed from a checkpoint taken between updates and controllers
            loop.finish(state.unfinished)
        elif state.last is not None:
            self.sinks.recall(state.steps, *state.last)
        while state.steps < self.recipe.train.steps and not self._finished():
            if self.ranks.any(self.interrupts.requested):  # the signal may have reached only one of the ranks
                raise CancelledError("stopped by a signal")
            loop.step(state.steps)
        return loop.evaluations.run("after", state.steps)

    def _checkpoint_bytes(self) -> int:
        """About how large a checkpoint is: the weights, and two moments of each that is trained."""
        sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in self.job.learner.student.lm.parameters()]
        return sum(size * (3 if trained else 1) for size, trained in sizes)

    def _finished(self) -> bool:
        return self.ranks.any(any(controller.finished() for controller in self.job.controllers))

    def _check_stops(self) -> None:
        check = self.job.stop_check
        if check is not None:
            for line in self.ranks.agree(lambda: list(check.lines(self.interrupts.poll))):
                self.sinks.log(line)

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
