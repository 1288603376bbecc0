"""The queue in front of an engine: fair between principals, then between their names, earliest deadline first in each.

A pure data structure with an injected clock and without a lock; `teacher_server.batching.worker` guards it. Principals
share the engine by tokens: each has a virtual time that grows by the tokens it was served, and the smallest goes first
(start-time fair queueing; Goyal, Vin and Cheng 1996). A principal with a thousand sequences in the queue therefore
delays another's first sequence by at most a batch. The names of a principal share its turns in the same way.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from teacher_server.batching.admission import Client
from teacher_server.engines.base import EngineItem

T = TypeVar("T")

MAX_REMEMBERED = 1024
"""Idle members whose virtual times are remembered; there must be a limit, since clients choose names freely."""


class JobTimes(NamedTuple):
    """What is kept of a job for the call's trace, without its ids; see `SequenceJob`."""

    tokens: int
    queued_at: float
    picked_at: float
    started_at: float
    ended_at: float


@dataclass(slots=True, eq=False, weakref_slot=True)
class SequenceJob:
    """One sequence on its way through the engine. Times are seconds of the queue's clock; 0.0 if not reached yet.

    Attributes:
        item: what the engine scores.
        tokens: number of prompt and response tokens.
        deadline: time after which the scores are of no use.
        client: who asked for it.
        deliver: called once, where the worker posts it, with the job, its scores or an exception, and the weights hash.
        queued_at, picked_at, started_at, ended_at: when it was queued, put into a batch, and when its batch started and
            ended on the engine.
        cancelled: set when the scores are no longer wanted.
    """

    item: EngineItem
    tokens: int
    deadline: float
    client: Client
    deliver: Callable[["SequenceJob", Any, str], None]
    queued_at: float = 0.0
    picked_at: float = 0.0
    started_at: float = 0.0
    ended_at: float = 0.0
    cancelled: bool = False

    def times(self) -> JobTimes:
        """When it reached its stages so far."""
        return JobTimes(self.tokens, self.queued_at, self.picked_at, self.started_at, self.ended_at)


class _Turns(Generic[T]):
    """Members that share by tokens (start-time fair queueing); the one with the smallest virtual time is next."""

    def __init__(self) -> None:
        self.members: dict[str, T] = {}
        self._served: dict[str, float] = {}
        self._ahead: dict[str, float] = {}
        self._now = 0.0

    def join(self, name: str, member: T) -> T:
        """The member of that name, which is `member` if the name is new.

        A member that was idle starts at the current virtual time, without credit for its absence. A member that left
        after it was served more than its share is still ahead when it returns, or leaving would pay.
        """
        if name not in self.members:
            self.members[name] = member
            self._served[name] = max(self._now, self._ahead.pop(name, 0.0))
        return self.members[name]

    def next(self) -> str:
        """The name of the member whose turn it is."""
        return min(self._served, key=self._served.__getitem__)

    def charge(self, name: str, tokens: int) -> None:
        """Count the tokens that a member is served; virtual time is the start tag of the member served last."""
        self._now = max(self._now, self._served[name])
        self._served[name] += tokens

    def leave(self, name: str) -> None:
        """Remove an idle member; its virtual time is remembered while it is ahead of the current one."""
        del self.members[name]
        # A member that the current virtual time has overtaken would start at the current one anyway.
        self._ahead = {n: served for n, served in self._ahead.items() if served > self._now}
        if len(self._ahead) >= MAX_REMEMBERED:
            del self._ahead[next(iter(self._ahead))]
        self._ahead[name] = self._served.pop(name)


_Heap = list[tuple[float, int, SequenceJob]]


class FairQueue:
    """The sequences that wait for an engine.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._principals: _Turns[_Turns[_Heap]] = _Turns()
        self._idle: dict[str, _Turns[_Heap]] = {}
        self._order = itertools.count()
        self._waiting: Counter[Client] = Counter()
        self.sequences = 0

    @property
    def clients(self) -> list[Client]:
        """The clients that have jobs in the queue."""
        return [Client(p, name) for p, names in self._principals.members.items() for name in names.members]

    @property
    def tokens(self) -> int:
        """Tokens in the queue."""
        return self._waiting.total()

    def before(self, client: Client, tokens: int) -> int:
        """Tokens that would be taken from the queue before the last of `tokens` more of a client, were they queued now.

        By fair sharing, that is at most as many tokens of each other principal, or of each other name of the same
        principal, as of the client's own.
        """
        name = self._waiting[client] + tokens
        principal, others = name, Counter[str]()
        for other, waiting in self._waiting.items():
            if other.principal != client.principal:
                others[other.principal] += waiting
            elif other != client:
                principal += min(waiting, name)
        return principal - tokens + sum(min(waiting, principal) for waiting in others.values())

    def add(self, job: SequenceJob) -> None:
        """Queue a job."""
        heap = self._names_of(job.client.principal).join(job.client.name, [])
        job.queued_at = self._clock()
        # Among equal deadlines, first come, first served; the number also keeps heapq from comparing jobs.
        heapq.heappush(heap, (job.deadline, next(self._order), job))
        self.sequences += 1
        self._waiting[job.client] += job.tokens

    def take(self, max_tokens: int, max_sequences: int) -> tuple[list[SequenceJob], list[SequenceJob]]:
        """The next batch, and the jobs that were found expired.

        Cancelled jobs are dropped. A job that would exceed the token budget ends the batch instead of being overtaken,
        so that long sequences do not starve; a job that exceeds the budget by itself becomes a batch of its own.
        """
        batch: list[SequenceJob] = []
        expired: list[SequenceJob] = []
        room = max_tokens
        while self._principals.members and len(batch) < max_sequences:
            principal = self._principals.next()
            names = self._principals.members[principal]
            client = Client(principal, names.next())
            job = names.members[client.name][0][2]
            if job.cancelled or job.deadline <= self._clock():
                self._pop(client)
                if not job.cancelled:
                    expired.append(job)
                continue
            if batch and job.tokens > room:
                break
            # Charged before it is popped: if popping makes a member idle, it must leave with its new virtual time.
            self._principals.charge(principal, job.tokens)
            names.charge(client.name, job.tokens)
            self._pop(client)
            room -= job.tokens
            job.picked_at = self._clock()
            batch.append(job)
        return batch, expired

    def drain(self) -> list[SequenceJob]:
        """Remove and return all jobs that are not cancelled."""
        waiting = [entry[2] for client in self.clients for entry in self._heap(client)]
        self._principals, self._idle = _Turns(), {}
        self._waiting.clear()
        self.sequences = 0
        return [job for job in waiting if not job.cancelled]

    def purge(self) -> None:
        """Drop cancelled jobs now instead of when their turn comes, so that they neither count nor stay in memory."""
        for client in self.clients:
            heap = self._heap(client)
            kept = [entry for entry in heap if not entry[2].cancelled]
            self.sequences -= len(heap) - len(kept)
            self._waiting[client] = sum(entry[2].tokens for entry in kept)
            # In place, because the list belongs to the member.
            heap[:] = kept
            heapq.heapify(heap)
            self._leave_if_idle(client)

    def _heap(self, client: Client) -> _Heap:
        return self._principals.members[client.principal].members[client.name]

    def _pop(self, client: Client) -> None:
        job = heapq.heappop(self._heap(client))[2]
        self.sequences -= 1
        self._waiting[client] -= job.tokens
        self._leave_if_idle(client)

    def _names_of(self, principal: str) -> _Turns[_Heap]:
        """The names of a principal. When it returns, those it left with, since their virtual times still count."""
        if principal in self._principals.members:
            return self._principals.members[principal]
        names = self._idle.pop(principal) if principal in self._idle else _Turns()
        return self._principals.join(principal, names)

    def _leave_if_idle(self, client: Client) -> None:
        names = self._principals.members[client.principal]
        if not names.members[client.name]:
            names.leave(client.name)
            del self._waiting[client]
        if not names.members:
            self._principals.leave(client.principal)
            if len(self._idle) >= MAX_REMEMBERED:
                del self._idle[next(iter(self._idle))]
            self._idle[client.principal] = names
