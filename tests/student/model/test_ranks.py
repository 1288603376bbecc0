import contextlib
import json
import os
from pathlib import Path
from typing import Any

import forked
import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from thread_ranks import Meeting, of_each

from opd.errors import CancelledError, ConfigError, DataError, OpdError
from student.model.ranks import ALONE, Ranks, from_all_ranks, make_accelerator


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
        (["--cpu", "--num_processes", "2"], "asked for several processes but started one"),
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
from student.model.ranks import from_all_ranks

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
print(json.dumps(from_all_ranks([sys.argv[2]] * (1 + int(sys.argv[2])))))
dist.destroy_process_group()
"""


def test_what_has_no_ranks_of_its_own_is_told_the_values_of_all(tmp_path: Path) -> None:
    assert from_all_ranks(3) == [3]
    for lines in forked.ranks(WORKER, tmp_path / "rendezvous"):
        assert json.loads(lines[-1]) == [["0"], ["1", "1"]]


def failing(ranks: Ranks, index: int) -> None:
    if ranks.index == index:
        raise DataError(f"rank {index} has no row.")


def test_a_failure_is_heard_in_the_next_exchange_of_the_others_wherever_that_is() -> None:
    def outer(ranks: Ranks) -> Any:
        return ranks.agree(lambda: (failing(ranks, 1), inner(ranks)))

    def inner(ranks: Ranks) -> Any:
        # Rank 1 is not here: the others are two works deep when they hear of it, the first of them at its end.
        return ranks.agree(lambda: None if ranks.index == 0 else ranks.meet())

    first, second, third = of_each(outer)
    assert str(second) == "rank 1 has no row." and isinstance(second, DataError)
    for other in (first, third):
        assert isinstance(other, CancelledError) and str(other) == "rank 1 failed: rank 1 has no row"


def test_ranks_that_fail_at_once_in_different_works_leave_the_outermost_and_go_on() -> None:
    def both(ranks: Ranks) -> Any:
        def work() -> None:
            failing(ranks, 1)
            with contextlib.suppress(OpdError):  # for which another rank is no longer there
                ranks.agree(lambda: failing(ranks, 2))
            ranks.meet()

        with pytest.raises(OpdError) as found:
            ranks.agree(work)
        return str(found.value), ranks.gather(ranks.index)

    told = "rank 1 failed: rank 1 has no row"
    assert of_each(both) == [(told, [0, 1, 2]), ("rank 1 has no row.", [0, 1, 2]), (told, [0, 1, 2])]


def test_ranks_that_do_different_things_are_told_so() -> None:
    found = of_each(lambda ranks: ranks.agree(lambda: ranks.index and ranks.meet()), 2)
    assert all(isinstance(error, RuntimeError) and "out of step" in str(error) for error in found)


def test_a_rank_that_fails_among_collectives_of_torch_exchanges_nothing_any_more() -> None:
    def work(ranks: Ranks) -> Any:
        def bound() -> None:
            with ranks.bound():
                failing(ranks, 1)

        with pytest.raises(DataError):
            ranks.agree(bound)
        with pytest.raises(CancelledError):
            ranks.meet()
        return ranks.apart

    assert work(Meeting(2).rank(1))
