"""The queue in front of one engine: fair between clients, earliest deadline first within a client.

A pure data structure with an injected clock and no lock of its own; `teacher_server.batching.worker` guards it. Clients
share the engine by tokens: each has a virtual time that grows with the tokens it was served, and the client with the
smallest one goes first (start-time fair queueing), so a client with a thousand sequences waiting delays another's first
sequence by at most a batch.
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from teacher_server.engines.base import EngineItem


@dataclass(slots=True, eq=False)
class SequenceJob:
    """One sequence on its way through the engine. Times are seconds of the queue's clock, 0.0 until reached.

    Attributes:
        item: what the engine gets.
        tokens: prompt plus response.
        deadline: when the answer is of no more use.
        client: key for fairness.
        deliver: called once, on the worker's thread, with the job, its scores or an exception, and the weights hash.
        queued_at, picked_at, started_at, ended_at: when it was queued, put into a batch, and when the forward
            started and ended.
        cancelled: set by the caller who no longer wants the answer.
    """

    item: EngineItem
    tokens: int
    deadline: float
    client: str
    deliver: Callable[["SequenceJob", Any, str], None]
    queued_at: float = 0.0
    picked_at: float = 0.0
    started_at: float = 0.0
    ended_at: float = 0.0
    cancelled: bool = False


@dataclass(slots=True, eq=False)
class _Client:
    virtual_time: float
    heap: list[tuple[float, int, SequenceJob]] = field(default_factory=list)


class FairQueue:
    """Sequences waiting for an engine.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._clients: dict[str, _Client] = {}
        self._finished: dict[str, float] = {}
        self._order = itertools.count()
        self._virtual_now = 0.0
        self.sequences = 0
        self.tokens = 0

    def add(self, job: SequenceJob) -> None:
        """Queue a job; a client that was idle starts at the present virtual time, without credit for its absence."""
        client = self._clients.get(job.client)
        if client is None:
            # One that left with tokens served ahead of its share does not shed them by coming back.
            start = max(self._virtual_now, self._finished.pop(job.client, 0.0))
            client = self._clients[job.client] = _Client(start)
        job.queued_at = self._clock()
        heapq.heappush(client.heap, (job.deadline, next(self._order), job))
        self.sequences += 1
        self.tokens += job.tokens

    def take(self, max_tokens: int, max_sequences: int) -> tuple[list[SequenceJob], list[SequenceJob]]:
        """The next batch and the jobs that were found expired.

        Cancelled jobs vanish. A job that would break the token budget ends the batch rather than being overtaken,
        so that long sequences do not starve; alone it always goes.
        """
        batch: list[SequenceJob] = []
        expired: list[SequenceJob] = []
        room = max_tokens
        while self._clients and len(batch) < max_sequences:
            name = min(self._clients, key=lambda n: self._clients[n].virtual_time)
            client = self._clients[name]
            job = client.heap[0][2]
            if job.cancelled or job.deadline <= self._clock():
                self._pop(name)
                self._forget_idle(name, client)
                if not job.cancelled:
                    expired.append(job)
                continue
            if batch and job.tokens > room:
                break
            self._pop(name)
            self._virtual_now = max(self._virtual_now, client.virtual_time)
            client.virtual_time += job.tokens
            self._forget_idle(name, client)
            room -= job.tokens
            job.picked_at = self._clock()
            batch.append(job)
        return batch, expired

    def drain(self) -> list[SequenceJob]:
        """Remove and return everything that waits and is not cancelled."""
        waiting = [entry[2] for client in self._clients.values() for entry in client.heap]
        self._clients.clear()
        self.sequences = self.tokens = 0
        return [job for job in waiting if not job.cancelled]

    def purge(self) -> None:
        """Forget cancelled jobs now instead of when their turn comes, so that they neither count nor stay alive."""
        for name in list(self._clients):
            client = self._clients[name]
            kept = [entry for entry in client.heap if not entry[2].cancelled]
            for entry in client.heap:
                if entry[2].cancelled:
                    self.sequences -= 1
                    self.tokens -= entry[2].tokens
            if len(kept) < len(client.heap):
                heapq.heapify(kept)
                client.heap = kept
            self._forget_idle(name, client)

    def _forget_idle(self, name: str, client: _Client) -> None:
        """Drop a client without jobs; the time it was served up to is kept while it is ahead of the present.

        Few are, so the table is small.
        """
        if not client.heap:
            del self._clients[name]
            self._finished = {n: t for n, t in self._finished.items() if t > self._virtual_now}
            self._finished[name] = client.virtual_time

    def _pop(self, name: str) -> None:
        job = heapq.heappop(self._clients[name].heap)[2]
        self.sequences -= 1
        self.tokens -= job.tokens
