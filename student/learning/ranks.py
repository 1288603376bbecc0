"""What data-parallel ranks tell each other besides gradients; with one rank nothing is sent."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, gather_object
from torch import distributed as dist

from opd.errors import CancelledError, ConfigError, OpdError

T = TypeVar("T")
_MARGIN_SECONDS = 600.0
_VALUE, _DONE, _FAILED = "a value", "the end of agreed work", "a failure"


def launched_ranks() -> int:
    """How many ranks the launcher started, whether or not they form a group yet; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def make_accelerator(mixed_precision: str, patience: float) -> Accelerator:
    """The accelerator of this process, in the group that its launcher describes.

    Args:
        mixed_precision: "no" or "bf16".
        patience: seconds that a rank may wait for a teacher, or on a full disk, while the others
            wait for it in a collective.

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

    Each exchange says what its rank is about, so that one rank's failure within agreed work is heard by the others in
    their next exchange, wherever that is, and no rank waits for another that has left.

    Args:
        accelerator: of this process; None for a process that is alone, or one of `group`.
        group: whose collectives these are, instead of those of `accelerator`.
    """

    count = 1
    index = 0
    _depth = 0
    """Agreed works that this rank is within."""
    _left: int | None = None
    """The outermost of them that some rank has left with an error: until this one has too, nothing is exchanged."""
    _reason = ""
    apart = False
    """Whether this rank has failed in `bound` and left the others behind: it exchanges nothing any more."""

    def __init__(self, accelerator: Accelerator | None = None, *, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        if group is not None:
            self.count, self.index = dist.get_world_size(group), dist.get_rank(group)
        elif accelerator is not None:
            self.count, self.index = accelerator.num_processes, accelerator.process_index

    def beside(self) -> "Ranks":
        """The same ranks for another thread, whose collectives are kept apart; every rank calls it at the same time.

        They wait as long as it takes: a rank that is lost ends all (`student.learning.rank_watch`).
        """
        if not dist.is_initialized():
            return Ranks()
        return Ranks(group=dist.new_group(backend="gloo", timeout=timedelta(days=1)))

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank.

        Raises:
            CancelledError: when another rank could not go on with work that the ranks agree on.
        """
        return self._exchange(_VALUE, value)

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return any(self.gather(flag))

    def meet(self) -> None:
        """Go on when all ranks are here; to be called in agreed work before collectives that are not of this class.

        Raises:
            CancelledError: when another rank could not go on, and would be missing in those collectives.
        """
        self._exchange(_VALUE, None)

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Torch's own collectives follow: a rank that fails within cannot tell the others, which wait in them.

        It ends alone, and they are ended with its error (`student.learning.rank_watch`).
        """
        try:
            yield
        except BaseException:
            self.apart = self.count > 1
            raise

    def agree(self, work: Callable[[], T]) -> T:
        """The result of `work`; where it fails on a rank, it fails on all, so that none waits for another.

        `work` may exchange values and agree on parts of itself. Before torch's own collectives, such as those of a
        sharded student's forward, it has to `meet`; where a rank may fail between them, they are `bound`.

        Raises:
            OpdError: of this rank's work.
            CancelledError: when only that of another rank failed.
        """
        self._depth += 1
        try:
            result = work()
            # Also where nothing failed: a rank that skipped this exchange would meet the next one of the others.
            self._exchange(_DONE, None)
        except OpdError as error:
            if self._left is None and not self.apart:  # the others do not know yet, and can be told
                self._exchange(_FAILED, (self._depth, str(error)))
            raise
        finally:
            self._depth -= 1
            if self._left is not None and self._depth < self._left:
                self._left = None
        return result

    def _exchange(self, kind: str, value: T) -> list[T]:
        """The values of the ranks that are about the same; see `agree` for failures.

        Raises:
            CancelledError: when another rank has failed.
            RuntimeError: when the ranks are about different things, which is a fault of what they run.
        """
        if self.count == 1:
            return [value]
        if self._left is not None or self.apart:  # the error after which this rank has to leave was caught
            raise CancelledError(self._reason or "this rank has failed and left the others")
        told: list[tuple[str, Any]] = self._send((kind, value))
        failed = [(rank, *said) for rank, (other, said) in enumerate(told) if other == _FAILED]
        if failed:
            # Several may fail at a time, each within another agreed work: all leave the outermost of them.
            self._left = min(self._depth, *(depth for _, depth, _ in failed)) if self._depth else None
            self._reason = f"rank {failed[0][0]} could not go on: {failed[0][2].rstrip('.')}"
            if kind != _FAILED:
                raise CancelledError(self._reason)
        elif any(other != kind for other, _ in told):
            raise RuntimeError(
                f"the ranks are out of step: {[other for other, _ in told]}; every rank must exchange equally often."
            )
        return [said for _, said in told]

    def _send(self, message: T) -> list[T]:
        """The messages of all ranks, by rank."""
        if self.group is None:
            return list(gather_object([message]))
        found: list[T] = [message] * self.count
        dist.all_gather_object(found, message, self.group)
        return found

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
