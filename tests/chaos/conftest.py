"""A pool of real server processes that can be killed, frozen, restarted and made to fail."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import numpy as np
import pytest
from ports import held_port
from waiting import PATIENCE, wait_until

from opd.fleet.client import TeacherFleet
from opd.fleet.settings import FleetSettings
from opd.wire.types import PayloadSpec, ScoreItem, Scores
from teacher_server.engines.base import EngineItem

ENGINE = Path(__file__).parents[1] / "teacher_server"
ROOT = Path(__file__).parents[2]
PROGRAMS = f"{ENGINE}{os.pathsep}{ROOT / 'tests' / 'support'}"


def engine_class() -> Any:
    spec = importlib.util.spec_from_file_location("numpy_teacher", ENGINE / "numpy_teacher.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.NumpyEngine


class Replica:
    """One server process at a fixed address; teacher "t" on the numpy engine unless `flags` say otherwise."""

    def __init__(self, folder: Path, *flags: str, prefix: tuple[str, ...] = (), host: str = "127.0.0.1") -> None:
        self.port = held_port()
        self.address = f"{host}:{self.port}"
        self.prefix = prefix
        self.flags = flags
        self._folder = folder
        self._folder.mkdir()
        self._starts = 0
        self.process: forked.Program | subprocess.Popen[bytes] | None = None

    def start(self, *flags: str, wait: bool = True) -> "Replica":
        self._starts += 1
        port_file = self._folder / f"port{self._starts}"
        command = [
            *self.prefix,
            sys.executable,
            "-m",
            "faulty_server" if "--fault" in (flags or self.flags) else "teacher_server",
            "--port",
            str(self.port),
            "--metrics-port",
            "-1",
        ]
        command += ["--port-file", str(port_file), *(flags or self.flags)]
        if "--model" not in command:
            command += ["--engine", "numpy_teacher:NumpyEngine", "--model", "t=numpy"]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ENGINE}{os.pathsep}{ENGINE.parent / 'support'}",
        }
        log = self._folder / "log"
        if self.prefix:
            with log.open("ab") as file:
                self.process = subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT, env=environment)
        else:
            self.process = forked.Program(command, cwd=ROOT, env=environment, log=log)
        self._ready = port_file
        if wait:
            self.wait()
        return self

    @property
    def ready(self) -> bool:
        return self._ready.exists() and self.process is not None and self.process.poll() is None

    def wait(self) -> None:
        process, log = self.process, self._folder / "log"
        assert process is not None
        wait_until(lambda: self._ready.exists() or process.poll() is not None, 4 * PATIENCE, why=log.read_text)
        assert process.poll() is None, log.read_text()

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        if self.process is not None:
            self.process.wait(PATIENCE)


@pytest.fixture(scope="session")
def replica() -> type[Replica]:
    """For servers that outlive a test."""
    return Replica


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Callable[..., list[Replica]]]:
    """pool(n, *flags) starts n replicas at once and waits until they serve; all are killed at the end."""
    made: list[Replica] = []

    def start(count: int, *flags: str, **where: Any) -> list[Replica]:
        fresh = [Replica(tmp_path / f"replica{len(made) + i}", *flags, **where) for i in range(count)]
        made.extend(fresh)
        for replica in fresh:
            replica.start(wait=False)
        for replica in fresh:
            replica.wait()
        return fresh

    yield start
    for replica in made:
        replica.kill()


SPEC = PayloadSpec.topk(8, "f32")


def numbers(scores: Scores) -> bytes:
    parts = (scores.sampled, scores.values, scores.ids, scores.log_tail)
    return b"".join(part.tobytes() for part in parts if part is not None)


class Work:
    """Steps of rows as a trainer would submit them, and what a calm fleet answers."""

    def __init__(self, vocab: int, engine: Any) -> None:
        self._vocab = vocab
        self._engine = engine

    def rows(self, step: int, count: int = 32) -> list[ScoreItem]:
        rng = np.random.default_rng(step)
        made = []
        for _ in range(count):
            prompt, response = int(rng.integers(4, 20)), int(rng.integers(4, 200))
            made.append(ScoreItem(rng.integers(0, self._vocab, prompt + response, dtype=np.uint32), prompt))
        return made

    def calm(self, step: int, count: int = 32) -> list[bytes]:
        found = self._engine.score([EngineItem(item, SPEC) for item in self.rows(step, count)])
        return [numbers(scores) for scores in found]

    def run(self, fleet: TeacherFleet, steps: range, between: Callable[[int], None] = lambda step: None) -> int:
        """Score the steps, calling `between(step)` while each is under way; returns the rows that came back right."""
        right = 0
        for step in steps:
            rows = self.rows(step)
            futures = fleet.submit_many("t", rows, SPEC, groups=[str(i // 4) for i in range(len(rows))])
            between(step)
            got = [numbers(scores) for scores in fleet.wait(futures)]
            assert got == self.calm(step)
            right += len(got)
        counters = fleet.status().counters
        assert counters.rows_answered == counters.rows_submitted, counters
        assert counters.rows_failed == counters.rows_cancelled == 0, counters
        return right


@pytest.fixture
def chaos() -> SimpleNamespace:
    """work: rows and their right answers; connect(replicas, **settings); wait_until, which gives the seconds."""
    engine = engine_class()("numpy")

    def connect(replicas: list[Replica], **settings: Any) -> TeacherFleet:
        # On a busy machine a replica may seem dead several times while a row is with it.
        calls = {"attempts": 100, **settings.pop("calls", {})}
        patient = FleetSettings.model_validate({"connect_seconds": PATIENCE, "calls": calls, **settings})
        fleet = TeacherFleet.connect([r.address for r in replicas], settings=patient)
        wait_until(lambda: all(state(fleet, replica) == "healthy" for replica in replicas))
        return fleet

    def timed(condition: Callable[[], bool]) -> float:
        start = time.monotonic()
        wait_until(condition)
        return time.monotonic() - start

    def state(fleet: TeacherFleet, replica: Replica) -> str:
        return next((r.state for r in fleet.status().replicas if r.address == replica.address), "absent")

    work = Work(engine.VOCAB, engine)
    return SimpleNamespace(
        work=work, engine=engine, connect=connect, wait_until=timed, state=state, spec=SPEC, numbers=numbers
    )


def ip(*arguments: str) -> bool:
    return subprocess.run(["ip", *arguments], capture_output=True, check=False).returncode == 0


@pytest.fixture
def cable() -> Iterator[SimpleNamespace]:
    """A network namespace behind a virtual cable that can be pulled: packets vanish, without any notice."""
    tag = f"{os.getpid() % 10_000}"
    name, here, there = f"opd{tag}", f"opdh{tag}", f"opdt{tag}"
    net = f"10.213.{os.getpid() % 250}"
    made = shutil.which("ip") is not None and ip("netns", "add", name)
    try:
        made = (
            made
            and ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
            and ip("addr", "add", f"{net}.1/30", "dev", here)
            and ip("link", "set", here, "up")
            and ip("-n", name, "addr", "add", f"{net}.2/30", "dev", there)
            and ip("-n", name, "link", "set", there, "up")
            and ip("-n", name, "link", "set", "lo", "up")
        )
        if not made:
            pytest.skip("network namespaces are not allowed here")

        def pull(out: bool) -> None:
            assert ip("-n", name, "link", "set", there, "down" if out else "up")

        yield SimpleNamespace(prefix=("ip", "netns", "exec", name), host=f"{net}.2", pull=pull)
    finally:
        if shutil.which("ip") is not None:
            ip("link", "del", here)
            ip("netns", "del", name)
