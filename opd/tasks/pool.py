"""Several workers behind one `ask`: as many checks run at once as there are callers, up to a limit."""

import os
import threading
from collections.abc import Mapping
from typing import Any

from opd.tasks.worker import Answer, Worker


class WorkerPool:
    """Worker processes that are started when a request finds all others busy. Safe to call from several threads.

    A check that hangs holds up only its own caller, and ends with the time limit of a `Worker`.

    Args:
        check: dotted path "module:function", see `Worker`.
        timeout: seconds per request.
        most: processes at the same time; None for one per core.
        argument: for `prepare` of the module of `check`, see `Worker`.
    """

    def __init__(self, check: str, timeout: float, most: int | None = None, argument: str = "") -> None:
        self._check, self._timeout, self._argument = check, timeout, argument
        self._free = threading.Semaphore(most or os.cpu_count() or 1)
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()

    def ask(self, request: Mapping[str, Any]) -> Answer:
        """Run one check in a process that has nothing else to do.

        Raises:
            CheckFailed: when it raises, takes too long, or takes the process down.
        """
        with self._free:
            with self._lock:
                # The one used last: where few are needed, few are ever started.
                worker = self._idle.pop() if self._idle else Worker(self._check, self._timeout, self._argument)
                self._busy.add(worker)
            try:
                return worker.ask(request)
            finally:
                with self._lock:
                    self._busy.discard(worker)
                    # Also after a failure: a worker starts its process anew by itself.
                    self._idle.append(worker)

    def close(self) -> None:
        """Stop all processes, also those in the middle of a check, which fails; the next request starts others."""
        with self._lock:
            workers = [*self._idle, *self._busy]
        for worker in workers:
            worker.close()
