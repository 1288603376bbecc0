"""Torch's random states, from which dropout draws; every rank has its own, so that no two draw the same masks.

    rank 0          the seed of the recipe, as in a run of one process
    other ranks     a stream of the seed, the rank and the step in which it starts

A checkpoint holds the state of each rank in a separate file. If a run resumes with more ranks, those without a state
start a stream; with fewer ranks, the other states are not used. Everything else random is drawn from the rows' streams.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from student.data.streams import stream
from student.model.ranks import Ranks
from student.state.parts import Part
from student.state.state_io import load_state, state_parts

_STEM = "random-"


def begin_random(seed: int, rank: int, step: int = 0) -> None:
    """Seed torch with the stream of a rank."""
    if rank or step:
        torch.manual_seed(int(stream(seed, "torch", rank, step).integers(2**63)))


def random_state(device: torch.device) -> dict[str, Any]:
    """The current random states of the host and of `device`."""
    state: dict[str, Any] = {"host": torch.get_rng_state()}
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore what `random_state` returned."""
    torch.set_rng_state(state["host"])
    if "device" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], device)


def random_parts(place: str, rank: int, state: Mapping[str, Any]) -> Iterator[Part]:
    """The part with a rank's random state, below folder `place` of the checkpoint."""
    yield from state_parts(f"{place}/{_STEM}{rank:05d}", dict(state), copied=True)


def restore_random(folder: Path, ranks: Ranks, device: torch.device, *, seed: int, step: int) -> str | None:
    """Restore the state that this rank had in a checkpoint.

    Args:
        folder: where `random_parts` wrote.
        ranks: all ranks of this run.
        device: this rank's device.
        seed: the run's seed.
        step: number of steps done.

    Returns:
        A note for the log if the checkpoint has the states of another number of ranks; otherwise None.

    Raises:
        CheckpointError: if a state cannot be read.
    """
    saved = {int(path.stem.removeprefix(_STEM)) for path in folder.glob(f"{_STEM}*.json")}
    if ranks.index in saved:
        set_random_state(load_state(folder, f"{_STEM}{ranks.index:05d}"), device)
    else:
        begin_random(seed, ranks.index, step)
    if len(saved) == ranks.count:
        return None
    return (
        f"{ranks.count} ranks resume from a checkpoint with the random states of {len(saved)}: a model with dropout "
        "will draw other masks than it would have."
    )
