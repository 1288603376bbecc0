"""A training run ends with the calm run's weights and numbers, bit for bit, whatever happens to its teachers.

Every storm is played by a thread beside a run of 50 steps, at fixed steps of it, and must show that it happened.
"""

import hashlib
import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import wait_until

from opd.config import parse_settings
from student.commands.reproduce import is_timed
from student.job.session import train
from student.settings.recipe import Recipe

STEPS = int(os.environ.get("OPD_CHAOS_STEPS", "50"))

Pool = Callable[..., list[Any]]


def recipe_for(world: Path, run: Path, addresses: list[str], health: dict[str, Any]) -> Recipe:
    fleet = {
        "health": {"ping_seconds": 0.5, "ping_timeout_seconds": 1.0, "revive_seconds": 0.2, **health},
        "calls": {"rows": 2, "attempts": 100},  # on a busy machine a replica may seem dead while a row is with it
        "outage": {"emergency_after_seconds": 5.0},
    }
    return parse_settings(
        Recipe,
        {
            "run": str(run),
            "model": {"path": str(world / "student")},
            "teachers": {"endpoints": addresses, "default": "teacher", "fleet": fleet},
            "prompts": {"task": "addition", "options": {"digits": 2}},
            "rollout": {"prompts_per_step": 8, "max_new_tokens": 12, "max_prompt_tokens": 32},
            "objective": [{"name": "opd", "payload": "gather", "k": 8}],
            "train": {"steps": STEPS, "learning_rate": 1e-3, "checkpoint_every": 0, "threads": 1},
            "eval": {"prompts": 8},
        },
    )


def steps_of(run: Path) -> list[dict[str, Any]]:
    """What every step wrote down, without clocks: a row lost or counted twice would change these numbers."""
    file = run / "metrics.jsonl"
    # A line that is being written has no end yet.
    lines = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines]
    return [{key: value for key, value in row.items() if not is_timed(key)} for row in rows]


def outcome(world: Path, run: Path, addresses: list[str], **health: Any) -> tuple[str, list[dict[str, Any]]]:
    """SHA-256 of the weights after training, and the steps."""
    summary = train(recipe_for(world, run, addresses, health))
    files = sorted((Path(summary["checkpoint"]) / "model").rglob("*.safetensors"))
    assert files
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest(), steps_of(run)


def teacher_flags(world: Path, *more: str, model: str = "teacher") -> tuple[str, ...]:
    return ("--model", f"teacher={world / model}", "--device", "cpu", "--deterministic", "--threads", "1", *more)


@pytest.fixture(scope="module")
def calm(world: Path, tmp_path_factory: pytest.TempPathFactory, replica: type) -> tuple[str, list[dict[str, Any]]]:
    """The outcome with one server and nothing going wrong."""
    folder = tmp_path_factory.mktemp("calm")
    server = replica(folder / "server", *teacher_flags(world)).start()
    try:
        return outcome(world, folder / "run", [server.address])
    finally:
        server.kill()


class Storm:
    """What happens beside a run: `play` is called in a thread and waits for steps with `at`."""

    def __init__(self, run: Path, play: Callable[["Storm"], None]) -> None:
        self.run = run
        self._over = threading.Event()
        self._play = play
        self.done: list[str] = []
        self.failure: BaseException | None = None

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def wait(self, seconds: float) -> None:
        self._over.wait(seconds)

    def at(self, share: float) -> bool:
        """Wait until this share of the steps is done; False when the run ended before."""
        while len(steps_of(self.run)) < share * STEPS:
            if self._over.wait(0.02):
                return False
        return True

    @contextmanager
    def blowing(self) -> Iterator[None]:
        def body() -> None:
            try:
                self._play(self)
            except BaseException as failure:
                self.failure = failure

        thread = threading.Thread(target=body)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
        if self.failure is not None:
            raise self.failure


def roll(replicas: list[Any], number: signal.Signals) -> Callable[[Storm], None]:
    """One replica after the other gets the signal, ends, and is started again."""

    def play(storm: Storm) -> None:
        for index, victim in enumerate(replicas):
            if storm.at(0.1 + 0.25 * index):
                victim.signal(number)
                code = victim.process.wait(120)
                assert code == (0 if number == signal.SIGTERM else -number), code
                victim.start()
                storm.done.append(number.name)

    return play


def freeze(replicas: list[Any]) -> Callable[[Storm], None]:
    def play(storm: Storm) -> None:
        for index, victim in enumerate(replicas):
            if storm.at(0.1 + 0.25 * index):
                victim.signal(signal.SIGSTOP)
                storm.wait(6.0)
                victim.signal(signal.SIGCONT)
                storm.done.append("freeze")

    return play


def at_random(replicas: list[Any], seed: int) -> Callable[[Storm], None]:
    """Kills, freezes and drains, one replica at a time, at random times until the run ends."""
    rng = random.Random(seed)

    def play(storm: Storm) -> None:
        while not storm.is_over:
            storm.wait(rng.uniform(0.3, 1.5))
            ready = [replica for replica in replicas if replica.ready]
            if not ready:
                continue
            victim, what = rng.choice(ready), rng.choice(["kill", "freeze", "drain"])
            storm.done.append(what)
            if what == "freeze":
                victim.signal(signal.SIGSTOP)
                storm.wait(rng.uniform(1.0, 6.0))
                victim.signal(signal.SIGCONT)
                continue
            victim.signal(signal.SIGKILL if what == "kill" else signal.SIGTERM)
            victim.process.wait(120)
            victim.start(wait=False)

    return play


def nothing(storm: Storm) -> None:
    """The servers' own faults are the storm."""


@pytest.fixture
def weather(
    calm: tuple[str, list[dict[str, Any]]], world: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> Callable[..., SimpleNamespace]:
    """weather(replicas, play) trains beside the storm, compares with the calm run; gives run, done and failed calls."""

    def blow(replicas: list[Any], play: Callable[[Storm], None] = nothing, **health: Any) -> SimpleNamespace:
        storm = Storm(tmp_path / "storm", play)
        caplog.set_level("INFO", "opd.fleet")
        with storm.blowing():
            sha, steps = outcome(world, tmp_path / "storm", [replica.address for replica in replicas], **health)
        assert len(steps) == STEPS and steps == calm[1]
        assert sha == calm[0]
        failed = [record.getMessage() for record in caplog.records if "failed: " in record.getMessage()]
        return SimpleNamespace(run=tmp_path / "storm", done=storm.done, failed=failed)

    return blow


pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1500)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_rolling_signals_change_no_weight(
    pool: Pool, world: Path, weather: Callable[..., SimpleNamespace], number: signal.Signals
) -> None:
    replicas = pool(3, *teacher_flags(world))
    assert weather(replicas, roll(replicas, number)).done == [number.name] * 3


def test_frozen_replicas_change_no_weight(pool: Pool, world: Path, weather: Callable[..., SimpleNamespace]) -> None:
    replicas = pool(2, *teacher_flags(world))
    assert weather(replicas, freeze(replicas)).done == ["freeze"] * 2


@pytest.mark.parametrize(
    ("fault", "word"),
    [("unavailable=0.05", "injected fault: unavailable"), ("corrupt=0.01", "checksum"), ("lie=0.02", "add up")],
)
def test_injected_faults_change_no_weight(
    pool: Pool, world: Path, weather: Callable[..., SimpleNamespace], fault: str, word: str
) -> None:
    replicas = [pool(1, *teacher_flags(world, "--fault", f"{fault},seed={i}"))[0] for i in range(2)]
    failed = weather(replicas).failed
    assert any(word in message for message in failed), failed


def test_a_misleading_replica_changes_no_weight_where_all_rows_are_scored_twice(
    pool: Pool, world: Path, weather: Callable[..., SimpleNamespace], caplog: pytest.LogCaptureFixture
) -> None:
    replicas = pool(2, *teacher_flags(world)) + pool(1, *teacher_flags(world, "--fault", "mislead=1"))
    weather(replicas, cross_score_share=1.0, cross_score_seconds=600.0)
    assert any("its scores of a row differ" in record.getMessage() for record in caplog.records)


def test_a_replica_with_ten_times_the_latency_changes_no_weight(
    pool: Pool, world: Path, weather: Callable[..., SimpleNamespace]
) -> None:
    weather(pool(2, *teacher_flags(world)) + pool(1, *teacher_flags(world, "--fault", "latency=0.5s")))


def test_a_replica_restarted_with_other_weights_changes_no_weight(
    pool: Pool, world: Path, weather: Callable[..., SimpleNamespace]
) -> None:
    replicas = pool(2, *teacher_flags(world))

    def play(storm: Storm) -> None:
        if storm.at(0.2):
            replicas[0].kill()
            replicas[0].start(*teacher_flags(world, model="student"))
            storm.done.append("swap" if storm.at(0.6) else "too late")

    assert weather(replicas, play).done == ["swap"]


def test_a_night_without_any_teacher_changes_no_weight(
    pool: Pool, world: Path, weather: Callable[..., SimpleNamespace]
) -> None:
    replicas = pool(2, *teacher_flags(world))

    def play(storm: Storm) -> None:
        if storm.at(0.3):
            for replica in replicas:
                replica.kill()
            wait_until(lambda: list((storm.run / "checkpoints").glob("step-*")))  # the emergency's
            for replica in replicas:
                replica.start()
            storm.done.append("night")

    found = weather(replicas, play)
    assert found.done == ["night"]
    saved = sorted(path.name for path in (found.run / "checkpoints").iterdir())
    assert len(saved) >= 2, saved  # the emergency checkpoint beside the last one


def test_a_partition_changes_no_weight(
    pool: Pool, world: Path, weather: Callable[..., SimpleNamespace], cable: SimpleNamespace
) -> None:
    (near,) = pool(1, *teacher_flags(world))
    where = ("--host", cable.host, "--allow-insecure")
    (far,) = pool(1, *teacher_flags(world, *where), prefix=cable.prefix, host=cable.host)

    def play(storm: Storm) -> None:
        if storm.at(0.2):
            cable.pull(True)
            storm.wait(8.0)
            cable.pull(False)
            storm.done.append("partition")

    assert weather([near, far], play).done == ["partition"]


def test_everything_at_once_changes_no_weight(pool: Pool, world: Path, weather: Callable[..., SimpleNamespace]) -> None:
    faults = "unavailable=0.05,corrupt=0.01,cut=0.02"
    replicas = [pool(1, *teacher_flags(world, "--fault", f"{faults},seed={i}"))[0] for i in range(3)]
    done = weather(replicas, at_random(replicas, seed=0)).done
    assert len(done) >= 2, done
