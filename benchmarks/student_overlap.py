"""Seconds of a step with rollouts beside learning (`train.max_staleness`), over those of its slowest stage.

    python benchmarks/student_overlap.py                 # stages of set lengths, for lags of 0, 1 and 2 steps
    python benchmarks/student_overlap.py --real          # the stages of a tiny world as they are
    python benchmarks/student_overlap.py --real --mid    # of random models of 23 and 41 M parameters, 32,768 ids

Whole runs of `opd train` on the test world with a teacher server in a process of its own. With set lengths, the engine
hands out its rows evenly over R seconds, the answers of the fleet arrive one after the other within S seconds, and the
learner waits L seconds beside its update. The waits stand in for separate devices; everything else is what users run.
A step is the time from the start of one update to the start of the next (median, without the first steps). The slowest
stage is the one of the three that was busy longest in the run (without set lengths, the teachers are not measured).
Lags are run in turn, round after round; the last figure is the median of the ratios within a round.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import student.job.preparation
from opd.config import parse_settings
from opd.fleet.source import ScoreSource
from opd.wire.types import Scores
from opd_lab.tiny.build import build_world
from student.data.plan import PlannedRow
from student.data.row import Row
from student.data.token_batch import TokenBatch
from student.job.session import train
from student.plugin.terms import Term, TermOutput, TermSettings
from student.plugin.traits import Traits
from student.rollout.ahead import copy_of
from student.rollout.engine import CopyEngine, EngineSetup, OnRow, RolloutEngineSettings, ignore
from student.run.local_server import served
from student.settings.recipe import Recipe

LENGTHS = [(1.6, 0.4, 0.8), (0.8, 0.4, 1.6), (0.8, 1.6, 0.8), (1.2, 1.2, 1.2)]
CONNECT = student.job.preparation.connect
WARM = 4
"""Steps that are left out."""
_IDS = 32_768


class PacedEngineSettings(RolloutEngineSettings):
    """Settings of the engine."""

    seconds: float = Field(ge=0, description="Seconds from the start of a step's rollout to its last row.")


class PacedEngine(CopyEngine):
    """Samples from a copy, and hands out the rows evenly over some seconds."""

    settings_type = PacedEngineSettings

    def open(self, setup: EngineSetup) -> None:
        super().open(EngineSetup(copy_of(setup.model), setup.tokenizer, setup.spec, setup.path, setup.revision))

    def sample(
        self, planned: Sequence[PlannedRow], *, purpose: tuple[object, ...] = ("rollout",), on_row: OnRow = ignore
    ) -> list[Row]:
        begin, done = time.monotonic(), 0

        def paced(row: Row) -> None:
            nonlocal done
            done += 1
            time.sleep(max(0.0, begin + self.settings.seconds * done / len(planned) - time.monotonic()))
            on_row(row)

        return super().sample(planned, purpose=purpose, on_row=paced)


class PacedTermSettings(TermSettings):
    """Settings of the term."""

    seconds: float = Field(ge=0, description="Seconds that an update waits.")


class PacedTerm(Term):
    """A term of loss 0 that takes its time."""

    settings_type = PacedTermSettings
    traits = Traits(learns_from_stale_rows=True)

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Look up how many rows a step has."""
        self._rows = recipe.rollout.prompts_per_step

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """Zeros, after the rows' share of the time."""
        time.sleep(self.settings.seconds * len(batch.rows) / self._rows)
        zero: Tensor = batch.weights * 0.0
        return TermOutput(zero)


class PacedFleet:
    """A fleet whose answers come one after the other, each after `seconds`.

    Attributes:
        busy: seconds spent on each row.
    """

    def __init__(self, fleet: ScoreSource, seconds: float) -> None:
        self._fleet, self._seconds = fleet, seconds
        self.busy: list[float] = []
        self._teacher = ThreadPoolExecutor(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)

    def submit_many(self, *arguments: Any, **keywords: Any) -> list[Future[Scores]]:
        """Submit to the fleet; each future gets its scores when its turn has come."""
        return [self._paced(answer) for answer in self._fleet.submit_many(*arguments, **keywords)]

    def _paced(self, answer: Future[Scores]) -> Future[Scores]:
        def wait() -> Scores:
            begin = time.monotonic()
            time.sleep(self._seconds)
            found = answer.result()
            self.busy.append(time.monotonic() - begin)
            return found

        return self._teacher.submit(wait)


def recipe(run: Path, world: Path, address: str, lag: int, steps: int, lengths: tuple[float, ...] | None) -> Recipe:
    objective: list[dict[str, Any]] = [{"name": "opd", "payload": "gather", "k": 8, "importance_cap": 2.0}]
    rollout: dict[str, Any] = {"prompts_per_step": 32, "max_new_tokens": 12, "max_prompt_tokens": 32}
    small: dict[str, Any] = {}
    if lengths is not None:
        small = {"micro_batch_tokens": 1}  # rows are learnt one by one, as they are scored
        objective.append({"name": "student_overlap:PacedTerm", "seconds": lengths[2]})
        rollout |= {"prompts_per_step": 8, "engine": {"name": "student_overlap:PacedEngine", "seconds": lengths[0]}}
    return parse_settings(
        Recipe,
        {
            "run": str(run),
            "model": {"path": str(world / "student")},
            "teachers": {"endpoints": [address], "default": "teacher"},
            "prompts": {"task": "addition", "options": {"digits": 2}},
            "rollout": rollout,
            "objective": objective,
            "train": {"steps": steps, "max_staleness": lag, "threads": 1} | small,
            "eval": {"prompts": 0},
            "samples": {"every": 0},
        },
    )


def measure(one: Recipe, scoring: float | None) -> tuple[float, dict[str, float]]:
    """Median seconds of a step, and how long its stages were busy; teachers only if `scoring` paces them."""
    fleets: list[PacedFleet] = []
    if scoring is not None:
        student.job.preparation.connect = partial(paced, fleets, scoring / one.rollout.prompts_per_step)
    try:
        train(one)
    finally:
        student.job.preparation.connect = CONNECT
    events = json.loads((one.run / "timeline.json").read_text())["traceEvents"]
    learnt = [(event["args"]["step"], event["ts"] / 1e6) for event in events if event["name"] == "learn"]
    # The first of each step, which may begin before all of it is scored.
    starts = sorted(dict(reversed(learnt)).values())[WARM:]
    lines = [json.loads(line) for line in (one.run / "metrics.jsonl").read_text().splitlines()][WARM:]

    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    sampled = [line.get("rollout_seconds", line["seconds"].get("rollout", 0.0)) for line in lines]
    waits = ("rollout", "wait_rollout", "wait_teacher", "wait_verifier")
    trained = [sum(s for name, s in line["seconds"].items() if name not in waits) for line in lines]
    busy = {"rollout": median(sampled), "learning": median(trained)}
    if fleets:
        busy["scoring"] = median(fleets[0].busy) * one.rollout.prompts_per_step
    return median([later - earlier for earlier, later in pairwise(starts)]), busy


def main() -> None:
    """Run the lags in turn and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--real", action="store_true", help="do not set the stages' lengths: rollout and learning share the CPU"
    )
    parser.add_argument(
        "--mid", action="store_true", help="use larger models with random weights instead of the tiny world's"
    )
    parser.add_argument(
        "--lags", type=int, nargs="+", default=[0, 1, 2], help="lags to measure; the others are compared with the first"
    )
    parser.add_argument("--world", type=Path, help="folder of a tiny world; by default one is built")
    options = parser.parse_args()
    if options.steps < WARM + 2:
        parser.error(f"--steps is {options.steps}, but it must be at least {WARM + 2}: the first {WARM} are left out.")
    with tempfile.TemporaryDirectory() as scratch:
        world = options.world or Path(scratch) / "world"
        if options.world is None:
            build_world(world, "test", seed=0)
        if options.mid:
            world = mid_world(world, Path(scratch) / "mid")
        run_all(options, world, Path(scratch))


def mid_world(tiny: Path, folder: Path) -> Path:
    """Random models that share a tokenizer of 32,768 ids, most of which no text encodes to."""
    tokenizer = AutoTokenizer.from_pretrained(tiny / "student")
    tokenizer.add_tokens([f"<{number}>" for number in range(_IDS - len(tokenizer))])
    for name, (width, layers) in {"student": (384, 6), "teacher": (512, 8)}.items():
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(
            tiny / "student",
            vocab_size=_IDS,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=2,
            head_dim=64,
            layer_types=["full_attention"] * layers,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def run_all(options: argparse.Namespace, world: Path, scratch: Path) -> None:
    with served({"teacher": world / "teacher"}, scratch / "server") as address:
        for lengths in [None] if options.real else LENGTHS:
            if lengths is not None:
                print(f"rollout {lengths[0]} s, scoring {lengths[1]} s, learning {lengths[2]} s", flush=True)
            found: dict[int, list[tuple[float, float]]] = {}
            for number in range(options.rounds):
                for lag in options.lags:
                    one = recipe(scratch / f"{lengths}-{lag}-{number}", world, address, lag, options.steps, lengths)
                    step, busy = measure(one, None if lengths is None else lengths[1])
                    found.setdefault(lag, []).append((step, max(busy.values())))
                    print(f"  lag {lag}: {step:.3f} s, " + ", ".join(f"{n} {s:.3f} s" for n, s in busy.items()))
            for lag, pairs in found.items():
                step, slowest = (statistics.median(values) for values in zip(*pairs, strict=True))
                against = statistics.median(
                    [a / b for (a, _), (b, _) in zip(pairs, found[options.lags[0]], strict=True)]
                )
                share = f"{step / slowest:.2f} of its slowest stage, {against:.2f} of a step with lag {options.lags[0]}"
                print(f"  max_staleness {lag}: step {step:.3f} s, {share}", flush=True)


def paced(made: list[PacedFleet], seconds: float, *asked: Any) -> Any:
    fleet = CONNECT(*asked)
    if fleet is None:
        return None
    made.append(PacedFleet(fleet, seconds))
    return made[-1]


if __name__ == "__main__":
    sys.modules["student_overlap"] = sys.modules["__main__"]
    main()
