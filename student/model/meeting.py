"""The ranks of a run meet before they do anything long, so that each learns soon that another one is missing."""

import itertools
import json
import os
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous

from opd.errors import RankLostError, one_line
from student.model.rank_watch import Exchange, RankWatch
from student.model.ranks import ALONE, Ranks, launched_ranks

_PLACE = ("RANK", "MASTER_ADDR", "MASTER_PORT")
_EXCHANGES = itertools.count()
"""Numbers the exchanges of this process, because a store may outlive a meeting."""


class Meeting:
    """The ranks that a launcher started, which exchange values over its store until they form a process group.

    Args:
        store: the store.
        index: this rank.
        count: number of ranks.
    """

    def __init__(self, store: Any, index: int, count: int) -> None:
        self.index, self.count = index, count
        self._store = store

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, which JSON can hold, in the order of ranks."""
        key = f"opd/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_EXCHANGES)}"
        self._store.set(f"{key}/{self.index}", json.dumps(value))
        return [json.loads(self._store.get(f"{key}/{rank}")) for rank in range(self.count)]


def join(seconds: float, stack: ExitStack) -> RankWatch:
    """Meet the other ranks and watch them until `stack` closes; before all that may fail on one of them alone.

    Args:
        seconds: how long they may take.
        stack: tells them when and why this rank ends.

    Raises:
        RankLostError: if one of them has not come by then.
    """
    watch = RankWatch(meet(seconds))
    stack.push(watch.leave)  # exits run in reverse order: the others hear that this one ends once its parts are closed
    stack.push(watch.rename)  # a rank that ends may break the collective with which another is still starting
    return watch


def tell(error: Exception, seconds: float) -> None:
    """Tell the other ranks that this one ends with an error before it has joined them, such as one in its recipe.

    Args:
        error: the error, which the caller then raises.
        seconds: how long the others may take to come; those that come later miss this rank.
    """
    with suppress(RankLostError), ExitStack() as stack:
        join(seconds, stack).ending(error)


def meet(seconds: float) -> Exchange:
    """Wait until all ranks of this run are there.

    Args:
        seconds: how long they may take, whatever started them.

    Raises:
        RankLostError: if one of them has not come by then.
    """
    count = launched_ranks()
    if dist.is_available() and dist.is_initialized():
        return Ranks(group=dist.group.WORLD)
    # Where a part is missing, accelerate forms no group, which `make_accelerator` refuses.
    if count == 1 or not all(os.environ.get(name) for name in _PLACE):
        return ALONE
    index = int(os.environ["RANK"])
    try:
        # The process group finds the same store later: rank 0 keeps one per port, and torchrun serves its own.
        store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=seconds))))
        meeting = Meeting(store, index, count)
        meeting.gather(None)
    except (dist.DistError, TimeoutError) as error:
        place = ":".join(os.environ[name] for name in _PLACE[1:])
        raise RankLostError(
            f"rank {index} did not meet all {count} ranks at {place} within {seconds:g} s (train.rank_patience): "
            f"{one_line(error, 120)}; look into the logs of the others, and start the run again."
        ) from error
    return meeting
