"""Has the ranks sample a step at the same time, where all ask servers that hold one version of the weights.

Rows are sampled beside learning in a thread of each rank. A rank that is done may begin with the next step only when
all are: the weights of that step would replace those with which the others still sample, and their rows be asked again.
Threads must leave collectives to the loop, and one must be able to give up while it waits; so they count in a store.
"""

import os
import time
from collections.abc import Callable

from torch._C._distributed_c10d import TCPStore

from student.learning.ranks import Ranks

_POLL_SECONDS = 0.02
_DONE = "steps sampled"


class Gate:
    """See the module; every rank makes it at the same time.

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
        """Until all ranks have sampled as many steps as this one, or this one gives up."""
        # Adding 0 reads the count, where `get` would wait until it is set and could not be given up.
        while not given_up() and self._store.add(_DONE, 0) < self._mine * self._count:
            time.sleep(_POLL_SECONDS)

    def done(self) -> None:
        """This rank has sampled a step."""
        self._mine += 1
        self._store.add(_DONE, 1)
