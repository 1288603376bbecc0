"""What data-parallel ranks tell each other beside gradients; with one rank nothing is sent."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, gather_object

from opd.errors import CancelledError, ConfigError, OpdError

T = TypeVar("T")
_MARGIN_SECONDS = 600.0


def make_accelerator(mixed_precision: str, patience: float) -> Accelerator:
    """The accelerator of this process, in the group that its launcher describes.

    Args:
        mixed_precision: "no", "fp16" or "bf16".
        patience: seconds that a rank may wait for a teacher while the others wait for it.

    Raises:
        ConfigError: when a launcher started several ranks and they did not find together.
    """
    accelerator = Accelerator(
        mixed_precision=mixed_precision,
        # Without this several ranks on a machine that has only CPUs would each train alone.
        cpu=not torch.accelerator.is_available(),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=patience + _MARGIN_SECONDS))],
    )
    wanted = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != wanted:
        raise ConfigError(
            f"WORLD_SIZE is {wanted}, but accelerate formed a group of {accelerator.num_processes}; start the ranks "
            "with torchrun or accelerate launch, or unset WORLD_SIZE."
        )
    return accelerator


class Ranks:
    """Agreement among ranks. Every rank must make the same calls in the same order.

    Args:
        accelerator: of this process.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._alone = accelerator.num_processes == 1
        self.count = accelerator.num_processes
        self.index = accelerator.process_index

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank."""
        return [value] if self._alone else list(gather_object([value]))

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
        if self.any(failure is not None):
            raise failure or CancelledError("another rank could not go on")
        return result

    def total(self, counts: dict[str, float]) -> dict[str, float]:
        """Sums over ranks, by name."""
        sums: dict[str, float] = {}
        for part in self.gather(counts):
            for name, value in part.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums
