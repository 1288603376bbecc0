"""Moments in 8 bits: one process against bitsandbytes' own optimizer, and two ranks against one process."""

import json
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

from student.model.adamw_8bit import AdamW8bit, moment_bytes

pytest.importorskip("bitsandbytes")

from eight_bits import CUT, SHAPES, Trained, differing

RANKS = """
import json, sys
from pathlib import Path
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from eight_bits import CUT, Trained, differing
from student.state.state_io import load_state

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
mine = Trained(mesh=mesh).update(3)
mine.save(folder, "two")
held = mine.held_bytes()
codes = [name for name, p in mine.parameters.items() if "scales1" in mine.optimizer.state[p]]
again = Trained(mesh=mesh).load(folder, "two").update(2)
other = Trained(mesh=mesh).load(folder, "one").update(1)
other.save(folder, "next")
other.update(1).save(folder, "back")
print(json.dumps({"bytes": held, "codes": codes, "resumed": differing(mine.update(2).whole(), again.whole())}))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What two ranks print, and the folder in which they and one process before them wrote their states."""
    folder = tmp_path_factory.mktemp("ranks")
    Trained().update(3).save(folder, "one")
    return folder, [json.loads(lines[-1]) for lines in forked.ranks(RANKS, folder)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_process_makes_the_updates_of_bitsandbytes_own_optimizer_bit_for_bit(dtype: torch.dtype) -> None:
    import bitsandbytes

    mine, theirs = (Trained(kind, dtype=dtype).update(4).whole() for kind in (AdamW8bit, bitsandbytes.optim.AdamW8bit))
    for name in SHAPES:
        assert torch.equal(mine[name]["weights"], theirs[name]["weights"]), name
        assert torch.equal(mine[name]["moment2"], theirs[name]["state2"]), name


def test_two_ranks_update_as_one_process_does_bit_for_bit_wherever_they_cut_no_block(
    told: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, ranks = told
    assert [rank["codes"] for rank in ranks] == [[name for name in SHAPES if name not in (*CUT, "small")]] * 2
    one, two = Trained().load(folder, "one").whole(), Trained().load(folder, "two").whole()
    assert differing(one, two) == CUT
    plain = Trained(torch.optim.AdamW).update(3).whole()
    for name in CUT:  # moments in float32, so the updates are torch's, within rounding
        torch.testing.assert_close(two[name]["weights"], plain[name]["weights"], atol=2e-6, rtol=1e-5)


def test_a_resumed_run_of_two_ranks_equals_an_uninterrupted_one_bit_for_bit(
    told: tuple[Path, list[dict[str, Any]]],
) -> None:
    assert [rank["resumed"] for rank in told[1]] == [[], []]


def test_moments_go_from_one_process_to_two_ranks_and_back(told: tuple[Path, list[dict[str, Any]]]) -> None:
    """Bit for bit, and where two ranks cut blocks by float32 moments of the values that the codes stand for."""
    folder, _ = told
    alone = Trained().load(folder, "one")
    first, after = alone.update(1).whole(), alone.update(1).whole()
    assert differing(after, Trained().load(folder, "back").whole()) == CUT
    # Both updates of "next" were computed from the same moments; those of one process were rounded only afterwards.
    following = Trained().load(folder, "next").whole()
    for name in CUT:
        assert following[name]["moment1"].dtype == torch.float32
        torch.testing.assert_close(following[name]["weights"], first[name]["weights"], atol=2e-6, rtol=1e-5)
    back = Trained().load(folder, "two").update(2)
    assert differing(after, back.whole()) == CUT
    assert all(back.optimizer.state[back.parameters[name]]["moment1"].dtype == torch.float32 for name in CUT)


def test_the_plan_counts_the_bytes_that_all_ranks_hold(told: tuple[Path, list[dict[str, Any]]]) -> None:
    assert sum(rank["bytes"] for rank in told[1]) == moment_bytes(SHAPES.values(), 2)
    assert Trained().update(1).held_bytes() == moment_bytes(SHAPES.values()) < moment_bytes(SHAPES.values(), 2)
    assert moment_bytes([(4096, 4096)]) == moment_bytes([(4096, 4096)], 8) == 2 * (4096**2 + 4 * 4096**2 // 256)
