"""Children behind one `ask`: as many requests run at once as there are callers, up to a limit."""

import os
import threading

from opd.procs.children import START_SECONDS, Answer, Child, ChildFailed, Host


class Workers:
    """Processes that each answer one request at a time, started when a request finds all others busy.

    Safe to call from several threads. A request that hangs holds up only its own caller, until the time limit.

    Args:
        service: dotted path "module:Class", see `opd.procs.host.Service`.
        timeout: seconds per request.
        argument: what the service is made from.
        most: most processes at the same time; None for one per core.
        memory_mib: most memory of one process in MiB; 0 for no limit.
    """

    def __init__(
        self, service: str, timeout: float, argument: str = "", *, most: int | None = None, memory_mib: int = 0
    ) -> None:
        self.timeout = timeout
        self._host = Host(service, argument, memory_mib=memory_mib)
        self._free = threading.Semaphore(most or os.cpu_count() or 1)
        self._lock = threading.Lock()
        self._idle: list[Child] = []
        self._busy: set[Child] = set()

    def ask(self, request: object) -> Answer:
        """The answer of a process that is idle.

        Raises:
            ChildFailed: if it raises, takes too long, or its process ends.
        """
        with self._free:
            child = self._take()
            sound = False
            try:
                answer = child.ask(request, self.timeout)
                sound = True
                return answer
            except ChildFailed as error:
                sound = error.kind == "raised"
                raise
            finally:
                # On Ctrl-C too: a child that is still busy would answer the next request with the result of this one.
                self._give_back(child, sound)

    def _take(self) -> Child:
        """The child used last, so that if few are needed few are ever started, or else a new one, which is ready."""
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.quiet():
                    self._busy.add(child)
                    return child
                child.kill()
        child = self._host.connect()
        with self._lock:
            self._busy.add(child)
        try:
            child.ask(None, START_SECONDS)
        except BaseException:
            self._give_back(child, sound=False)
            raise
        return child

    def _give_back(self, child: Child, sound: bool) -> None:
        with self._lock:
            self._busy.discard(child)
            if sound:
                self._idle.append(child)
        if not sound:
            child.kill()

    def close(self) -> None:
        """Stop all processes; a request in progress fails, and the next one starts a new process."""
        with self._lock:
            idle, self._idle = self._idle, []
            for child in idle:
                child.kill()
            for child in self._busy:
                child.end()  # its caller, who waits for it, hangs up
        self._host.close()
