"""The models of the lab and the servers that offer them."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from opd.errors import UnavailableError
from opd.tiny.build import build_world
from opd.tiny.plans import Progress
from opd.tiny.summary import ModelSummary, WorldSummary

START_SECONDS = 600
PRESETS = {"full": "lab", "quick": "test"}
_QUICK_NAMES = {"base": "student"}
"""Models of the short form; every other name means its one teacher."""


@dataclass(frozen=True, slots=True)
class Cast:
    """The world with the names that experiments use: in the short form few models play all parts."""

    world: WorldSummary
    form: str

    def model(self, name: str) -> ModelSummary:
        """The model that plays `name`."""
        actual = name if self.form == "full" else _QUICK_NAMES.get(name, "teacher")
        return self.world.models[actual]


def open_world(root: Path, form: str, progress: Progress | None = None) -> Cast:
    """The world of a form ("full" or "quick"), built when it is missing."""
    return Cast(build_world(root / f"world-{PRESETS[form]}", PRESETS[form], seed=0, progress=progress), form)


@contextmanager
def served(cast: Cast, models: Sequence[str], folder: Path) -> Iterator[str]:
    """A teacher server with `models` of the cast, in a process of its own; gives its address."""
    folder.mkdir(parents=True, exist_ok=True)
    ports, log = folder / "server.ports", folder / "server.log"
    ports.unlink(missing_ok=True)
    flags = [flag for name in models for flag in ("--model", f"{name}={cast.model(name).path}")]
    flags += ["--port", "0", "--metrics-port", "-1", "--threads", "1", "--device", "cpu", "--deterministic"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "teacher_server", *flags, "--port-file", str(ports), "--grace", "5"],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not ports.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise UnavailableError(f"the teacher server did not start; see {log}.")
            time.sleep(0.1)
        yield ports.read_text().split()[0]
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
