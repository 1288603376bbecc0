"""Who gets which row: pull scheduling with bounded in-flight tokens. Pure: no I/O, the clock is an argument.

A server takes the next rows when it has room, so a slow one takes fewer. Among the waiting rows it takes

1. one that was re-issued, or that a row ten seconds younger would overtake;
2. else the longest one that it can finish before the whole queue is expected to be done (the horizon, from the
   measured speeds): a slow server near the end takes a short row or none, unless it is the quickest way for the row;
3. preferring rows of a prompt it has just seen, and with a row its whole group as far as it fits into the call.

Beyond two rows, a server holds at most half of its share of what waits, and a call carries at most a quarter, so
that the grain becomes finer towards the end.
Between teachers that share a server, the one that was served fewer tokens goes first. Measured against round robin,
least assigned and plain pull in `benchmarks/fleet_makespan.py`.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable

from opd.fleet.scheduling.completion_estimate import Outlook
from opd.fleet.scheduling.in_flight import Call, Job, Lane
from opd.fleet.scheduling.queue import TeacherQueue
from opd.fleet.settings import CallSettings

_OVERTAKE_SECONDS = 10.0
_PROBATION_SECONDS = 10.0
_AFFINITY = 0.7
_DEPTH = 0.5
_GRAIN = 0.25
_SWEEP_SECONDS = 0.25


class Scheduler:
    """Queues, lanes and the choice between them.

    Attributes:
        lanes: servers by address.
        queues: waiting rows by teacher.
    """

    def __init__(self, settings: CallSettings) -> None:
        self._settings = settings
        self.lanes: dict[str, Lane] = {}
        self.queues: dict[str, TeacherQueue] = {}
        self._looks: dict[str, Outlook] = {}
        self._touched: set[str] = set()
        self._refilled: set[str] = set()
        self._swept = float("-inf")
        self._delayed: list[tuple[float, int, Job]] = []
        self._numbers = itertools.count()
        self._row_limits: dict[str, int] = {}
        self._token_limits: dict[str, int] = {}

    # Lanes.

    def add_lane(self, key: str) -> Lane:
        """The lane of a server, made when it is new."""
        if key not in self.lanes:
            self.lanes[key] = Lane(key, self._settings.in_flight_tokens)
        return self.lanes[key]

    def remove_lane(self, key: str) -> None:
        """Forget a server; its calls must have ended."""
        lane = self.lanes.pop(key, None)
        if lane is not None:
            self.serve(lane, ())

    def serve(self, lane: Lane, teachers: Iterable[str]) -> None:
        """Set which teachers may be asked for on a lane."""
        wanted = set(teachers)
        for name in lane.teachers - wanted:
            self._looks[name].remove(lane)
        for name in wanted - lane.teachers:
            self.look(name).add(lane)
        lane.teachers = wanted
        self._touched.add(lane.key)

    def look(self, teacher: str) -> Outlook:
        """The outlook of a teacher."""
        if teacher not in self._looks:
            self.queues.setdefault(teacher, TeacherQueue())
            self._looks[teacher] = Outlook(teacher, self.queues[teacher], self._looks)
        return self._looks[teacher]

    def serving(self, teacher: str) -> list[Lane]:
        """The lanes on which a teacher may be asked for now."""
        return list(self.look(teacher).lanes.values())

    def limit(self, teacher: str, rows: int, tokens: int) -> None:
        """Bound a teacher's calls by its servers' limits; 0 means no limit of theirs."""
        self._row_limits[teacher] = min(self._settings.rows, rows or self._settings.rows)
        self._token_limits[teacher] = min(self._settings.tokens, tokens or self._settings.tokens)

    # Rows.

    def submit(self, job: Job, *, urgent: bool = False) -> None:
        """Queue a row."""
        self.look(job.teacher).changed()
        self._refilled.add(job.teacher)
        queue = self.queues[job.teacher]
        if not len(queue):
            # Time spent idle earns nothing: it joins where the others are, or where the last one left off.
            active = [other.served for other in self.queues.values() if len(other)]
            latest = max(other.served for other in self.queues.values())
            queue.served = max(queue.served, min(active, default=latest))
        queue.add(job, urgent=urgent)

    def submit_later(self, job: Job, at: float) -> None:
        """Queue a row again at the time `at`, ahead of the others."""
        heapq.heappush(self._delayed, (at, job.number, job))

    def withdraw(self, job: Job) -> None:
        """Take a row that waits out of the queue; without effect when it does not wait."""
        queue = self.queues.get(job.teacher)
        if queue is not None and job in queue:
            queue.remove(job)

    def waiting(self, teacher: str) -> list[Job]:
        """Rows of a teacher that are queued or delayed."""
        queue = self.queues.get(teacher)
        queued = list(queue) if queue is not None else []
        return queued + [job for _, _, job in self._delayed if job.teacher == teacher and not job.done]

    # The choice.

    def plan(self, now: float) -> list[Call]:
        """Start all calls that can start now; the lane with the least work ahead of it is asked first."""
        while self._delayed and self._delayed[0][0] <= now:
            job = heapq.heappop(self._delayed)[2]
            if not job.done:
                self.submit(job, urgent=True)
        looks = {name: self._looks[name] for name, queue in self.queues.items() if len(queue)}
        for look in looks.values():
            look.at(now)
        heap = [(lane.in_flight_tokens, lane.key) for lane in self._askable(looks, now)]
        heapq.heapify(heap)
        calls: list[Call] = []
        while heap:
            lane = self.lanes[heapq.heappop(heap)[1]]
            call = self._pull(lane, looks, now)
            if call is not None:
                calls.append(call)
                if lane.open(now):
                    heapq.heappush(heap, (lane.in_flight_tokens, lane.key))
        return calls

    def _askable(self, looks: dict[str, Outlook], now: float) -> list[Lane]:
        """Open lanes for which something has changed since they were asked last; all of them now and then."""
        if not looks:
            return []
        sweep = now - self._swept >= _SWEEP_SECONDS
        if sweep:
            self._swept = now
        refilled = {key for name in self._refilled & looks.keys() for key in looks[name].lanes}
        self._refilled.clear()
        touched, self._touched = self._touched, set()
        found: list[Lane] = []
        for key, lane in self.lanes.items():
            if not (sweep or key in touched or key in refilled):
                continue
            if lane.open(now):
                if not looks.keys().isdisjoint(lane.teachers):
                    found.append(lane)
            elif now < lane.paused_until:
                self._touched.add(key)
        return found

    def _pull(self, lane: Lane, looks: dict[str, Outlook], now: float) -> Call | None:
        names = [name for name in lane.teachers if name in looks and len(self.queues[name])]
        for name in sorted(names, key=lambda name: (self.queues[name].served, name)):
            head = self._head(lane, looks[name], now)
            if head is not None:
                rows = self._company(lane, head, looks[name])
                return self.start(lane, rows, looks[name].speed(lane), now)
        return None

    def _head(self, lane: Lane, look: Outlook, now: float) -> Job | None:
        """The row that the lane should take next, or None when it should wait."""
        queue = self.queues[look.teacher]

        def accept(job: Job) -> bool:
            return lane.key not in job.avoid or look.keys() <= job.avoid

        oldest = queue.oldest()
        if oldest is not None and not accept(oldest):
            oldest = None
        if oldest is not None and oldest.failures:
            return oldest
        if lane.in_flight_rows >= 2 and look.ahead(lane) > _DEPTH * look.share(lane):
            return None
        fits = look.fits(lane)
        job = queue.longest(fits, accept) if fits > 0 else None
        if job is None:
            return self._exception(lane, look, accept, now)
        if oldest is not None and job.submitted - oldest.submitted > _OVERTAKE_SECONDS:
            return oldest
        return _familiar(lane, queue, job, fits, accept) or job

    def _exception(self, lane: Lane, look: Outlook, accept: Callable[[Job], bool], now: float) -> Job | None:
        """A row for a lane that would be done with none of them in time: one it is still the quickest way for."""
        queue = self.queues[look.teacher]
        shortest = queue.shortest()
        if shortest is not None and not accept(shortest):
            shortest = None
        for candidate in (queue.longest(float("inf"), accept), shortest):
            if candidate is not None and look.quickest(lane, candidate.tokens):
                return candidate
        # A lane that looks slow must get a row now and then, or it would never be seen to have recovered.
        rested = lane.in_flight_rows == 0 and now - lane.last_sent > _PROBATION_SECONDS
        return shortest if rested else None

    def _company(self, lane: Lane, head: Job, look: Outlook) -> list[Job]:
        """The rows that travel with `head`: first of its group, then the longest ones that fit."""
        queue = self.queues[head.teacher]
        most_rows = self._row_limits.get(head.teacher, self._settings.rows)
        most_tokens = self._token_limits.get(head.teacher, self._settings.tokens)
        room = min(most_tokens, lane.room(), _GRAIN * look.share(lane), look.fits(lane)) - head.tokens
        rows = [head]
        queue.remove(head)

        def accept(job: Job) -> bool:
            return job.batch_key == head.batch_key and lane.key not in job.avoid

        for job in queue.group(head.group):
            if len(rows) < most_rows and job.tokens <= room and accept(job):
                queue.remove(job)
                rows.append(job)
                room -= job.tokens
        while len(rows) < most_rows and room > 0:
            following = queue.longest(room, accept)
            if following is None:
                break
            queue.remove(following)
            rows.append(following)
            room -= following.tokens
        return rows

    def start(self, lane: Lane, rows: list[Job], speed: float, now: float, *, hedge: bool = False) -> Call:
        """Account for a call with `rows` on `lane`, which works at `speed` tokens per second."""
        tokens = sum(job.tokens for job in rows)
        call = Call(
            number=next(self._numbers),
            lane=lane,
            teacher=rows[0].teacher,
            jobs=rows,
            waiting={job.number for job in rows},
            started=now,
            expected=(lane.in_flight_tokens + tokens) / speed,
            hedge=hedge,
        )
        for job in rows:
            job.calls.append(call)
            job.hedged = job.hedged or hedge
        self.queues[call.teacher].served += tokens
        lane.sent(call, now)
        return call

    # Answers.

    def answered(self, call: Call, job: Job, now: float) -> None:
        """A row of a call was answered."""
        call.waiting.discard(job.number)
        call.lane.answered(job.tokens, now)
        self._touched.add(call.lane.key)
        _leave(call, job)

    def dropped(self, call: Call, job: Job, now: float) -> None:
        """A row of a call will not be answered by it: it was answered elsewhere, cancelled, or failed."""
        if job.number in call.waiting:
            call.waiting.discard(job.number)
            call.lane.released(job.tokens, now)
            self._touched.add(call.lane.key)
        _leave(call, job)

    def ended(self, call: Call, now: float) -> list[Job]:
        """A call is over; returns its unanswered rows that nobody else carries now."""
        call.lane.calls.pop(call.number, None)
        left = [job for job in call.jobs if job.number in call.waiting]
        for job in left:
            self.dropped(call, job, now)
        return [job for job in left if not job.done and not job.calls]


def _familiar(lane: Lane, queue: TeacherQueue, job: Job, fits: float, accept: Callable[[Job], bool]) -> Job | None:
    """A row about as long as `job` whose prompt the lane has just seen."""
    for group in lane.recent_groups(job.teacher)[:4]:
        for other in queue.group(group)[:4]:
            if _AFFINITY * job.tokens <= other.tokens <= fits and accept(other):
                return other
    return None


def _leave(call: Call, job: Job) -> None:
    if call in job.calls:
        job.calls.remove(call)
