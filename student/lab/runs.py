"""One run of the lab: a recipe in a folder, trained by the same loop as `opd train`, resumable.

A folder is reused when it holds a finished run of the same recipe, resumed when it holds an interrupted one, and
emptied otherwise.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opd.config import parse_settings

_VOLATILE = ("run", "teachers.endpoints", "teachers.default")


@dataclass(frozen=True, slots=True)
class Run:
    """A recipe to be trained.

    Attributes:
        arm: name of the arm.
        seed: run seed.
        folder: run folder.
        recipe: complete recipe, without `run`.
        rate: the learning rate, for the table.
    """

    arm: str
    seed: int
    folder: Path
    recipe: Mapping[str, Any] = field(hash=False)
    rate: float = 0.0

    @property
    def key(self) -> str:
        """Hash of all in the recipe that decides the result, 16 hex digits."""
        kept = {k: v for k, v in flatten(self.recipe).items() if k not in _VOLATILE}
        return hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=8).hexdigest()

    @property
    def done(self) -> bool:
        """Whether the folder holds the finished run of this recipe."""
        return self._mark() == self.key and (self.folder / "summary.json").is_file()

    def _mark(self) -> str | None:
        path = beside(self.folder, ".key")
        return path.read_text() if path.is_file() else None

    def prepare(self) -> bool:
        """Make the folder ready; returns whether there is something to resume."""
        if self._mark() == self.key and any((self.folder / "checkpoints").glob("step-*/manifest.json")):
            return True
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        beside(self.folder, ".key").write_text(self.key)
        return False

    def records(self) -> list[dict[str, Any]]:
        """All records of metrics.jsonl."""
        text = (self.folder / "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def summary(self) -> dict[str, Any]:
        """The run's summary.json."""
        data: dict[str, Any] = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        return data


def beside(folder: Path, suffix: str) -> Path:
    """The file next to `folder` with its name and `suffix`; with_suffix would cut a rate like 0.001."""
    return folder.with_name(folder.name + suffix)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def merge(tree: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `tree` with dotted keys replaced; a number in a key is an index of a list."""
    result: dict[str, Any] = json.loads(json.dumps(tree))
    for key, value in overrides.items():
        node: Any = result
        *parents, last = key.split(".")
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        if isinstance(node, list):
            node[int(last)] = value
        else:
            node[last] = value
    return result


def train_run(run: Run) -> Run:
    """Train `run` to its end in this process; returns at once when it is done already.

    Raises:
        OpdError: when the run fails, or is stopped by a signal (then it goes on from its checkpoint next time).
    """
    # Imported here: a parent that only schedules needs no torch.
    from rich.console import Console

    from student.loop import train
    from student.recipe import Recipe
    from student.run.folder import RunFolder
    from student.run.telemetry import Telemetry

    if run.done:
        return run
    resume = run.prepare()
    recipe = parse_settings(Recipe, {"run": str(run.folder), **run.recipe}, source=f"arm {run.arm}")
    cpu, wall = time.process_time(), time.monotonic()
    with beside(run.folder, ".log").open("a", encoding="utf-8") as log:
        sinks = Telemetry(RunFolder(run.folder), recipe.train.steps, 0, Console(file=log, width=120))
        try:
            train(recipe, resume=resume, telemetry=sinks)
        finally:
            _add_times(run, time.process_time() - cpu, time.monotonic() - wall, fresh=not resume)
    return run


def _add_times(run: Run, cpu: float, wall: float, *, fresh: bool) -> None:
    path = beside(run.folder, ".times.json")
    before = {"cpu": 0.0, "wall": 0.0} if fresh or not path.is_file() else json.loads(path.read_text())
    path.write_text(json.dumps({"cpu": before["cpu"] + cpu, "wall": before["wall"] + wall}))


def times(run: Run) -> dict[str, float]:
    """CPU and wall-clock seconds of the run, evaluations included; resumed parts added up."""
    path = beside(run.folder, ".times.json")
    data: dict[str, float] = json.loads(path.read_text()) if path.is_file() else {"cpu": 0.0, "wall": 0.0}
    return data
