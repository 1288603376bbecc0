"""Who gets which row: pull scheduling with bounded in-flight tokens. Pure: no I/O, the clock is an argument.

A server takes the next rows when it has room, so a slow one takes fewer. Among the waiting rows it takes

1. one that has waited too long or was re-issued;
2. else the longest one that it can finish before the whole queue is expected to be done (the horizon, from the
   measured speeds): a slow server near the end takes a short row or none, unless it is the quickest way for the row;
3. preferring rows of a prompt it has just seen, and with a row its whole group as far as it fits into the call.

A call carries at most a quarter of a server's share of what waits, so that the grain becomes finer towards the end.
Between teachers that share a server, the one that was served fewer tokens goes first. Measured against round robin,
least assigned and plain pull in `benchmarks/fleet_makespan.py`.
"""

import heapq
import itertools
from collections.abc import Iterable

from opd.fleet.job import Call, Job
from opd.fleet.lane import FIRST_SPEED, Lane
from opd.fleet.queue import TeacherQueue
from opd.fleet.settings import CallSettings

_STARVATION_SECONDS = 10.0
_PROBATION_SECONDS = 10.0
_AFFINITY = 0.7
_GRAIN = 4.0
_SLACK = 1.02


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
        self._serving: dict[str, dict[str, Lane]] = {}
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
            self._serving[name].pop(lane.key, None)
        for name in wanted:
            self._serving.setdefault(name, {})[lane.key] = lane
        lane.teachers = wanted

    def serving(self, teacher: str) -> list[Lane]:
        """The lanes on which a teacher may be asked for now."""
        return list(self._serving.get(teacher, {}).values())

    def limit(self, teacher: str, rows: int, tokens: int) -> None:
        """Bound a teacher's calls by its servers' limits; 0 means no limit of theirs."""
        self._row_limits[teacher] = min(self._settings.rows, rows or self._settings.rows)
        self._token_limits[teacher] = min(self._settings.tokens, tokens or self._settings.tokens)

    # Rows.

    def submit(self, job: Job, *, urgent: bool = False) -> None:
        """Queue a row."""
        queue = self.queues.setdefault(job.teacher, TeacherQueue())
        if not len(queue):
            active = [other.served for other in self.queues.values() if len(other)]
            queue.served = max(queue.served, min(active, default=0.0))
        queue.add(job, urgent=urgent)

    def submit_later(self, job: Job, at: float) -> None:
        """Queue a row again at the time `at`, ahead of the others."""
        heapq.heappush(self._delayed, (at, job.number, job))

    def withdraw(self, job: Job) -> None:
        """Take a row that waits out of the queue; without effect when it does not wait."""
        queue = self.queues.get(job.teacher)
        if queue is not None and job in queue:
            queue.remove(job)

    def next_due(self) -> float:
        """Time at which the next delayed row comes due, inf when there is none."""
        return self._delayed[0][0] if self._delayed else float("inf")

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
        busy = [name for name, queue in self.queues.items() if len(queue)]
        if not busy:
            return []
        outlook = {name: Outlook(self.serving(name), self.queues[name], now) for name in busy}
        lanes = {lane.key: lane for name in busy for lane in self.serving(name) if lane.open(now)}
        heap = [(lane.in_flight_tokens / _speed(lane, outlook), key) for key, lane in lanes.items()]
        heapq.heapify(heap)
        calls: list[Call] = []
        while heap:
            key = heapq.heappop(heap)[1]
            lane = lanes[key]
            call = self._pull(lane, outlook, now)
            if call is not None:
                calls.append(call)
                if lane.open(now):
                    heapq.heappush(heap, (lane.in_flight_tokens / _speed(lane, outlook), key))
        return calls

    def _pull(self, lane: Lane, outlook: dict[str, "Outlook"], now: float) -> Call | None:
        names = [name for name in lane.teachers if name in outlook and len(self.queues[name])]
        for name in sorted(names, key=lambda name: (self.queues[name].served, name)):
            head = self._head(lane, name, outlook[name], now)
            if head is not None:
                rows = self._company(lane, head, outlook[name])
                return self.start(lane, rows, outlook[name].speeds[lane.key], now)
        return None

    def _head(self, lane: Lane, name: str, outlook: "Outlook", now: float) -> Job | None:
        queue = self.queues[name]

        def accept(job: Job) -> bool:
            return lane.key not in job.avoid or outlook.keys <= job.avoid

        oldest = queue.oldest()
        if oldest is not None and (oldest.failures or now - oldest.submitted > _STARVATION_SECONDS) and accept(oldest):
            return oldest
        fits = outlook.horizon * _SLACK * outlook.speeds[lane.key] - lane.in_flight_tokens
        job = queue.longest(fits, accept) if fits > 0 else None
        if job is None:
            for candidate in (queue.longest(float("inf"), accept), queue.shortest()):
                if candidate is not None and accept(candidate) and outlook.quickest(lane, candidate.tokens):
                    return candidate
            # A lane that looks slow must get a row now and then, or it would never be seen to have recovered.
            shortest = queue.shortest()
            rested = lane.in_flight_rows == 0 and now - lane.last_sent > _PROBATION_SECONDS
            return shortest if rested and shortest is not None and accept(shortest) else None
        for group in lane.recent_groups(name)[:4]:
            for other in queue.group(group)[:4]:
                if _AFFINITY * job.tokens <= other.tokens <= fits and accept(other):
                    return other
        return job

    def _company(self, lane: Lane, head: Job, outlook: "Outlook") -> list[Job]:
        """The rows that travel with `head`: first of its group, then the longest ones that fit."""
        queue = self.queues[head.teacher]
        most_rows = self._row_limits.get(head.teacher, self._settings.rows)
        grain = queue.tokens / (_GRAIN * max(1, len(outlook.keys)))
        fits = outlook.horizon * _SLACK * outlook.speeds[lane.key] - lane.in_flight_tokens
        room = min(self._token_limits.get(head.teacher, self._settings.tokens), lane.room(), grain, fits) - head.tokens
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
        _leave(call, job)

    def dropped(self, call: Call, job: Job, now: float) -> None:
        """A row of a call will not be answered by it: it was answered elsewhere, cancelled, or failed."""
        if job.number in call.waiting:
            call.waiting.discard(job.number)
            call.lane.released(job.tokens, now)
        _leave(call, job)

    def ended(self, call: Call, now: float) -> list[Job]:
        """A call is over; returns its unanswered rows that nobody else carries now."""
        call.lane.calls.pop(call.number, None)
        left = [job for job in call.jobs if job.number in call.waiting]
        for job in left:
            self.dropped(call, job, now)
        return [job for job in left if not job.done and not job.calls]


def _leave(call: Call, job: Job) -> None:
    if call in job.calls:
        job.calls.remove(call)


def _speed(lane: Lane, outlook: dict[str, "Outlook"]) -> float:
    return next((look.speeds[lane.key] for look in outlook.values() if lane.key in look.speeds), FIRST_SPEED)


class Outlook:
    """What a teacher's lanes are expected to do, taken once per plan.

    Attributes:
        speeds: tokens per second by lane; where nothing was measured yet, the mean of the others.
        horizon: seconds until everything that waits or runs there is done when all lanes share it by their speed.
    """

    def __init__(self, lanes: list[Lane], queue: TeacherQueue, now: float) -> None:
        measured = {lane.key: lane.meter.speed(now) for lane in lanes}
        known = [speed for speed in measured.values() if speed]
        usual = sum(known) / len(known) if known else FIRST_SPEED
        self.lanes = lanes
        self.keys = set(measured)
        self.speeds = {key: speed or usual for key, speed in measured.items()}
        ahead = queue.tokens + sum(lane.in_flight_tokens for lane in lanes)
        self.horizon = ahead / max(sum(self.speeds.values()), 1e-9)

    def quickest(self, lane: Lane, tokens: int) -> bool:
        """Whether no other lane would finish a row of `tokens` sooner, were it sent now."""
        mine = (lane.in_flight_tokens + tokens) / self.speeds[lane.key]
        return all(mine <= (other.in_flight_tokens + tokens) / self.speeds[other.key] for other in self.lanes)
