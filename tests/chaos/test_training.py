"""A training run whose teachers are killed, frozen, restarted and made to fail ends with the calm run's weights."""

import hashlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from opd.config import parse_settings
from student.loop import train
from student.recipe import Recipe

STEPS = int(os.environ.get("OPD_CHAOS_STEPS", "50"))


def recipe_for(world: Path, run: Path, addresses: list[str], steps: int) -> Recipe:
    fleet = {
        "health": {"probe_seconds": 0.5, "probe_timeout_seconds": 1.0, "revive_seconds": 0.2},
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
            "train": {"steps": steps, "learning_rate": 1e-3, "checkpoint_every": 0, "threads": 1},
            "eval": {"prompts": 8},
        },
    )


def weights(summary: dict[str, Any]) -> str:
    files = sorted((Path(summary["checkpoint"]) / "model").rglob("*.safetensors"))
    assert files
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@contextmanager
def monkey(replicas: list[Any], seed: int, pause: tuple[float, float] = (0.3, 1.5)) -> Iterator[list[str]]:
    """Kills, freezes and drains replicas at random, one at a time, until the block ends; yields what it did."""
    rng, stop = random.Random(seed), threading.Event()
    done: list[str] = []

    def play() -> None:
        while not stop.wait(rng.uniform(*pause)):
            ready = [replica for replica in replicas if replica.ready]
            if not ready:
                continue
            victim = rng.choice(ready)
            what = rng.choice(["kill", "freeze", "drain"])
            done.append(what)
            if what == "freeze":
                victim.signal(signal.SIGSTOP)
                stop.wait(rng.uniform(1.0, 6.0))
                victim.signal(signal.SIGCONT)
                continue
            victim.signal(signal.SIGKILL if what == "kill" else signal.SIGTERM)
            victim.process.wait(60)
            victim.start(wait=False)

    thread = threading.Thread(target=play)
    thread.start()
    try:
        yield done
    finally:
        stop.set()
        thread.join()


def teacher_flags(world: Path) -> tuple[str, ...]:
    return ("--model", f"teacher={world / 'teacher'}", "--device", "cpu", "--deterministic", "--threads", "1")


@pytest.mark.chaos
@pytest.mark.timeout(1500)
def test_fifty_steps_of_chaos_give_the_calm_runs_weights_bit_for_bit(
    pool: Callable[..., list[Any]], world: Path, tmp_path: Path
) -> None:
    flags = teacher_flags(world)
    (steady,) = pool(1, *flags)
    calm = weights(train(recipe_for(world, tmp_path / "calm", [steady.address], STEPS)))
    steady.kill()
    faulty = [pool(1, *flags, "--fault", f"unavailable=0.05,corrupt=0.01,cut=0.02,seed={i}")[0] for i in range(3)]
    with monkey(faulty, seed=0) as done:
        stormy = weights(train(recipe_for(world, tmp_path / "storm", [r.address for r in faulty], STEPS)))
    assert stormy == calm
    assert len(done) >= 3, done


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_a_night_without_any_teacher_changes_no_weight(
    pool: Callable[..., list[Any]], world: Path, tmp_path: Path
) -> None:
    flags = teacher_flags(world)
    replicas = pool(2, *flags)
    addresses = [replica.address for replica in replicas]
    calm = weights(train(recipe_for(world, tmp_path / "calm", addresses, 12)))

    def night() -> None:
        while not list((tmp_path / "storm").glob("metrics.jsonl")):
            if over.wait(0.02):
                return
        for replica in replicas:
            replica.kill()
        over.wait(12.0)
        for replica in replicas:
            replica.start()

    over = threading.Event()
    thread = threading.Thread(target=night)
    thread.start()
    try:
        stormy = weights(train(recipe_for(world, tmp_path / "storm", addresses, 12)))
    finally:
        over.set()
        thread.join()
    assert stormy == calm
    saved = sorted(path.name for path in (tmp_path / "storm" / "checkpoints").iterdir())
    assert len(saved) >= 2, saved  # the emergency checkpoint beside the last one
