"""Keeps ranks on the same step when they sample ahead from shared servers, which hold one version of the weights.

Each rank samples ahead in a thread. A rank that has finished a step may start the next one only when all ranks have
finished: otherwise the weights of the next step would replace those with which the others still sample, and their rows
would have to be requested again. The threads must leave collectives to the loop, and a waiting thread must be able to
give up, so they use counters in a store.
"""

import os
import time
from collections.abc import Callable

from torch._C._distributed_c10d import TCPStore

from student.model.ranks import Ranks

_POLL_SECONDS = 0.02
_DONE = "steps sampled"


class Gate:
    """The gate between steps; see the module docstring. All ranks construct it together.

    Args:
        ranks: all ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        host, main = os.environ.get("MASTER_ADDR", "127.0.0.1"), ranks.index == 0
        self._count, self._mine = ranks.count, 0
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if main else None
        port = ranks.gather(None if store is None else store.port)[0]
        self._store = store or TCPStore(host, int(port or 0), is_master=False, wait_for_workers=False)

    def wait(self, given_up: Callable[[], bool]) -> None:
        """Wait until all ranks have sampled as many steps as this one, or `given_up` returns True."""
        # Adding 0 reads the count; `get` would block until the key is set and could not give up.
        while not given_up() and self._store.add(_DONE, 0) < self._mine * self._count:
            time.sleep(_POLL_SECONDS)

    def done(self) -> None:
        """Record that this rank has sampled a step."""
        self._mine += 1
        self._store.add(_DONE, 1)
