"""Communication between data-parallel ranks apart from gradients: values, sums, and failures in agreed work.

With one rank nothing is sent.
"""

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
    """The number of ranks that the launcher started, whether or not they form a group yet; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def make_accelerator(mixed_precision: str, patience: float) -> Accelerator:
    """The accelerator of this process, in the group that its launcher describes.

    Args:
        mixed_precision: "no" or "bf16".
        patience: seconds for which a rank may wait for a teacher, or for space on a full disk, while the others wait
            for it in a collective.

    Raises:
        ConfigError: if the launcher started several ranks that did not form a group, started one process instead of
            several, or asks accelerate to shard the model.
    """
    _check_launcher(os.environ)
    accelerator = Accelerator(
        mixed_precision=mixed_precision,
        # Otherwise, several ranks on a machine without an accelerator would each train alone.
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
    """Refuse settings of the launcher that accelerate would silently take in another sense.

    Raises:
        ConfigError: naming the setting and what to do instead.
    """
    if environment.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true", "yes", "on", "y", "t"):
        raise ConfigError(
            "ACCELERATE_USE_FSDP is set, but accelerate's FSDP is plain DDP on a CPU, and the recipe already says how "
            "the student is sharded: set train.sharding to fsdp and start the ranks with torchrun, without --use_fsdp."
        )
    # `accelerate launch --cpu --num_processes 2` sets the address at which two processes would meet, and starts one.
    if "ACCELERATE_USE_CPU" in environment and "MASTER_PORT" in environment and "WORLD_SIZE" not in environment:
        raise ConfigError(
            "accelerate launch was asked for several processes but started one, as it does with --cpu; start the "
            "ranks with torchrun --nproc-per-node N -m opd.cli train RECIPE.yaml."
        )


class Ranks:
    """Exchanges between ranks. Every rank must make the same calls in the same order.

    Each message says what its rank is doing. If a rank fails within agreed work, the others therefore learn of it in
    their next exchange, whichever that is, and none waits for a rank that has left.

    Args:
        accelerator: the accelerator of this process; None for a process that runs alone, or with `group`.
        group: a process group whose collectives to use instead of the accelerator's.
    """

    count = 1
    index = 0
    _depth = 0
    """Number of nested `agree` calls that this rank is in."""
    _left: int | None = None
    """Depth of the outermost `agree` that a rank has left with an error; until this rank leaves it too, it exchanges
    nothing."""
    _reason = ""
    apart = False
    """Whether this rank failed in `bound` and can no longer exchange anything with the others."""

    def __init__(self, accelerator: Accelerator | None = None, *, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        if group is not None:
            self.count, self.index = dist.get_world_size(group), dist.get_rank(group)
        elif accelerator is not None:
            self.count, self.index = accelerator.num_processes, accelerator.process_index

    def beside(self) -> "Ranks":
        """The same ranks in a process group of their own, for use in another thread; every rank calls it together.

        Its collectives have a timeout of a day, because `student.model.rank_watch` handles lost ranks.
        """
        if not dist.is_initialized():
            return Ranks()
        return Ranks(group=dist.new_group(backend="gloo", timeout=timedelta(days=1)))

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in the order of ranks.

        Raises:
            CancelledError: if another rank failed within agreed work.
        """
        return self._exchange(_VALUE, value)

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank."""
        return any(self.gather(flag))

    def meet(self) -> None:
        """Wait for all ranks. To be called in agreed work before collectives that do not go through this class.

        Raises:
            CancelledError: if another rank failed, and so would be missing from those collectives.
        """
        self._exchange(_VALUE, None)

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Around torch's own collectives: a rank that fails within cannot tell the others, which wait in them.

        It ends alone, and `student.model.rank_watch` ends the others with its error.
        """
        try:
            yield
        except BaseException:
            self.apart = self.count > 1
            raise

    def agree(self, work: Callable[[], T]) -> T:
        """Return the result of `work`; if it fails on one rank, it fails on all, so that none waits for another.

        `work` may itself call `gather` and `agree`. Before torch's own collectives, such as those in the forward pass
        of a sharded student, it must call `meet`; if a rank may fail between such collectives, it enters `bound`.

        Raises:
            OpdError: if this rank's work failed.
            CancelledError: if only another rank's work failed.
        """
        self._depth += 1
        try:
            result = work()
            # After success too, because a rank that failed reports it in this exchange at the latest.
            self._exchange(_DONE, None)
        except OpdError as error:
            if self._left is None and not self.apart:  # the others do not know yet and can still be reached
                self._exchange(_FAILED, (self._depth, str(error)))
            raise
        finally:
            self._depth -= 1
            if self._left is not None and self._depth < self._left:
                self._left = None
        return result

    def _exchange(self, kind: str, value: T) -> list[T]:
        """Exchange values that all belong to the same `kind` of message; see `agree` for failures.

        Raises:
            CancelledError: if another rank has failed.
            RuntimeError: if the ranks send different kinds of messages, which is a bug in the code that they run.
        """
        if self.count == 1:
            return [value]
        if self._left is not None or self.apart:  # the error that makes this rank leave was caught on its way out
            raise CancelledError(self._reason or "this rank has failed and left the others")
        messages: list[tuple[str, Any]] = self._send((kind, value))
        failed = [(rank, *content) for rank, (other, content) in enumerate(messages) if other == _FAILED]
        if failed:
            # Several ranks may fail at once, at different depths: all ranks leave the outermost of these `agree` calls.
            self._left = min(self._depth, *(depth for _, depth, _ in failed)) if self._depth else None
            self._reason = f"rank {failed[0][0]} failed: {failed[0][2].rstrip('.')}"
            if kind != _FAILED:
                raise CancelledError(self._reason)
        elif any(other != kind for other, _ in messages):
            raise RuntimeError(
                f"the ranks are out of step: {[other for other, _ in messages]}; every rank must exchange equally "
                "often."
            )
        return [content for _, content in messages]

    def _send(self, message: T) -> list[T]:
        """The messages of all ranks, in the order of ranks."""
        if self.group is None:
            return list(gather_object([message]))
        messages: list[T] = [message] * self.count
        dist.all_gather_object(messages, message, self.group)
        return messages

    def total(self, counts: dict[str, float]) -> dict[str, float]:
        """Sums over ranks, by name."""
        sums: dict[str, float] = {}
        for part in self.gather(counts):  # in the order of ranks, so that every rank rounds alike
            for name, value in part.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums


def from_all_ranks(value: T) -> list[T]:
    """The values of all ranks in torch's default group, in the order of ranks, for code that is given no `Ranks`.

    Every rank must call it, in the loop's thread.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


ALONE = Ranks()
"""The ranks of a process that runs alone."""
