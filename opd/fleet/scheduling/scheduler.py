"""Which server gets which row: pull scheduling with bounded tokens in flight. No I/O; the clock is an argument.

A server takes the next rows when it has room, so a slow one takes fewer. Among the waiting rows it takes

1. a row that was re-issued, or may go to few servers, or that a row submitted ten seconds later would overtake;
2. otherwise the longest row that it can finish before the whole queue is expected to be done (the horizon, from
measured speeds): towards the end a slow server takes a short row or none, unless no other would finish it sooner;
3. preferably a row of a prompt that it has just seen; and with each row, others of its group as far as they fit the
RPC.

Beyond two rows, a server holds at most half of its share of what waits, and an RPC carries at most a quarter of it, so
that portions shrink towards the end. If a teacher has a single server, it gets all that its window holds, in full RPCs
once two rows are in flight: there is nothing to balance, and every RPC costs both sides time. Between teachers that
share a server, the one that was served fewer tokens goes first. `benchmarks/fleet_makespan.py` compares this with round
robin, least assigned and plain pull.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable

from opd.fleet.scheduling.completion_estimate import CompletionEstimate
from opd.fleet.scheduling.in_flight import Rpc, ScoreTask, ServerLoad
from opd.fleet.scheduling.queue import TeacherQueue
from opd.fleet.settings import CallSettings

Accept = Callable[[ScoreTask], bool]
"""Whether a row may go to the server at hand."""

_OVERTAKE_SECONDS = 10.0
_PROBATION_SECONDS = 10.0
_AFFINITY = 0.7  # least length, relative to the longest row that fits, of a row that is preferred for its prompt
_DEPTH = 0.5  # part of its share that a server may hold in flight
_GRAIN = 0.25  # part of its share that an RPC may carry
_SWEEP_SECONDS = 0.25
_REQUEST_BYTES = 1024  # most that a request takes apart from its rows: names, hashes, payload


class Scheduler:
    """Queues, servers, and the choice between them.

    Attributes:
        servers: what is in flight, by address.
        queues: waiting rows, by teacher.
    """

    def __init__(self, settings: CallSettings) -> None:
        self._settings = settings
        self.servers: dict[str, ServerLoad] = {}
        self.queues: dict[str, TeacherQueue] = {}
        self._estimates: dict[str, CompletionEstimate] = {}
        self._touched: set[str] = set()
        self._refilled: set[str] = set()
        self._swept = float("-inf")
        self._delayed: list[tuple[float, int, ScoreTask]] = []
        self._numbers = itertools.count()
        self._row_limits: dict[str, int] = {}
        self._token_limits: dict[str, int] = {}
        self._size_limits: dict[str, int] = {}

    # Servers.

    def add_server(self, address: str) -> ServerLoad:
        """The load of the server at an address, created if it is new."""
        if address not in self.servers:
            self.servers[address] = ServerLoad(address, self._settings.in_flight_tokens)
        return self.servers[address]

    def remove_server(self, address: str) -> None:
        """Forget a server, whose RPCs must have ended."""
        server = self.servers.pop(address, None)
        if server is not None:
            self.serve(server, ())

    def serve(self, server: ServerLoad, teachers: Iterable[str]) -> None:
        """Set which teachers may be asked for on a server."""
        wanted = set(teachers)
        for name in server.teachers - wanted:
            self._estimates[name].remove(server)
        for name in wanted - server.teachers:
            self.estimate(name).add(server)
        server.teachers = wanted
        self._touched.add(server.address)

    def estimate(self, teacher: str) -> CompletionEstimate:
        """The estimate of a teacher's completion, created if it is new."""
        if teacher not in self._estimates:
            self.queues.setdefault(teacher, TeacherQueue())
            self._estimates[teacher] = CompletionEstimate(teacher, self.queues[teacher], self._estimates)
        return self._estimates[teacher]

    def serving(self, teacher: str) -> list[ServerLoad]:
        """The servers on which a teacher may be asked for at present."""
        return list(self.estimate(teacher).servers.values())

    def limit(self, teacher: str, rows: int, tokens: int, size: int = 0) -> None:
        """Bound a teacher's RPCs by its servers' limits of rows, tokens and bytes; 0 for no limit of theirs."""
        self._row_limits[teacher] = min(self._settings.rows, rows or self._settings.rows)
        self._token_limits[teacher] = min(self._settings.tokens, tokens or self._settings.tokens)
        self._size_limits[teacher] = size

    # Rows.

    def submit(self, task: ScoreTask, *, urgent: bool = False) -> None:
        """Queue a row."""
        self.estimate(task.teacher).changed()
        self._refilled.add(task.teacher)
        queue = self.queues[task.teacher]
        if not len(queue):
            # Being idle earns nothing: the teacher joins where the active ones are, or where the last one stopped.
            active = [other.served for other in self.queues.values() if len(other)]
            latest = max(other.served for other in self.queues.values())
            queue.served = max(queue.served, min(active, default=latest))
        queue.add(task, urgent=urgent)

    def submit_later(self, task: ScoreTask, at: float) -> None:
        """Queue a row again at the time `at`, ahead of the others."""
        heapq.heappush(self._delayed, (at, task.number, task))

    def withdraw(self, task: ScoreTask) -> None:
        """Remove a waiting row from its queue; no effect if it does not wait."""
        queue = self.queues.get(task.teacher)
        if queue is not None and task in queue:
            queue.remove(task)

    def waiting(self, teacher: str) -> list[ScoreTask]:
        """Rows of a teacher that are queued or delayed."""
        queue = self.queues.get(teacher)
        queued = list(queue) if queue is not None else []
        return queued + [task for _, _, task in self._delayed if task.teacher == teacher and not task.done]

    # The choice.

    def plan(self, now: float) -> list[Rpc]:
        """Start all RPCs that can start now, beginning with the servers that have the fewest tokens in flight."""
        while self._delayed and self._delayed[0][0] <= now:
            task = heapq.heappop(self._delayed)[2]
            if not task.done:
                self.submit(task, urgent=True)
        # Teachers without waiting rows are left out, so that an idle fleet costs nothing.
        estimates = {name: self._estimates[name] for name, queue in self.queues.items() if len(queue)}
        for estimate in estimates.values():
            estimate.at(now)
        # A server that got rows is put back with its new load, so that rows are dealt out in turn.
        heap = [(server.in_flight_tokens, server.address) for server in self._askable(estimates, now)]
        heapq.heapify(heap)
        rpcs: list[Rpc] = []
        while heap:
            server = self.servers[heapq.heappop(heap)[1]]
            rpc = self._pull(server, estimates, now)
            if rpc is not None:
                rpcs.append(rpc)
                if server.open(now):
                    heapq.heappush(heap, (server.in_flight_tokens, server.address))
        return rpcs

    def _askable(self, estimates: dict[str, CompletionEstimate], now: float) -> list[ServerLoad]:
        """Open servers for which something has changed since they were last asked; every 0.25 s, all open servers.

        A server that got no row may get one later merely because time has passed (the ten seconds of rule 1, probation,
        a speed that fell elsewhere); the sweep finds it.
        """
        if not estimates:
            return []
        sweep = now - self._swept >= _SWEEP_SECONDS
        if sweep:
            self._swept = now
        refilled = {address for name in self._refilled & estimates.keys() for address in estimates[name].servers}
        self._refilled.clear()
        touched, self._touched = self._touched, set()
        asked = self.servers.keys() if sweep else (touched | refilled) & self.servers.keys()
        found: list[ServerLoad] = []
        for server in map(self.servers.__getitem__, asked):
            if server.open(now):
                if not estimates.keys().isdisjoint(server.teachers):
                    found.append(server)
            elif now < server.paused_until:
                self._touched.add(server.address)  # because no event marks the end of a pause
        return found

    def _pull(self, server: ServerLoad, estimates: dict[str, CompletionEstimate], now: float) -> Rpc | None:
        names = [name for name in server.teachers if name in estimates and len(self.queues[name])]
        # Ties are broken by name, so that the same rows and answers give the same plan.
        for name in sorted(names, key=lambda name: (self.queues[name].served, name)):
            first = self._next_row(server, estimates[name], now)
            if first is not None:
                rows = self._fill_rpc(server, first, estimates[name])
                return self.start(server, rows, estimates[name].speed(server), now)
        return None

    def _next_row(self, server: ServerLoad, estimate: CompletionEstimate, now: float) -> ScoreTask | None:
        """The row that the server should take next; None if it should wait."""
        queue, serving = self.queues[estimate.teacher], estimate.keys()

        def accept(task: ScoreTask) -> bool:
            return task.accepts(server.address, serving)

        oldest = queue.oldest()
        if oldest is not None and not accept(oldest):
            oldest = None
        # A row that failed has lost time already, and a row that is barred from servers has few others to wait for.
        if oldest is not None and (oldest.failures or oldest.barred):
            return oldest
        # Two rows hide the round trip; rows sent beyond that are out of reach of a faster server.
        deep = server.in_flight_rows >= 2 and estimate.ahead(server) > _DEPTH * estimate.share(server)
        if deep and not estimate.alone:
            return None
        # Rows that do not fill an RPC wait for more rows or an answer; otherwise each would travel by itself.
        if estimate.alone and server.rows_of(estimate.teacher) >= 2 and not self._fills_rpc(server, estimate.teacher):
            return None
        fits = estimate.fits(server)
        task = queue.longest(fits, accept) if fits > 0 else None
        if task is None:
            return self._row_beyond_horizon(server, estimate, accept, now)
        # With longest first alone, a steady stream of long rows would starve a short one.
        if oldest is not None and task.submitted - oldest.submitted > _OVERTAKE_SECONDS:
            return oldest
        return _of_known_prompt(server, queue, task, fits, accept) or task

    def _fills_rpc(self, server: ServerLoad, teacher: str) -> bool:
        """Whether the waiting rows of a teacher fill an RPC, or what is left of the server's window."""
        queue, most_rows, most_tokens = self.queues[teacher], *self._limits(teacher)
        return len(queue) >= most_rows or queue.tokens >= min(most_tokens, server.room())

    def _limits(self, teacher: str) -> tuple[int, int]:
        """Most rows and most tokens in an RPC."""
        rows, tokens = self._settings.rows, self._settings.tokens
        return self._row_limits.get(teacher, rows), self._token_limits.get(teacher, tokens)

    def _row_beyond_horizon(
        self, server: ServerLoad, estimate: CompletionEstimate, accept: Accept, now: float
    ) -> ScoreTask | None:
        """A row for a server that can finish none in time: a row that no other server would finish sooner, or None."""
        queue = self.queues[estimate.teacher]
        shortest = queue.shortest()
        if shortest is not None and not accept(shortest):
            shortest = None
        for candidate in (queue.longest(float("inf"), accept), shortest):
            if candidate is not None and estimate.quickest(server, candidate):
                return candidate
        # A server that looks slow must get a row now and then, or nothing would show that it has recovered.
        rested = server.in_flight_rows == 0 and now - server.last_sent > _PROBATION_SECONDS
        return shortest if rested else None

    def _fill_rpc(self, server: ServerLoad, first: ScoreTask, estimate: CompletionEstimate) -> list[ScoreTask]:
        """Take `first` and the rows that travel with it: those of its group, then the longest that fit."""
        queue = self.queues[first.teacher]
        most_rows, most_tokens = self._limits(first.teacher)
        bytes_left = (self._size_limits.get(first.teacher) or float("inf")) - _REQUEST_BYTES - first.size
        room = min(most_tokens, server.room())
        # Less than is allowed, because the last rows of a step must spread over all servers.
        if not estimate.alone:
            room = min(room, _GRAIN * estimate.share(server), estimate.fits(server))
        room -= first.tokens
        rows = [first]
        queue.remove(first)
        oldest = queue.oldest()
        # Rule 1 applies to the whole RPC: rows that would overtake the oldest one by too much stay behind.
        latest = oldest.submitted + _OVERTAKE_SECONDS if oldest is not None else float("inf")

        def accept(task: ScoreTask) -> bool:
            if task.submitted > latest or task.size > bytes_left:
                return False
            alike = task.batch_key == first.batch_key and task.twin not in rows
            # Stricter than `ScoreTask.accepts`: a row that failed here may lead an RPC, but must not endanger
            # another's.
            return alike and server.address not in task.avoid and server.address not in task.barred_now()

        # The server computes the keys and values of a group's prompt once.
        for task in queue.group(first.group):
            if len(rows) < most_rows and task.tokens <= room and accept(task):
                queue.remove(task)
                rows.append(task)
                room -= task.tokens
                bytes_left -= task.size
        while len(rows) < most_rows and room > 0:
            following = queue.longest(room, accept)
            if following is None:
                break
            queue.remove(following)
            rows.append(following)
            room -= following.tokens
            bytes_left -= following.size
        return rows

    def start(self, server: ServerLoad, rows: list[ScoreTask], speed: float, now: float, *, hedge: bool = False) -> Rpc:
        """Account for an RPC with `rows` on `server`, which processes `speed` tokens per second."""
        tokens = sum(task.tokens for task in rows)
        rpc = Rpc(
            number=next(self._numbers),
            server=server,
            teacher=rows[0].teacher,
            tasks=rows,
            waiting={task.number for task in rows},
            started=now,
            expected=(server.in_flight_tokens + tokens) / speed,
            hedge=hedge,
        )
        for task in rows:
            task.rpcs.append(rpc)
            task.hedged = task.hedged or hedge
        self.queues[rpc.teacher].served += tokens
        server.sent(rpc, now)
        return rpc

    # Answers.

    def answered(self, rpc: Rpc, task: ScoreTask, now: float) -> None:
        """Account for an answered row of an RPC."""
        rpc.waiting.discard(task.number)
        rpc.server.answered(task.tokens, now)
        self._touched.add(rpc.server.address)
        _leave(rpc, task)

    def dropped(self, rpc: Rpc, task: ScoreTask, now: float) -> None:
        """Account for a row that an RPC will not answer: it was answered elsewhere, cancelled, or failed."""
        if task.number in rpc.waiting:
            rpc.waiting.discard(task.number)
            rpc.server.released(task.tokens, now)
            self._touched.add(rpc.server.address)
        _leave(rpc, task)

    def ended(self, rpc: Rpc, now: float) -> list[ScoreTask]:
        """Account for the end of an RPC; returns its unanswered rows that no other RPC carries."""
        rpc.server.rpcs.pop(rpc.number, None)
        left = [task for task in rpc.tasks if task.number in rpc.waiting]
        for task in left:
            self.dropped(rpc, task, now)
        return [task for task in left if not task.done and not task.rpcs]


def _of_known_prompt(
    server: ServerLoad, queue: TeacherQueue, task: ScoreTask, fits: float, accept: Accept
) -> ScoreTask | None:
    """A row about as long as `task` whose prompt the server has just seen, or None."""
    for group in server.recent_groups(task.teacher)[:4]:
        for other in queue.group(group)[:4]:
            if _AFFINITY * task.tokens <= other.tokens <= fits and accept(other):
                return other
    return None


def _leave(rpc: Rpc, task: ScoreTask) -> None:
    if rpc in task.rpcs:
        task.rpcs.remove(rpc)
