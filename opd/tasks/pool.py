"""Several workers behind one `ask`: as many checks run at once as there are callers, up to a limit."""

import os
import threading
from collections.abc import Mapping
from typing import Any

from opd.tasks.worker import Answer, Worker


class WorkerPool:
    """Worker processes, started when a request finds all others busy. Safe to call from several threads.

    A check that hangs holds up only its own caller, until the worker's time limit.

    Args:
        check: dotted path "module:function", see `Worker`.
        timeout: seconds per request.
        most: most processes at the same time; None for one per core.
        argument: for `prepare` in the module of `check`, see `Worker`.
    """

    def __init__(self, check: str, timeout: float, most: int | None = None, argument: str = "") -> None:
        self._check, self._timeout, self._argument = check, timeout, argument
        self._free = threading.Semaphore(most or os.cpu_count() or 1)
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()

    def ask(self, request: Mapping[str, Any]) -> Answer:
        """Run one check in a process that is idle.

        Raises:
            CheckFailed: if it raises, takes too long (`CheckTimedOut`), or crashes its process.
        """
        with self._free:
            with self._lock:
                # The one used last, so that if few are needed, few are ever started.
                worker = self._idle.pop() if self._idle else Worker(self._check, self._timeout, self._argument)
                self._busy.add(worker)
            try:
                return worker.ask(request)
            finally:
                with self._lock:
                    self._busy.discard(worker)
                    # After a failure too, because a worker starts its process again by itself.
                    self._idle.append(worker)

    def close(self) -> None:
        """Stop all processes; a check in progress fails, and the next request starts a new process."""
        with self._lock:
            workers = [*self._idle, *self._busy]
        for worker in workers:
            worker.close()
