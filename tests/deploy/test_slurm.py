"""The Slurm script: in a real shell with stand-ins that write down how they are called, and under a real Slurm."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml
from deployed_job import student_recipe
from ports import held_port
from waiting import wait_until

SCRIPT = Path(__file__).parents[2] / "deploy/slurm/opd.sbatch"
SRUN = """
group=$1; shift
while [[ $1 == --* ]]; do shift; done
if [ "$group" = --het-group=1 ]; then exec "$@"; fi
echo $$ >"$CALLS/teachers"
for i in 0 1; do SLURM_LOCALID=$i "$@" & done  # the tasks of one node
trap 'kill $(jobs -p)' TERM
wait
"""
OPD = """
echo "$*" >>"$CALLS/opd.$1"
if [ "$1" = serve ]; then exec sleep 300; fi
"""
TORCHRUN = """
until [ "$(cat "$CALLS/opd.serve" 2>/dev/null | wc -l)" = 2 ]; do sleep 0.05; done
cp "$(sed 's/.*file:\\(.*\\)].*/\\1/' <<<"$*")" "$CALLS/servers"
secrets=$(sed 's/.*ca_file: \\([^,]*\\)\\/cert.pem.*/\\1/' <<<"$*")
cat "$(dirname "$secrets")"/metrics-7.json >"$CALLS/metrics"
cat "$secrets/tokens.yaml" "$secrets/token" >"$CALLS/secrets"
stat -c %a "$secrets" "$secrets"/* | tr '\n' ' ' >"$CALLS/modes"
echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT $*" >"$CALLS/torchrun"
exit 3
"""
SCANCEL = """
echo "$*" >>"$CALLS/scancel"
if [ "$2" = 7 ]; then kill "$(cat "$CALLS/teachers")"; fi
"""


def test_the_slurm_script_starts_a_teacher_on_each_gpu_and_ends_with_the_students_code(tmp_path: Path) -> None:
    calls, commands = tmp_path / "calls", tmp_path / "bin"
    calls.mkdir()
    commands.mkdir()
    stand_ins = {
        "srun": SRUN,
        "opd": OPD,
        "torchrun": TORCHRUN,
        "scontrol": "printf 'n1\\nn2\\n'\n",
        "scancel": SCANCEL,
    }
    for name, text in stand_ins.items():
        (commands / name).write_text("#!/bin/bash\n" + text)
        (commands / name).chmod(0o755)
    run = tmp_path / "runs" / "first"
    given = {"TEACHER": "a folder", "SERVE": "--engine vllm", "RECIPE": "recipe.yaml", "RUN": str(run)}
    slurm = {"JOB_NODELIST_HET_GROUP_0": "n[1-2]", "TASKS_PER_NODE_HET_GROUP_0": "2(x2)", "JOB_ID": "7"}
    slurm |= {"JOB_ID_HET_GROUP_0": "7", "JOB_ID_HET_GROUP_1": "8", "GPUS_PER_NODE_HET_GROUP_1": "h100:8"}
    slurm |= {"CPUS_PER_TASK_HET_GROUP_0": "4", "CPUS_PER_TASK_HET_GROUP_1": "64"}
    environment = {"PATH": f"{commands}:{os.environ['PATH']}", "CALLS": str(calls), **given}
    environment |= {f"SLURM_{name}": value for name, value in slurm.items()}
    ended = subprocess.run(["bash", SCRIPT], env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 3, ended.stderr
    served = sorted((calls / "opd.serve").read_text().splitlines())
    for place, line in enumerate(served):
        assert line.startswith("serve --model teacher=a folder ") and line.endswith(" --engine vllm")
        assert f"--port {7070 + place} --metrics-port {9400 + place} " in line
    assert (calls / "servers").read_text() == "n1:7070\nn1:7071\nn2:7070\nn2:7071\n"
    waits, command = (calls / "torchrun").read_text().split(" ", 1)
    assert 30 < int(waits) < 600  # Slurm's signal comes 600 s before the end
    assert command.startswith(f"--nproc-per-node 8 -m opd.cli train recipe.yaml run={run} ")
    assert (calls / "opd.train").read_text().endswith(" --dry-run\n")
    assert (calls / "scancel").read_text() == "--signal=TERM 7\n--quiet --signal=TERM 8\n"
    assert "--tls-cert" in served[0] and "--tokens" in served[0] and "insecure" not in served[0]
    (found,) = json.loads((calls / "metrics").read_text())
    assert found == {"targets": ["n1:9400", "n1:9401", "n2:9400", "n2:9401"], "labels": {"job": "opd-teachers"}}
    assert re.fullmatch(
        r"- {name: student, token: ([0-9a-f]{64}), scopes: \[score\]}\n\1", (calls / "secrets").read_text()
    )
    assert (calls / "modes").read_text() == "700 600 600 600 600 "
    assert not list(run.parent.glob("*-7*")), "what the job has written beside the run goes with it"


@dataclass
class Slurm:
    """Two nodes on this machine, each with eight device files that are no GPUs."""

    conf: Path

    def ask(self, *command: str) -> str:
        """What a command of Slurm's says."""
        environment = {**os.environ, "SLURM_CONF": str(self.conf), "OMP_NUM_THREADS": "1"}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()

    def submit(self, script: Path, **variables: str) -> str:
        """The id of a job."""
        export = ",".join(["ALL", *(f"{name}={value}" for name, value in variables.items())])
        return self.ask(
            "sbatch", "--parsable", "-o", str(script.with_suffix(".log")), f"--export={export}", str(script)
        )

    def is_done(self) -> bool:
        """Whether no job is left; each look waits a moment, because it starts a process beside the job."""
        time.sleep(0.2)
        return not self.ask("squeue", "-h")


CONF = """
ClusterName=test
SlurmctldHost=localhost
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=1
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ReturnToService=2
GresTypes=gpu
NodeName=127.0.0.1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={first} CPUs=64 RealMemory=4000 Gres=gpu:8
NodeName=second NodeHostname=localhost NodeAddr=127.0.0.1 Port={second} CPUs=64 RealMemory=4000 Gres=gpu:8
PartitionName=all Nodes=127.0.0.1,second Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    if shutil.which("slurmctld") is None or shutil.which("slurmd") is None or os.getuid():
        pytest.skip("no Slurm is installed, or this is not root; `make slurm` gets Debian's")
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # short: sockets' paths have 108 bytes at most
        yield from _running(Path(folder))


def _running(folder: Path) -> Iterator[Slurm]:
    for name in ("state", "spool/127.0.0.1", "spool/second", "gpus"):
        (folder / name).mkdir(parents=True)
    for number in range(8):
        os.mknod(folder / f"gpus/nvidia{number}", 0o600 | stat.S_IFCHR, os.makedev(195, number))
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(folder=folder, port=held_port(), first=held_port(), second=held_port()))
    (folder / "gres.conf").write_text(f"NodeName=127.0.0.1,second Name=gpu File={folder}/gpus/nvidia[0-7]\n")
    found = Slurm(conf)
    with ExitStack() as stack:
        for command in (["slurmctld"], ["slurmd", "-N", "127.0.0.1"], ["slurmd", "-N", "second"]):
            process = subprocess.Popen([*command, "-D", "-f", str(conf)], stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        wait_until(lambda: idle(found) == 2)
        yield found
        found.ask("scancel", "--user=root")
        wait_until(found.is_done)


def idle(slurm: Slurm) -> int:
    """How many nodes are."""
    try:
        return slurm.ask("sinfo", "-h", "-N", "-o", "%T").split().count("idle")
    except subprocess.CalledProcessError:
        return 0  # its daemon is not up yet


@pytest.mark.slow
def test_under_slurm_a_job_saves_at_its_signal_and_the_next_one_goes_on(
    slurm: Slurm, world: Path, tmp_path: Path
) -> None:
    text = SCRIPT.read_text()
    for nodes, tasks in (("2", "8"), ("1", "1")):
        wide = rf"--nodes={nodes} --ntasks-per-node={tasks} --gpus-per-node=8 --cpus-per-task=\d+"
        text, count = re.subn(wide, f"--nodes=1 --ntasks-per-node={min(2, int(tasks))} --gpus-per-node=2 -c 3", text)
        assert count == 1
    script, recipe, run = tmp_path / "job.sbatch", tmp_path / "recipe.yaml", tmp_path / "run"
    script.write_text(text)
    recipe.write_text(yaml.safe_dump(student_recipe(world, [])))
    port = str(held_port())
    given = {
        "TEACHER": str(world / "teacher"),
        "RECIPE": str(recipe),
        "RUN": str(run),
        "SERVE": "--device cpu",
        "PORT": port,
    }
    log = script.with_suffix(".log")

    job = slurm.submit(script, **given)
    metrics = run / "metrics.jsonl"
    wait_until(lambda: slurm.is_done() or (metrics.exists() and metrics.read_text()))
    assert metrics.exists() and metrics.read_text(), log.read_text()
    servers = [one for one in psutil.process_iter(["cmdline"]) if f"teacher={world / 'teacher'}" in one.info["cmdline"]]
    served = [one for one in servers if one.environ().get("SLURM_LOCALID")]
    assert {one.environ()["CUDA_VISIBLE_DEVICES"] for one in served} == {"0", "1"}
    assert all(one.environ()["SLURM_CPUS_PER_TASK"] == "3" for one in served)
    slurm.ask("scancel", "--signal=TERM", "--batch", job)
    wait_until(slurm.is_done, why=log.read_text)
    (saved,) = (run / "checkpoints").glob("step-*")
    step = int(saved.name.removeprefix("step-"))
    said = log.read_text()
    assert said.count('"message": "stopped", "exit_code": 0') == 2, said  # both teachers drained

    job = slurm.submit(script, **{**given, "TEACHER": str(tmp_path)})  # no model: the student waits for no one
    wait_until(slurm.is_done, why=log.read_text)
    assert "ExitCode=0:0" not in slurm.ask("scontrol", "show", "job", job), log.read_text()

    recipe.write_text(yaml.safe_dump(student_recipe(world, [], steps=step + 2)))
    job = slurm.submit(script, **given)
    wait_until(slurm.is_done, why=log.read_text)
    assert "ExitCode=0:0" in slurm.ask("scontrol", "show", "job", job), log.read_text()
    assert (run / f"checkpoints/step-{step + 2:06d}").is_dir()
