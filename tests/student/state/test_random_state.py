from pathlib import Path

import pytest
import torch
from thread_ranks import Meeting

from student.model.ranks import Ranks
from student.state.random_state import begin_random, random_parts, random_state, restore_random

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def as_it_was() -> object:
    with torch.random.fork_rng(devices=[]):
        yield


def rank(index: int, count: int) -> Ranks:
    return Meeting(count).rank(index)


def save(folder: Path, count: int) -> list[torch.Tensor]:
    """Save the states of `count` ranks; what each draws next."""
    drawn = []
    for index in range(count):
        torch.manual_seed(7)
        begin_random(7, index)
        torch.rand(3)
        for part in random_parts(".", index, random_state(CPU)):
            list(part.write(folder))
        drawn.append(torch.rand(3))
    return drawn


def test_every_rank_draws_numbers_of_its_own_and_goes_on_with_them(tmp_path: Path) -> None:
    drawn = save(tmp_path, 3)
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[1], drawn[2])
    for index, wanted in enumerate(drawn):
        assert restore_random(tmp_path, rank(index, 3), CPU, seed=7, step=4) is None
        assert torch.equal(torch.rand(3), wanted)


def test_the_first_rank_draws_what_a_process_alone_draws() -> None:
    torch.manual_seed(7)
    alone = torch.rand(3)
    torch.manual_seed(7)
    begin_random(7, 0)
    assert torch.equal(torch.rand(3), alone)


@pytest.mark.parametrize("count", [1, 4])
def test_another_number_of_ranks_is_said_and_none_takes_the_state_of_another(tmp_path: Path, count: int) -> None:
    drawn, found = save(tmp_path, 2), []
    for index in range(count):
        said = restore_random(tmp_path, rank(index, count), CPU, seed=7, step=4)
        assert said is not None and said.startswith(
            f"{count} ranks resume from a checkpoint with the random states of 2:"
        )
        found.append(torch.rand(3))
    assert torch.equal(found[0], drawn[0])
    assert len({tuple(numbers.tolist()) for numbers in found}) == count
