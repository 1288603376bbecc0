"""The Slurm script in a real shell, with stand-ins for Slurm, torchrun and opd that write down how they are called."""

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "deploy/slurm/opd.sbatch"
SRUN = """
group=$1; shift
while [[ $1 == --* ]]; do shift; done
if [ "$group" = --het-group=1 ]; then exec "$@"; fi
for i in 0 1; do SLURM_LOCALID=$i "$@" & done  # the tasks of one node
trap 'kill $(jobs -p)' TERM
wait
"""
OPD = """
echo "$*" >>"$CALLS/opd"
exec sleep 300
"""
TORCHRUN = """
until [ "$(cat "$CALLS/opd" 2>/dev/null | wc -l)" = 2 ]; do sleep 0.05; done
cp "$(sed 's/.*file:\\(.*\\)].*/\\1/' <<<"$*")" "$CALLS/servers"
echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT $*" >"$CALLS/torchrun"
exit 3
"""


def test_the_slurm_script_starts_a_teacher_on_each_gpu_and_ends_with_the_students_code(tmp_path: Path) -> None:
    calls, commands = tmp_path / "calls", tmp_path / "bin"
    calls.mkdir()
    commands.mkdir()
    stand_ins = {"srun": SRUN, "opd": OPD, "torchrun": TORCHRUN, "scontrol": "printf 'n1\\nn2\\n'\n"}
    for name, text in stand_ins.items():
        (commands / name).write_text("#!/bin/bash\n" + text)
        (commands / name).chmod(0o755)
    run = tmp_path / "runs" / "first"
    given = {"TEACHER": "a folder", "SERVE": "--engine vllm", "RECIPE": "recipe.yaml", "RUN": str(run)}
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-2]",
        "SLURM_TASKS_PER_NODE_HET_GROUP_0": "2(x2)",
    }
    environment = {"PATH": f"{commands}:{os.environ['PATH']}", "CALLS": str(calls), **given, **slurm}
    ended = subprocess.run(["bash", SCRIPT], env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 3, ended.stderr
    served = sorted((calls / "opd").read_text().splitlines())
    for place, line in enumerate(served):
        assert line.startswith("serve --model teacher=a folder ") and line.endswith(" --engine vllm")
        assert f"--port {7070 + place} --metrics-port {9400 + place} " in line
    assert (calls / "servers").read_text() == "n1:7070\nn1:7071\nn2:7070\nn2:7071\n"
    waits, command = (calls / "torchrun").read_text().split(" ", 1)
    assert 30 < int(waits) < 600  # Slurm's signal comes 600 s before the end
    assert command.startswith(f"--nproc-per-node 8 -m opd.cli train recipe.yaml run={run} ")
    assert not list(run.parent.glob("teachers-*"))  # the list goes with the job
