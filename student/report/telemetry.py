"""The output of a running student: metrics.jsonl, Prometheus series, progress bar and console lines.

The Prometheus series are in `student.report.series`; docs/metrics.md lists them.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from opd import __version__
from opd.console import Console
from opd.errors import PortInUseError
from opd.fleet.metrics import register_metrics
from opd.fleet.source import ScoreSource
from opd.fleet.status.of_run import FLEET_PAGE
from opd.printable import printable
from opd.telemetry.logs import is_json
from opd.telemetry.metrics_http import serve_metrics
from opd.telemetry.tracing import Spans, Timeline
from student.report.ending import keep_report
from student.report.series import Series
from student.report.shown import ALWAYS, FILE, Figures, held
from student.report.trackers import Trackers
from student.run.folder import RunFolder
from student.settings.recipe import Recipe

_logger = logging.getLogger(__name__)
_WIDE = 110
"""Columns of a terminal with room for a bar and the elapsed time next to the figures."""


def check_port(port: int, host: str = "127.0.0.1") -> None:
    """Check that the metrics port is free, before a model is loaded; port 0 means no endpoint.

    Only rank 0 opens the port, so only it checks: ranks of one machine would find each other's checks in their way.

    Raises:
        PortInUseError: if the port cannot be opened.
    """
    if port and os.environ.get("RANK", "0") == "0":
        server, thread = _open_port(CollectorRegistry(), port, host, {})
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)


def _open_port(
    registry: CollectorRegistry, port: int, host: str, pages: Mapping[str, Callable[[], str]]
) -> tuple[Any, Any]:
    try:
        return serve_metrics(registry, port, host, pages=pages)
    except OSError as error:
        raise PortInUseError(
            f"metrics port {port} cannot be opened on {host} ({error.strerror}); set metrics_port to a free port, or "
            "to 0 for none."
        ) from error


_STILL_STEPS = (5, 50, 500)
"""Consecutive steps without a gradient after which a warning is logged."""


def _stillness(steps: int, metrics: Mapping[str, float]) -> str:
    text = f"the gradient has been exactly 0 for {steps} steps, so the student learns nothing"
    if "reward" not in metrics:
        return f"{text}; check the weights of the rows and terms."
    return (
        f"{text}: the rewards within each group are all equal (mean {metrics['reward']:.3f}); check the verdicts in "
        "samples.jsonl, or use prompts that the student solves sometimes."
    )


def _places(endpoints: Sequence[str] | Mapping[str, Sequence[str]]) -> str:
    """Where teachers are, in a few words."""
    if isinstance(endpoints, Mapping):
        return "; ".join(f"{name}: {_places(places)}" for name, places in endpoints.items())
    return ", ".join(endpoints[:3]) + (f" and {len(endpoints) - 3} more" if len(endpoints) > 3 else "") or "no server"


class StageClock:
    """Measures the seconds of each stage of a step, and records a span for each.

    Args:
        spans: records the spans; None for none.
        step: number of steps done at the start.

    Attributes:
        seconds: seconds by stage; stages do not overlap.
        beside: metrics of what ran at the same time in another thread.
    """

    def __init__(self, spans: Spans | None = None, step: int = 0) -> None:
        self.seconds: dict[str, float] = {}
        self.beside: dict[str, float] = {}
        self._spans = spans or Spans()
        self._step = step
        self._within = 0.0  # seconds of finished stages nested in the current one

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the duration of the block to stage `name`, without that of stages nested in it."""
        begin, outer, self._within = time.monotonic(), self._within, 0.0
        try:
            with self._spans.span(name, {"step": self._step}, "learner"):
                yield
        finally:
            end = time.monotonic()
            self.seconds[name] = self.seconds.get(name, 0.0) + end - begin - self._within
            self._within = outer + end - begin

    def draw(self, track: str, name: str, begin: float, end: float) -> None:
        """Record a span of another track; times are seconds of `time.monotonic()`."""
        self._spans.add(name, begin, end, {"step": self._step}, track=track)


class Telemetry:
    """Writes each step's metrics to every sink.

    Args:
        folder: run folder for metrics.jsonl, or None.
        total_steps: number of steps, for the progress bar.
        port: port of the Prometheus endpoint; 0 for none.
        console: where lines and the bar are printed.
        host: address of the Prometheus endpoint.

    Attributes:
        folder: the run folder, or None.
        timeline: records what ran when; written with the checkpoints and at the end.
        trackers: experiment trackers, which also receive everything; None without any.
    """

    def __init__(
        self,
        folder: RunFolder | None,
        total_steps: int,
        port: int,
        console: Console | None = None,
        *,
        host: str = "127.0.0.1",
    ) -> None:
        self.folder = folder
        self._total = total_steps
        self.console = console or Console(stderr=True)
        self.registry = CollectorRegistry()
        self._series = Series(self.registry)
        self._pages: dict[str, Callable[[], str]] = {}
        self._server: Any = None
        if port:
            self._server = _open_port(self.registry, port, host, self._pages)
        self.timeline = Timeline(None if folder is None else folder.path / "timeline.json")
        self.trackers: Trackers | None = None
        self._shown = ALWAYS
        self._still = 0
        self._began = (0, 0.0)  # step and time.monotonic() of the start
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    @classmethod
    def of(cls, recipe: Recipe, folder: RunFolder, *, main: bool) -> "Telemetry":
        """The sinks that a recipe asks for; ranks other than the main one show and write nothing."""
        steps = recipe.train.steps
        if not main:
            return cls(None, steps, 0, Console(quiet=True))
        sinks = cls(folder, steps, recipe.metrics_port, host=recipe.metrics_host)
        if recipe.trackers:
            sinks.trackers = Trackers(recipe.trackers, folder.path, recipe.model_dump(mode="json"), sinks.log)
        return sinks

    def introduce(self, recipe: Recipe, device: str) -> None:
        """Say what runs, on the console and on the Prometheus endpoint."""
        objective = ", ".join(dict.fromkeys(str(term["name"]) for term in recipe.objective))
        self._series.inform(str(recipe.run), objective)
        rows = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt
        teachers = "no teachers" if recipe.teachers is None else f"teachers at {_places(recipe.teachers.endpoints)}"
        self.log(
            f"opd {__version__} trains {recipe.model.path} on {device}: {objective}, {teachers}, "
            f"{recipe.train.steps} steps of {rows} rows, into {recipe.run}"
        )

    def start(self, done: int, shown: Figures) -> None:
        """Show the progress bar from step `done` on, with the figures `shown` first."""
        self._shown = {**shown, **ALWAYS}
        self._series.progress(done, self._total)
        self._began = (done, time.monotonic())
        if self.folder is not None:
            self.folder.write_json(FILE, shown)
        whole = partial(Column, no_wrap=True)
        wide = self.console.width >= _WIDE
        self._progress = Progress(
            TextColumn("[bold]{task.description}", table_column=whole()),
            *((BarColumn(bar_width=20),) if wide else ()),
            MofNCompleteColumn(table_column=whole()),
            *((TimeElapsedColumn(table_column=whole()),) if wide else ()),
            TimeRemainingColumn(table_column=whole()),
            TextColumn("{task.fields[note]}", table_column=whole()),
            console=self.console,
            disable=is_json(),
        )
        self._task = self._progress.add_task("training", total=self._total, completed=done, note="")
        self._progress.start()

    def step(self, step: int, metrics: Mapping[str, float], stages: Mapping[str, float]) -> None:
        """Record the metrics of step number `step`, counted from 1, and its tokens per second."""
        seconds = sum(stages.values())
        tokens = metrics.get("response_tokens", 0.0)
        metrics = {**metrics, "tokens_per_second": tokens / seconds if seconds else 0.0}
        record = {"step": step, **metrics, "seconds": dict(stages)}
        if self.folder is not None:
            self.folder.append_metrics(record)
        self._series.record(metrics, stages)
        self._series.progress(step, self._total)
        if self.trackers is not None:
            self.trackers.step(step, metrics, stages)
        if any(name.startswith("eval/") for name in metrics):
            self._keep_report()
        self._still = self._still + 1 if metrics.get("grad_norm") == 0.0 else 0
        if self._still in _STILL_STEPS:
            self.log(_stillness(self._still, metrics))
        note = "  ".join(f"{label} {metrics[name]:.4g}" for label, name in held(self._shown, metrics).items())
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, note=note)
            if (is_json() or not self.console.is_terminal) and (
                step % max(1, self._total // 20) == 0 or step == self._total
            ):
                speed = f"{seconds:.3g} s  {metrics['tokens_per_second']:.0f} tokens/s  {self._left(step)} left"
                shown = {name: metrics[name] for name in held(self._shown, metrics).values()}
                self.log(f"step {step}/{self._total}  {note}  {speed}", step=step, steps=self._total, metrics=shown)

    def _left(self, step: int) -> timedelta:
        """Time left, if the steps to come take as long as those so far, with whatever runs between them."""
        done, begin = self._began
        return timedelta(seconds=round((time.monotonic() - begin) / max(1, step - done) * (self._total - step)))

    def recall(self, step: int, metrics: Mapping[str, float], stages: Mapping[str, float]) -> None:
        """Record a step from a checkpoint, if the run was killed before the line of the step was written."""
        if self.folder is not None and self.folder.last_step() < step:
            self.step(step, metrics, stages)

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Record the evaluation before the first step, as step 0."""
        if self.folder is not None:
            self.folder.append_metrics({"step": 0, **metrics})
        self._series.show(metrics)
        if self.trackers is not None:
            self.trackers.step(0, metrics, {})
        self._keep_report()

    def _keep_report(self) -> None:
        """Write the page of the run so far, after an evaluation."""
        if self.folder is not None:
            keep_report(self.folder.path)

    def show_fleet(self, fleet: ScoreSource) -> None:
        """Serve the run's own view of its teachers, as metrics and, for `opd fleet status --run`, whole."""
        register_metrics(fleet, self.registry)
        self._pages[FLEET_PAGE] = lambda: json.dumps(asdict(fleet.status()))

    def samples(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Keep answers as lines of samples.jsonl."""
        if self.folder is not None:
            self.folder.append_samples(records)
        if self.trackers is not None:
            self.trackers.samples(records)

    def saved(self) -> None:
        """Record that everything up to now is in a checkpoint."""
        self._series.saved()
        self.timeline.write()

    def log(self, line: str, **fields: Any) -> None:
        """Print one line, with its time, or log it with its fields where logs are JSON."""
        if is_json():
            # A quiet console is that of a rank which says nothing.
            if not self.console.quiet:
                _logger.info(line, extra=fields)
            return
        said = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(line, lines=False)}"
        self.console.print(said, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Stop the bar and the endpoint."""
        if self._progress is not None:
            self._progress.stop()
        self.timeline.write()
        if self.trackers is not None:
            self.trackers.close(None if self.folder is None else self.folder.path / "report.html")
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join(timeout=5)
