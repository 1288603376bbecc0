"""One run of the lab: a recipe in a folder, trained by the loop of `opd train`, and resumable.

The name of the folder ends in a hash of all that decides the result, in which paths are relative to the lab's root. So
the lab may be moved, a changed recipe gets its own folder, and an interrupted run is found again.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from opd.config import parse_settings
from opd.config.text import flatten
from opd.errors import DataError
from opd.files import write_whole
from opd_lab.experiment import Replicate

_VOLATILE = ("run", "teachers.endpoints")


@dataclass(frozen=True)
class Run:
    """A recipe to be trained.

    Attributes:
        arm: name of the arm.
        replicate: world and run seed.
        place: path of the run folder without the hash at the end of its name.
        recipe: complete recipe, without `run`.
        rate: the learning rate, for the table of results.
        root: folder of the lab.
        world_key: hash of all that decides the world's weights.
    """

    arm: str
    replicate: Replicate
    place: Path
    recipe: Mapping[str, Any] = field(hash=False)
    rate: float = 0.0
    root: Path = Path()
    world_key: str = ""

    @cached_property
    def key(self) -> str:
        """Hash of all that decides the result, as 16 hex digits."""
        return content_key(self.root, [lasting(self.recipe), self.world_key])

    @property
    def folder(self) -> Path:
        """The run folder."""
        return beside(self.place, f"-{self.key[:8]}")

    @property
    def name(self) -> str:
        """The run folder as shown to the user: relative to the lab's root, if it is below it."""
        return str(self.folder.relative_to(self.root)) if self.folder.is_relative_to(self.root) else str(self.folder)

    @property
    def done(self) -> bool:
        """Whether the run is finished."""
        return (self.folder / "summary.json").is_file()

    @property
    def resumable(self) -> bool:
        """Whether the run has a checkpoint to continue from."""
        return any((self.folder / "checkpoints").glob("step-*/manifest.json"))

    @property
    def abandoned(self) -> bool:
        """Whether the run was interrupted before its first checkpoint, so that it has to begin again."""
        return self.folder.exists() and not self.done and not self.resumable

    @property
    def model(self) -> Path:
        """The folder of a finished run's last weights, correct even if the lab has been moved."""
        return self.folder / "checkpoints" / Path(self.summary()["checkpoint"]).name / "model"

    def records(self) -> list[dict[str, Any]]:
        """The records of all steps in metrics.jsonl.

        Raises:
            DataError: when the file is damaged.
        """
        path = self.folder / "metrics.jsonl"
        try:
            records = [json.loads(line) for line in path.read_bytes().splitlines()]
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is damaged ({error}); remove {self.folder} and run the arm again.") from error
        return [record for record in records if record["step"]]

    def summary(self) -> dict[str, Any]:
        """The run's summary.json.

        Raises:
            DataError: when it is damaged.
        """
        return read_json(self.folder / "summary.json", f"remove {self.folder} and run the arm again")


def read_json(path: Path, advice: str) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises:
        DataError: when the file is missing or damaged; the message ends with `advice`.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is damaged ({error}); {advice}.") from error
    if not isinstance(data, dict):
        raise DataError(f"{path} is damaged (no JSON object); {advice}.")
    return data


def lasting(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a recipe that decide the result, by dotted key: all but the run folder and server addresses."""
    return {key: value for key, value in flatten(recipe).items() if key not in _VOLATILE}


def content_key(root: Path, parts: Any) -> str:
    """Hash of JSON values as 16 hex digits, in which paths below the lab's root are taken relative to it."""
    # Paths are replaced in the text, since they may be anywhere in it. It must not be escaped to ASCII, or a root with
    # other letters would not be found.
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False).replace(f"{root}/", "")
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def beside(folder: Path, suffix: str) -> Path:
    """The path next to `folder` with `suffix` added to its name; `with_suffix` would cut off part of a rate 0.001."""
    return folder.with_name(folder.name + suffix)


def merge(tree: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of `tree` with dotted keys replaced; a number in a key is an index if it meets a list."""
    # Copied through JSON, which also turns tuples into lists, as they are in the YAML of a recipe.
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
    """Train `run` to its end in this process and return it; does nothing if it is done already.

    A run that was interrupted before its first checkpoint begins again in an empty folder.

    Raises:
        OpdError: when the run fails, or is stopped by a signal, after which the next call continues it.
    """
    # Imported here, because a parent process that only schedules runs does not need torch.
    from opd.console import Console
    from student.job.session import train
    from student.report.telemetry import Telemetry
    from student.run.folder import RunFolder
    from student.settings.recipe import Recipe

    if run.done:
        return run
    resume = run.resumable
    if run.abandoned:
        shutil.rmtree(run.folder)
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    recipe = parse_settings(Recipe, {"run": str(run.folder), **run.recipe}, source=f"arm {run.arm}")
    cpu, wall = time.process_time(), time.monotonic()
    with beside(run.folder, ".log").open("a", encoding="utf-8") as file:
        sinks = Telemetry(RunFolder(run.folder), recipe.train.steps, 0, Console(file=file, width=120))
        try:
            train(recipe, resume=resume, telemetry=sinks)
        finally:
            # Written for a run that was stopped too; when it is resumed, its further times are added.
            _add_times(run, time.process_time() - cpu, time.monotonic() - wall, fresh=not resume)
    return run


def _add_times(run: Run, cpu: float, wall: float, *, fresh: bool) -> None:
    path = beside(run.folder, ".times.json")
    before = {"cpu": 0.0, "wall": 0.0} if fresh or not path.is_file() else json.loads(path.read_text())
    write_whole(path, json.dumps({"cpu": before["cpu"] + cpu, "wall": before["wall"] + wall}))


def times(run: Run) -> dict[str, float]:
    """CPU ("cpu") and wall-clock ("wall") seconds of the run, evaluations included, summed over resumed parts."""
    path = beside(run.folder, ".times.json")
    data: dict[str, float] = json.loads(path.read_text()) if path.is_file() else {"cpu": 0.0, "wall": 0.0}
    return data
