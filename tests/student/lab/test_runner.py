"""The lab's worlds and runs in worker processes: the same models as in one, and a stop loses nothing."""

import os
import signal
import sys
from pathlib import Path

import forked
import pytest
from waiting import wait_until

from student.lab.experiment import Experiment
from student.lab.experiments.common import recipe
from student.lab.runner import make_plan

WORLD = """
max_new_tokens: 12
measured: 8
tasks:
  sums: {task: addition, options: {digits: 1}}
models:
  base: {shape: {hidden: 32, layers: 1}, stages: [{sft: {steps: 2, batch: 4}}]}
  teacher: {shape: {hidden: 32, layers: 1}, stages: [{sft: {steps: 3, batch: 4}}]}
"""
SCRIPT = """
import signal, sys
from pathlib import Path
import forked
from student.run import local_server
from student.lab.tiny.summary import read_summary
from student.lab.experiment import Arm, Experiment
from student.lab.experiments.common import recipe
from student.lab.plan import ExperimentPlan
from student.lab.runner import run_experiment
from student.lab.world import WorldModels

if __name__ == "__main__":
    local_server.subprocess = forked.servers()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    world, root = Path(sys.argv[1]), Path(sys.argv[2])
    experiment = Experiment(
        "long", "z", "long", "?", ("addition",),
        recipe(steps=100_000, rows=2, length=4, objective={"name": "opd", "payload": "sampled"}),
        ("teacher",), (Arm("a", "a"), Arm("b", "b")), (), quick={"eval.prompts": 2, "train.warmup_steps": 1},
    )
    run_experiment(ExperimentPlan(experiment, "quick", root, {0: WorldModels(read_summary(world), "quick")}), jobs=2)
"""


@pytest.mark.slow
def test_a_stopped_lab_saves_its_runs_and_begins_no_others(world: Path, tmp_path: Path) -> None:
    script, log = tmp_path / "lab.py", tmp_path / "lab.log"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(world), str(tmp_path)]
    process = forked.Program(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, log=log)
    folder = tmp_path / "quick" / "long"

    def said() -> str:
        logs = [log, *sorted(folder.glob("*/*/seed-*.log"))]
        return "\n".join(f"{file.name}: {file.read_text(errors='replace')}" for file in logs)

    try:

        def two_have_begun() -> bool:
            return sum(file.stat().st_size > 0 for file in folder.glob("*/*/seed-*/metrics.jsonl")) >= 2

        wait_until(lambda: two_have_begun() or process.poll() is not None, 600, why=said)
        assert process.poll() is None, said()
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: process.poll() is not None, 600, why=said)
        assert process.returncode == 128 + signal.SIGTERM, said()
    finally:
        process.kill()
        process.wait(120)
    assert len(list(folder.glob("*/*/seed-*.log"))) == 2, said()
    assert len(list(folder.glob("*/*/seed-*/checkpoints/step-*"))) == 2, said()


@pytest.mark.slow
def test_worlds_that_are_built_beside_each_other_are_those_built_in_turn(tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(WORLD)
    method = recipe(steps=1, rows=2, length=4, objective={"name": "opd", "payload": "sampled"})
    experiment = Experiment("own", "z", "own", "?", ("sums",), method, ("teacher",), (), (), world=str(file))
    lines: list[str] = []
    beside = make_plan(experiment, tmp_path / "beside", "full", jobs=2, log=lines.append)
    assert sorted(line.partition(";")[0] for line in lines) == ["world small-0 is built", "world small-1 is built"]
    in_turn = make_plan(experiment, tmp_path / "in-turn", "full")
    for seed, found in in_turn.models.items():
        other = beside.models[seed].world.models
        for name, model in found.world.models.items():
            assert (model.path / "model.safetensors").read_bytes() == (
                other[name].path / "model.safetensors"
            ).read_bytes()
    make_plan(experiment, tmp_path / "beside", "full", jobs=2, log=pytest.fail)  # nothing is built twice
