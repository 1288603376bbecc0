"""What data-parallel ranks tell each other besides gradients; with one rank nothing is sent."""

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, gather_object
from torch import distributed as dist

from opd.errors import CancelledError, ConfigError, OpdError

T = TypeVar("T")
_MARGIN_SECONDS = 600.0


def launched_ranks() -> int:
    """How many ranks the launcher started, whether or not they form a group yet; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def make_accelerator(mixed_precision: str, patience: float) -> Accelerator:
    """The accelerator of this process, in the group that its launcher describes.

    Args:
        mixed_precision: "no", "fp16" or "bf16".
        patience: seconds that a rank may wait for a teacher while the others wait for it in a collective.

    Raises:
        ConfigError: when a launcher started several ranks that did not form a group, started one process instead of
            several, or asks accelerate to shard.
    """
    _check_launcher(os.environ)
    accelerator = Accelerator(
        mixed_precision=mixed_precision,
        # Without this several ranks on a machine that has only CPUs would each train alone.
        cpu=not torch.accelerator.is_available(),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=patience + _MARGIN_SECONDS))],
    )
    wanted = launched_ranks()
    if accelerator.num_processes != wanted:
        raise ConfigError(
            f"WORLD_SIZE is {wanted}, but accelerate formed a group of {accelerator.num_processes}; start the ranks "
            "with torchrun or accelerate launch, or unset WORLD_SIZE."
        )
    return accelerator


def _check_launcher(environment: Mapping[str, str]) -> None:
    """Refuse what accelerate would do silently."""
    if environment.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true", "yes", "on", "y", "t"):
        raise ConfigError(
            "ACCELERATE_USE_FSDP is set, but accelerate's FSDP is plain DDP on a CPU, and here the recipe says how the "
            "student is sharded: set train.sharding to fsdp and start the ranks with torchrun, without --use_fsdp."
        )
    # `accelerate launch --cpu --num_processes 2` tells where two would meet, and starts one.
    if "ACCELERATE_USE_CPU" in environment and "MASTER_PORT" in environment and "WORLD_SIZE" not in environment:
        raise ConfigError(
            "accelerate launch was asked for several processes and started one, as it does with --cpu; start the ranks "
            "with torchrun --nproc-per-node N -m opd.cli train RECIPE.yaml."
        )


class Ranks:
    """Agreement among ranks. Every rank must make the same calls in the same order.

    Args:
        accelerator: of this process; None for a process that is alone, or one of `group`.
        group: whose collectives these are, instead of those of `accelerator`.
    """

    def __init__(self, accelerator: Accelerator | None = None, *, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        if group is not None:
            self.count, self.index = dist.get_world_size(group), dist.get_rank(group)
        else:
            self.count = 1 if accelerator is None else accelerator.num_processes
            self.index = 0 if accelerator is None else accelerator.process_index
        self._alone = self.count == 1

    def beside(self) -> "Ranks":
        """The same ranks for another thread, whose collectives are kept apart; every rank calls it at the same time.

        They wait as long as it takes: a rank that is lost ends all (`student.learning.rank_watch`).
        """
        if not dist.is_initialized():
            return Ranks()
        return Ranks(group=dist.new_group(backend="gloo", timeout=timedelta(days=1)))

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank."""
        if self._alone:
            return [value]
        if self.group is None:
            return list(gather_object([value]))
        found: list[T] = [value] * self.count
        dist.all_gather_object(found, value, self.group)
        return found

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return any(self.gather(flag))

    def agree(self, work: Callable[[], T]) -> T:
        """The result of `work`; where it fails on a rank, it fails on all, so that none waits for another.

        Raises:
            OpdError: of this rank's work.
            CancelledError: when only that of another rank failed.
        """
        failure: OpdError | None = None
        try:
            result = work()
        except OpdError as error:
            failure = error
        # Also where nothing failed: a rank that skipped this exchange would meet the next one of the others.
        said = self.gather(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        for rank, reason in enumerate(said):
            if reason is not None:
                raise CancelledError(f"rank {rank} could not go on: {reason.rstrip('.')}")
        return result

    def total(self, counts: dict[str, float]) -> dict[str, float]:
        """Sums over ranks, by name."""
        sums: dict[str, float] = {}
        for part in self.gather(counts):  # in the order of ranks, so that every rank gets the same bits
            for name, value in part.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums


def told(value: T) -> list[T]:
    """The values of all ranks in torch's default group, by rank; every rank calls it, in the loop's thread.

    For what has no `Ranks`, such as a term of the objective.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    found: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


ALONE = Ranks()
"""The ranks of a process that runs by itself."""
