"""Distributes rows over servers: each takes the next row when it has room; rows of a lost server go to the others.

A row is finished when its whole answer has arrived, and is requested again only if none has, so no row comes twice.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from opd.errors import one_line
from student.rollout.lost import EngineLostError
from student.rollout.servers.dialect import Answer, Ask
from student.rollout.servers.http import Connection, LostError
from student.rollout.servers.server import Server

Take = Callable[[int, Answer], None]
_Told = tuple[int, Answer] | tuple[Server, str] | BaseException
log = logging.getLogger(__name__)


class Crowd:
    """The rows of one rollout, sampled by several servers.

    Args:
        servers: the servers that hold the weights.
        asks: the rows to sample.
        in_flight: maximum number of rows in flight at a server.
    """

    def __init__(self, servers: Sequence[Server], asks: Sequence[Ask], in_flight: int) -> None:
        self._asks = asks
        self._waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._told: queue.SimpleQueue[_Told] = queue.SimpleQueue()
        self._connections: dict[Server, list[Connection]] = {server: [] for server in servers}
        self._threads: list[threading.Thread] = []
        self.reissued, self._counting = 0, threading.Lock()
        for index in range(len(asks)):
            self._waiting.put(index)
        for server in servers:
            # A thread and a connection for each row in flight: the client blocks, and a row's connection must be
            # closable without affecting other rows.
            for _ in range(min(in_flight, len(asks))):
                connection = server.connect()
                self._connections[server].append(connection)
                self._threads.append(threading.Thread(target=self._work, args=(server, connection), daemon=True))

    def run(self, take: Take) -> None:
        """Sample the rows; calls take(index, answer) for each in this thread, in the order in which they end.

        Raises:
            EngineLostError: if no server is left.
        """
        for thread in self._threads:
            thread.start()
        left, up = len(self._asks), set(self._connections)
        try:
            while left:
                told = self._told.get()
                if isinstance(told, BaseException):
                    raise told
                first, second = told
                if isinstance(first, int) and isinstance(second, Answer):
                    take(first, second)
                    left -= 1
                elif isinstance(first, Server):
                    self._leave(first, str(second), up)
        finally:
            self._end()

    def _leave(self, server: Server, why: str, up: set[Server]) -> None:
        """Stop using `server`; its other rows return to the queue as their connections are cut."""
        if server not in up:  # each of its rows in flight says so
            return
        server.lost, server.label = why, None
        up.remove(server)
        for connection in self._connections[server]:
            connection.cut()
        if not up:
            reasons = "; ".join(f"{one.url}: {one.lost}" for one in self._connections)
            raise EngineLostError(f"all rollout servers are lost ({reasons}).")
        log.warning("rollout server %s is left out until the next sync: %s.", server.url, why.rstrip("."))

    def _work(self, server: Server, connection: Connection) -> None:
        """Sample rows from the queue with one connection; runs in a thread."""
        # A thread that waits here when its server is lost still takes a row, fails on its cut connection and returns
        # the row, so the queue needs no other way to wake it.
        while not server.lost and (index := self._waiting.get()) is not None:
            ask = self._asks[index]
            try:
                answer = server.generate(connection, ask)
            except LostError as error:
                self._again(index, server, str(error))
                return
            except BaseException as error:  # raised again where the rows are awaited, which would otherwise hang
                self._told.put(error)
                return
            if not answer.whole or answer.weights != (ask.weights,):
                held = one_line(" and ".join(answer.weights) or "no weights", 100)
                self._again(index, server, f"it sampled with {held} instead of {ask.weights}")
                return
            self._told.put((index, answer))

    def _again(self, index: int, server: Server, why: str) -> None:
        with self._counting:
            self.reissued += 1
        self._waiting.put(index)
        self._told.put((server, why))

    def _end(self) -> None:
        # One entry for each thread ends those that wait for a row; those within a call end as their connection is cut.
        for _ in self._threads:
            self._waiting.put(None)
        for connections in self._connections.values():
            for connection in connections:
                connection.cut()
        for thread in self._threads:
            thread.join()
        for connections in self._connections.values():
            for connection in connections:
                connection.close()
