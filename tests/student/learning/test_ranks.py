import json
import os
from pathlib import Path

import forked
import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

from opd.errors import ConfigError
from student.learning.ranks import ALONE, make_accelerator, told


def launched(*flags: str) -> dict[str, str]:
    """The environment that `accelerate launch` gives to what it starts."""
    arguments = launch_command_parser().parse_args(["--mixed_precision", "no", *flags, "train.py"])
    arguments, *_ = _validate_launch_command(arguments)
    if arguments.use_fsdp:
        return {**os.environ, **prepare_multi_gpu_env(arguments)}
    environment: dict[str, str] = prepare_simple_launcher_cmd_env(arguments)[1]
    return environment


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--cpu", "--num_processes", "2"], "asked for several processes and started one"),
        (["--use_fsdp", "--fsdp_version", "2", "--num_processes", "2", "--num_machines", "1"], "DDP on a CPU"),
    ],
)
def test_what_accelerate_would_do_in_silence_is_refused(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], said: str
) -> None:
    for name, value in launched(*flags).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        make_accelerator("no", 0.0)


def test_one_process_that_accelerate_was_asked_for_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in launched("--cpu", "--num_processes", "1").items():
        monkeypatch.setenv(name, value)
    assert make_accelerator("no", 0.0).num_processes == 1
    assert ALONE.gather(3) == [3] and ALONE.agree(lambda: 4) == 4


WORKER = """
import json, sys
from torch import distributed as dist
from student.learning.ranks import told

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
print(json.dumps(told([sys.argv[2]] * (1 + int(sys.argv[2])))))
dist.destroy_process_group()
"""


def test_what_has_no_ranks_of_its_own_is_told_the_values_of_all(tmp_path: Path) -> None:
    assert told(3) == [3]
    for lines in forked.ranks(WORKER, tmp_path / "rendezvous"):
        assert json.loads(lines[-1]) == [["0"], ["1", "1"]]
