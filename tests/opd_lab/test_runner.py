"""The lab's worlds and runs in worker processes: the same models as in one, and a stop loses nothing."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from waiting import wait_until

from opd_lab.experiment import Experiment
from opd_lab.experiments.common import recipe
from opd_lab.runner import make_plan

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
from opd_lab.tiny.summary import read_summary
from opd_lab.experiment import Arm, Experiment
from opd_lab.experiments.common import recipe
from opd_lab.plan import ExperimentPlan
from opd_lab.runner import run_experiment
from opd_lab.world import WorldModels

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    world, root = Path(sys.argv[1]), Path(sys.argv[2])
    experiment = Experiment(
        "long", "z", "long", "?", ("addition",),
        recipe(steps=100_000, rows=2, length=4, objective={"name": "opd", "payload": "sampled"}),
        ("teacher",), (Arm("a", "a"), Arm("b", "b")), (), quick={"eval.prompts": 2, "train.warmup_steps": 1},
    )
    run_experiment(ExperimentPlan(experiment, "quick", root, {0: WorldModels(read_summary(world), "quick")}), jobs=2)
"""


def alive_below(pid: int) -> set[int]:
    """The processes that descend from one, without those that have ended and were not waited for."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    found, left = set[int](), {pid}
    while left:
        left = {child for child, parent in parents.items() if parent in left}
        found |= left
    return found


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGTERM to it", "SIGINT to its group, as of a terminal", "SIGKILL to it"])
def test_a_stopped_lab_saves_its_runs_begins_no_others_and_leaves_no_process(
    world: Path, tmp_path: Path, how: str
) -> None:
    script, log = tmp_path / "lab.py", tmp_path / "lab.log"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(world), str(tmp_path)]
    number = signal.Signals[how.partition(" ")[0]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
    folder = tmp_path / "quick" / "long"

    def said() -> str:
        logs = [log, *sorted(folder.glob("*/*/seed-*.log"))]
        return "\n".join(f"{file.name}: {file.read_text(errors='replace')}" for file in logs)

    children = set[int]()
    try:

        def two_have_begun() -> bool:
            # The first line of a run is its evaluation before the first step.
            return sum(file.read_bytes().count(b"\n") > 1 for file in folder.glob("*/*/seed-*/metrics.jsonl")) >= 2

        wait_until(lambda: two_have_begun() or process.poll() is not None, 600, why=said)
        assert process.poll() is None, said()
        children = alive_below(process.pid)
        if "group" in how:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        wait_until(lambda: process.poll() is not None, 600, why=said)
        if number == signal.SIGTERM:
            assert process.returncode == 128 + signal.SIGTERM, said()
        wait_until(lambda: not any(map(is_alive, children)), 600, why=said)
    finally:
        for pid in (process.pid, *children):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
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
    assert sorted(line.partition(";")[0] for line in lines) == [f"world small-{i} has been built" for i in range(2)]
    in_turn = make_plan(experiment, tmp_path / "in-turn", "full")
    for seed, found in in_turn.models.items():
        other = beside.models[seed].world.models
        for name, model in found.world.models.items():
            assert (model.path / "model.safetensors").read_bytes() == (
                other[name].path / "model.safetensors"
            ).read_bytes()
    make_plan(experiment, tmp_path / "beside", "full", jobs=2, log=pytest.fail)  # nothing is built twice


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_ctrl_c_in_the_terminal_is_not_for_the_server_of_the_workers() -> None:
    code = (
        "import signal\nfrom multiprocessing import forkserver\nfrom opd_lab.runner import _start_server\n"
        "_start_server()\nprint(forkserver._forkserver._forkserver_pid, signal.pthread_sigmask(signal.SIG_BLOCK, ()))\n"
        "print(open(f'/proc/{forkserver._forkserver._forkserver_pid}/status').read())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    blocked = next(int(line.split()[1], 16) for line in out.splitlines() if line.startswith("SigBlk:"))
    assert blocked >> (signal.SIGINT - 1) & 1, out
    assert out.splitlines()[0].endswith("set()"), "the lab itself takes it again"
