"""The one loop: plan, rollout, score, compose, learn, act on the weights, observe. RL and distillation alike.

plan   = plan_step(step)         which prompts, how many samples, how long
rows   = rollout(plan)           each row leaves as soon as it is finished ...
signal = score(row)              ... and is scored at once
batch  = compose(rows)           filter, replay, re-weight
update = learner.step(batch)     objective, backward, clip, optimizer
after_update()                   jumps, refreshes
observe(report)                  controllers learn
"""

import math
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from opd.errors import CancelledError, CheckpointError, OpdError, RunFolderError
from opd.fleet.membership.outage import Outage, OutageHooks
from opd.fleet.metrics import register_metrics
from student.controllers import EvalReport, StepReport
from student.data.plan import StepPlan, plan_step
from student.data.row import Row
from student.job import Job, build_job, fleet_fingerprints
from student.recipe import Recipe
from student.rollout.transformers import rollout
from student.run.checkpoint import latest_checkpoint, save_checkpoint
from student.run.folder import RunFolder
from student.run.interrupts import Interrupts
from student.run.row_counts import count_rows, row_metrics
from student.run.spans import Spans
from student.run.state_io import load_state, save_state
from student.run.telemetry import StageClock, Telemetry


def train(recipe: Recipe, *, resume: bool = False, telemetry: Telemetry | None = None) -> dict[str, Any]:
    """Run a student job to its end.

    Args:
        recipe: the job.
        resume: continue from the newest intact checkpoint of the run folder.
        telemetry: sinks for metrics; made from the recipe when None.

    Returns:
        The summary that is also written to summary.json.

    Raises:
        CancelledError: after Ctrl-C or SIGTERM, when the state has been saved.
        OpdError: anything else that stops a run, with its own exit code.
    """
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        folder, checkpoint = _open(recipe, resume)
        model_path = str(checkpoint / "model") if checkpoint is not None else None
        job = build_job(recipe, stack, model_path=model_path, poll=interrupts.poll)
        main = job.accelerator.is_main_process
        if main and folder is None:
            folder = RunFolder.create(recipe)
            folder.write_provenance(fleet_fingerprints(job.infos))
        if folder is None:
            folder = RunFolder(recipe.run)
        sinks = telemetry or _sinks(folder, recipe, main)
        stack.callback(sinks.close)
        spans = Spans.from_environment(recipe.tracing)
        stack.callback(spans.close)
        if job.fleet is not None:
            register_metrics(job.fleet, sinks.registry)
        return _Run(job, folder, sinks, interrupts, checkpoint, spans).run()


def _sinks(folder: RunFolder, recipe: Recipe, main: bool) -> Telemetry:
    if main:
        return Telemetry(folder, recipe.train.steps, recipe.metrics_port)
    return Telemetry(None, recipe.train.steps, 0, Console(quiet=True))


def _open(recipe: Recipe, resume: bool) -> tuple[RunFolder | None, Path | None]:
    if not resume:
        # Refused before any model loads; made only once everything else has been checked.
        RunFolder.refuse_existing(recipe.run)
        return None, None
    folder = RunFolder.reopen(recipe)
    return folder, latest_checkpoint(folder.checkpoints)


@dataclass
class _Unfinished:
    """A step whose update is done, while what follows it is not: saved when the run stops there.

    Attributes:
        metrics: of the step so far.
        acted: controllers that have acted on the weights.
        observed: whether the controllers have seen the report.
    """

    metrics: dict[str, float]
    acted: int = 0
    observed: bool = False


class _Run:
    """State of a running job."""

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
        self.updates = 0
        self.unfinished: _Unfinished | None = None
        self.begin = time.monotonic()
        self.before: EvalReport | None = None
        self.tokens = 0
        self.saved = self.written = -1  # by all ranks together; by this one
        if checkpoint is not None:
            self._restore(checkpoint)
        if job.accelerator.is_main_process:
            folder.keep_recipe(self.recipe, self.updates)

    def run(self) -> dict[str, Any]:
        """All remaining steps, then the summary; whatever stops them, the state is saved first."""
        hooks = OutageHooks(waiting=self._waiting, emergency=self._emergency, recovered=self._recovered)
        self.job.services.hook_outages(hooks)
        for controller in self.job.controllers:
            controller.start(self.job.services)
        try:
            after = self._train()
        except RunFolderError:
            raise  # Saving is what failed.
        except OpdError as error:
            done, stopped = f"{self.updates} of {self.recipe.train.steps} steps", isinstance(error, CancelledError)
            # Without an update there is nothing to save: a resumed run begins at the beginning.
            path = self._save() if self.updates else None
            said = f"stopped after {done}" if stopped else f"{error} The run stopped after {done}"
            error.args = (f"{said}{f', saved in {path}' if path else ''}; continue with --resume.",)
            raise
        return self._finish(after)

    def _train(self) -> EvalReport | None:
        """All remaining steps, between two evaluations."""
        if self.updates == 0:
            self.before = self._evaluate("before")
        self.sinks.start(self.updates)
        if self.unfinished is not None:
            self._follow_up(self.unfinished, [], StageClock(self.spans))
        while self.updates < self.recipe.train.steps:
            if self.ranks.any(self.interrupts.requested):
                raise CancelledError("stopped by a signal")
            with self.spans.span("opd.step", **{"opd.step": self.updates + 1}):
                self._step(self.updates)
        return self._evaluate("after")

    def _waiting(self, outage: Outage) -> None:
        self.sinks.say(outage.sentence())

    def _emergency(self, outage: Outage) -> None:
        if self.unfinished is not None:
            return  # A controller may be trying other weights.
        path = self._save(together=False)
        self.sinks.say(f"teacher {outage.teacher!r} is away for {outage.seconds:.0f} s; saved {path}")

    def _recovered(self, outage: Outage) -> None:
        self.sinks.say(f"teacher {outage.teacher!r} is back after {outage.seconds:.0f} s")

    def _step(self, step: int) -> None:
        job, clock = self.job, StageClock(self.spans)
        plan = self._plan(step)
        # No update has begun: when a rank cannot go on, the state of all is that of the last step.
        rows = self.ranks.agree(lambda: self._scored(plan, clock))
        sampled = sum(row.length for row in rows)
        costs = job.services.costs
        costs.sampled("train", rows)
        costs.scored("train", job.scorer.positions(rows))
        for controller in job.controllers:
            rows = controller.compose(rows)
        costs.trained("train", rows)
        with clock.stage("learn"):
            metrics = job.learner.step(rows, step)
        self.updates = step + 1
        counts = self.ranks.total(count_rows(rows, sampled) | costs.take())
        self.tokens += int(counts["sampled"])
        spent = {name: value for name, value in counts.items() if name.startswith("cost/")}
        self.unfinished = _Unfinished(metrics | row_metrics(counts) | spent)
        self._follow_up(self.unfinished, rows, clock)

    def _plan(self, step: int) -> StepPlan:
        rollout = self.recipe.rollout
        plan = plan_step(
            step,
            self.job.source.prompts("train", rollout.prompts_per_step, step * rollout.prompts_per_step),
            samples=rollout.samples_per_prompt,
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
        )
        for controller in self.job.controllers:
            plan = controller.plan(plan)
        return plan

    def _follow_up(self, left: _Unfinished, rows: list[Row], clock: StageClock) -> None:
        """What follows an update; broken off, it goes on after a resume with the controller that it had come to."""
        job, metrics = self.job, left.metrics
        with clock.stage("after_update"):
            for controller in job.controllers[left.acted :]:
                job.services.costs.take()  # of a call that was broken off
                found = controller.after_update(self.updates - 1, job.services)
                for name, value in self.ranks.total(job.services.costs.take()).items():
                    metrics[name] = metrics.get(name, 0.0) + value
                metrics |= found
                left.acted += 1
        if not left.observed:
            for controller in job.controllers:
                controller.observe(StepReport(self.updates - 1, metrics, rows))
            left.observed = True
        self._evaluate_now_and_then(metrics, clock)
        self.unfinished = None
        self.saved = self.written = -1  # A checkpoint of this update, if the run stopped here, has become old.
        self._save_now_and_then(clock)
        seconds = sum(clock.seconds.values())
        metrics["tokens_per_second"] = metrics["response_tokens"] / seconds if seconds else 0.0
        if job.accelerator.is_main_process:
            self.sinks.step(self.updates, metrics, clock.seconds)

    def _scored(self, plan: StepPlan, clock: StageClock) -> list[Row]:
        """Sample this rank's rows of the plan, each scored from the moment it is finished."""
        job = self.job

        def submit(row: Row) -> None:
            self.interrupts.poll()
            job.scorer.submit(row)

        with clock.stage("rollout"):
            rows = rollout(
                job.learner.student.lm,
                job.tokenizer,
                plan.shard(self.ranks.index, self.ranks.count).rows,
                job.services.rollout_spec,
                policy_version=self.updates,
                on_row=submit,
            )
        with clock.stage("wait_teacher"):
            job.scorer.collect(rows, poll=self.interrupts.poll)
        return rows

    def _evaluate_now_and_then(self, metrics: dict[str, float], clock: StageClock) -> None:
        last = self.updates == self.recipe.train.steps
        every = self.recipe.eval.every
        if last or not every or self.updates % every:
            return
        with clock.stage("evaluate"):
            result = self._evaluate(f"step {self.updates}")
        if result is None:
            return
        metrics["eval/response_length"] = result.mean_length
        metrics |= _domain_metrics(result)
        if not math.isnan(result.accuracy):
            metrics["eval/accuracy"] = result.accuracy
        if result.reverse_kl is not None:
            metrics["eval/reverse_kl"] = result.reverse_kl

    def _save_now_and_then(self, clock: StageClock) -> None:
        last = self.updates == self.recipe.train.steps
        every = self.recipe.train.checkpoint_every
        if last or (every and self.updates % every == 0):
            with clock.stage("checkpoint"):
                self._save()

    def _evaluate(self, label: str) -> EvalReport | None:
        settings = self.recipe.eval
        if settings.prompts == 0:
            return None
        result = self.job.services.evaluate(
            self.job.source.prompts("heldout", settings.prompts),
            seed_names=("heldout",),
            samples=settings.samples,
            reverse_kl=settings.reverse_kl,
            temperature=settings.temperature,
            purpose=None,
        )
        divergence = "" if result.reverse_kl is None else f", reverse KL {result.reverse_kl:.4f} nats per token"
        parts = ", ".join(f"{name.partition('/')[2]} {value:.3f}" for name, value in _domain_metrics(result).items())
        domains = f" ({parts})" if parts else ""
        accuracy = "unknown" if math.isnan(result.accuracy) else f"{result.accuracy:.3f}"
        self.sinks.say(f"evaluation ({label}): accuracy {accuracy}{domains}{divergence}")
        return result

    def _save(self, *, together: bool = True) -> Path:
        """Save the state after the last update, once; `together` says that all ranks do so at the same time."""
        root = self.folder.checkpoints
        final = root / f"step-{self.updates:06d}"
        if self.saved == self.updates:
            return final
        job = self.job
        if together:
            job.accelerator.wait_for_everyone()
        if job.accelerator.is_main_process and self.written != self.updates:
            final = save_checkpoint(root, self.updates, self._write, keep=self.recipe.train.keep_checkpoints)
            self.written = self.updates
        if together:
            job.accelerator.wait_for_everyone()
            self.saved = self.updates
        return final

    def _write(self, folder: Path) -> None:
        job = self.job
        job.learner.student.lm.save_pretrained(folder / "model")
        job.tokenizer.save_pretrained(folder / "model")
        trainer = folder / "trainer"
        trainer.mkdir()
        save_state(trainer, "learner", job.learner.state_dict())
        save_state(
            trainer,
            "loop",
            {
                "updates": self.updates,
                "tokens": self.tokens,
                "seconds": time.monotonic() - self.begin,
                "seed": self.recipe.seed,
                "before": None if self.before is None else _brief(self.before),
                "unfinished": None if self.unfinished is None else asdict(self.unfinished),
                "objective": job.learner.objective.state_dict(),
                "controllers": {str(i): c.state_dict() for i, c in enumerate(job.controllers)},
            },
        )

    def _restore(self, checkpoint: Path) -> None:
        trainer = checkpoint / "trainer"
        state = load_state(trainer, "loop")
        if state["seed"] != self.recipe.seed:
            raise CheckpointError(
                f"checkpoint {checkpoint} is from a run with seed {state['seed']}, but the recipe has seed "
                f"{self.recipe.seed}; use the same recipe to resume."
            )
        try:
            self.job.learner.load_state_dict(load_state(trainer, "learner"))
            self.job.learner.objective.load_state_dict(state["objective"])
            for i, controller in enumerate(self.job.controllers):
                controller.load_state_dict(state["controllers"].get(str(i), {}))
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"the state in checkpoint {checkpoint} does not fit this recipe or version of opd ({error!r}); resume "
                "with those that wrote it, or begin a new run."
            ) from error
        self.updates = self.saved = self.written = int(state["updates"])
        self.tokens = int(state["tokens"])
        self.begin -= float(state["seconds"])
        self.before = _from_brief(state["before"])
        if state.get("unfinished") is not None:
            self.unfinished = _Unfinished(**state["unfinished"])
        if self.job.accelerator.is_main_process:
            self.folder.cut_metrics(self.updates - (self.unfinished is not None))

    def _finish(self, after: EvalReport | None) -> dict[str, Any]:
        summary = {
            "run": str(self.folder.path),
            "checkpoint": str(self._save()),
            "steps": self.updates,
            "response_tokens": self.tokens,
            "seconds": time.monotonic() - self.begin,
            "before": None if self.before is None else _brief(self.before),
            "after": None if after is None else _brief(after),
        }
        if self.job.accelerator.is_main_process:
            self.folder.write_json("summary.json", summary)
        return summary


def _brief(report: EvalReport) -> dict[str, Any]:
    return {
        "accuracy": None if math.isnan(report.accuracy) else report.accuracy,
        "mean_length": report.mean_length,
        "truncated": report.truncated,
        "reverse_kl": report.reverse_kl,
        "tokens": report.tokens,
        "by_domain": {name: list(found) for name, found in report.by_domain.items()},
    }


def _from_brief(data: dict[str, Any] | None) -> EvalReport | None:
    if data is None:
        return None
    accuracy = math.nan if data["accuracy"] is None else data["accuracy"]
    return EvalReport(**{**data, "accuracy": accuracy}, per_prompt=())


def _domain_metrics(report: EvalReport) -> dict[str, float]:
    """Accuracy of each domain, where there are several."""
    if len(report.by_domain) < 2:
        return {}
    return {f"domain_accuracy/{name}": accuracy for name, (accuracy, _) in report.by_domain.items()}
