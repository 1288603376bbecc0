"""Experiment trackers besides metrics.jsonl: TensorBoard, Trackio, Weights & Biases, MLflow, through accelerate.

A tracker is a convenience: if it raises, at the start or later, it is left out, and the run continues.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from opd.config.text import flatten
from opd.errors import one_line
from student.settings.trackers import TrackerSettings

_logger = logging.getLogger(__name__)
_COLUMNS = ("step", "label", "prompt", "answer", "verdict", "reward", "kl", "tokens")


class Trackers:
    """Hands metrics, answers and the report of a run to its trackers.

    Args:
        settings: the trackers.
        folder: the run folder, for what trackers write locally.
        recipe: the resolved recipe, shown as the run's configuration.
        log: called with a line for the console if a tracker fails.

    Attributes:
        failures: number of trackers that failed and are not used any more.
    """

    def __init__(
        self, settings: Sequence[TrackerSettings], folder: Path, recipe: Mapping[str, Any], log: Callable[[str], None]
    ) -> None:
        self._log, self._folder = log, folder
        self._live: dict[str, Any] = {}
        self.failures = 0
        for one in settings:
            self._attempt(one.name, lambda one=one: self._start(one, recipe))  # type: ignore[misc]

    def step(self, step: int, metrics: Mapping[str, float], stages: Mapping[str, float]) -> None:
        """Record the metrics of a step, under the names of metrics.jsonl."""
        values = dict(metrics) | {f"seconds/{stage}": seconds for stage, seconds in stages.items()}
        self._each(lambda tracker: tracker.log(values, step=step))

    def samples(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Record answers as in samples.jsonl: as a table if the tracker has tables, otherwise as text."""
        if not records:
            return
        step, label = int(records[0]["step"]), str(records[0]["label"])
        rows = [[_cell(record.get(column)) for column in _COLUMNS] for record in records]
        lines = "\n\n".join(f"{r.get('prompt')}\n{r.get('answer')}\n({r.get('verdict')})" for r in records)

        def show(tracker: Any) -> None:
            if tracker.name == "mlflow":
                import mlflow

                mlflow.log_table(
                    dict(zip(_COLUMNS, zip(*rows, strict=True), strict=True)), f"samples-{step:06d}-{label}.json"
                )
            elif tracker.name == "wandb":
                tracker.log_table(f"samples/{label}", columns=list(_COLUMNS), data=rows, step=step)
            else:
                tracker.log({f"samples/{label}": lines}, step=step)

        self._each(show)

    def close(self, report: Path | None = None) -> None:
        """Upload the report to trackers that keep files, and close all trackers."""

        def end(tracker: Any) -> None:
            if report is not None and report.exists():
                if tracker.name == "mlflow":
                    tracker.log_artifact(str(report))
                elif tracker.name == "wandb":
                    tracker.run.save(str(report), base_path=str(report.parent), policy="now")
            tracker.finish()

        self._each(end)
        self._live.clear()

    def _start(self, one: TrackerSettings, recipe: Mapping[str, Any]) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        place = {
            "tensorboard": {"logging_dir": str(self._folder / "tensorboard")},
            "trackio": {"name": self._folder.name},
            "wandb": {"name": self._folder.name, "dir": str(self._folder)},
            "mlflow": {"run_name": self._folder.name},
        }[one.name]
        tracker = LOGGER_TYPE_TO_CLASS[one.name](one.project, **{**place, **one.options})
        tracker.start()
        tracker.store_init_configuration(_flat(recipe))
        self._live[one.name] = tracker

    def _each(self, act: Callable[[Any], object]) -> None:
        for name, tracker in list(self._live.items()):
            self._attempt(name, lambda tracker=tracker: act(tracker))  # type: ignore[misc]

    def _attempt(self, name: str, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:
            self.failures += 1
            self._live.pop(name, None)
            _logger.debug("tracker %s failed", name, exc_info=True)
            why = one_line(error, 160)
            self._log(f"tracker {name} failed and is not used from now on: {type(error).__name__}: {why}")


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _flat(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe as dotted keys with plain values, which all trackers accept."""
    plain = (str, int, float, bool)
    return {key: value if isinstance(value, plain) else str(value) for key, value in flatten(recipe).items()}
