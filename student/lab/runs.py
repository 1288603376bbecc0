"""One run of the lab: a recipe in a folder, trained by `opd train` in a process of its own, resumable.

A folder is reused when it holds a finished run of the same recipe, resumed when it holds an interrupted one, and
emptied otherwise.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from opd.errors import OpdError

_VOLATILE = ("run", "teachers.endpoints")
_STOP_SECONDS = 60


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


class Launcher:
    """Starts runs as processes and stops them all when asked to."""

    def __init__(self) -> None:
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def train(self, run: Run) -> None:
        """Train `run` to its end; returns at once when it is done already.

        Raises:
            OpdError: when the process fails; names its log.
        """
        if run.done:
            return
        resume = run.prepare()
        recipe_file, log = beside(run.folder, ".yaml"), beside(run.folder, ".log")
        recipe_file.write_text(yaml.safe_dump({"run": str(run.folder), **run.recipe}, sort_keys=False))
        command = [sys.executable, "-m", "opd.cli", "train", str(recipe_file), *(["--resume"] if resume else [])]
        begin = time.monotonic()
        with log.open("ab") as out:
            process = self._start(command, out)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        with self._lock:
            self._processes.discard(process)
        _add_times(run, usage.ru_utime + usage.ru_stime, time.monotonic() - begin, fresh=not resume)
        if process.returncode != 0:
            raise OpdError(f"run {run.folder} ended with exit code {process.returncode}; see {log}.")

    def _start(self, command: list[str], out: Any) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        with self._lock:
            if self._stopped:
                raise OpdError("the lab was stopped; start it again to go on.")
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
            self._processes.add(process)
        return process

    def stop(self) -> None:
        """Ask all running processes to save and stop; later runs are refused."""
        with self._lock:
            self._stopped = True
            running = list(self._processes)
        for process in running:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        while self._processes and time.monotonic() < deadline:
            time.sleep(0.1)


def _add_times(run: Run, cpu: float, wall: float, *, fresh: bool) -> None:
    path = beside(run.folder, ".times.json")
    before = {"cpu": 0.0, "wall": 0.0} if fresh or not path.is_file() else json.loads(path.read_text())
    path.write_text(json.dumps({"cpu": before["cpu"] + cpu, "wall": before["wall"] + wall}))


def times(run: Run) -> dict[str, float]:
    """CPU and wall-clock seconds of the run's process, start-up and evaluations included; resumed parts added up."""
    path = beside(run.folder, ".times.json")
    data: dict[str, float] = json.loads(path.read_text()) if path.is_file() else {"cpu": 0.0, "wall": 0.0}
    return data
