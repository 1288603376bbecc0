"""The scheduler's expectations: how fast each server of a teacher is, its share of the work, and when all is done."""

from collections.abc import Mapping, Set

from opd.fleet.scheduling.in_flight import ScoreTask, ServerLoad
from opd.fleet.scheduling.queue import TeacherQueue
from opd.fleet.scheduling.throughput import FIRST_SPEED

_SLACK = 1.02  # a row may end 2 % after the horizon: estimates are not exact, and an idle server is a loss
_FRESHNESS = 0.01
_FRESH_SECONDS = 0.005


class CompletionEstimate:
    """When a teacher's servers are expected to finish all that waits, and how much each of them can take until then.

    The sums over all servers are cached for 1 % of that time, and at least 5 ms: they are needed for every choice, and
    more precise ones would not change it.

    Teachers that share servers share their time: the work that waits for another teacher counts in proportion to the
    fraction of this teacher's servers that it shares.

    Args:
        teacher: name of the teacher.
        queue: its waiting rows.
        others: the estimates of all teachers, including this one; only read.

    Attributes:
        teacher: name of the teacher.
        servers: where the teacher may be asked for, by address.
        total: tokens per second of all its servers, as of the last sum.
    """

    def __init__(self, teacher: str, queue: TeacherQueue, others: "Mapping[str, CompletionEstimate]") -> None:
        self.teacher = teacher
        self.servers: dict[str, ServerLoad] = {}
        self.total = 1.0
        self._queue = queue
        self._others = others
        self._overlaps: dict[str, float] | None = None
        self._now = 0.0
        self._valid_until = float("-inf")
        self._speeds: dict[str, float] = {}
        self._end = 0.0

    def add(self, server: ServerLoad) -> None:
        """Allow a server to be asked from now on."""
        self.servers[server.address] = server
        self._forget_overlaps()

    def remove(self, server: ServerLoad) -> None:
        """Stop a server from being asked."""
        self.servers.pop(server.address, None)
        self._forget_overlaps()

    def changed(self) -> None:
        """Invalidate the cached sums, because rows or servers came or went."""
        self._valid_until = float("-inf")

    def at(self, now: float) -> "CompletionEstimate":
        """Set the time for all queries that follow; returns the estimate itself."""
        self._now = now
        return self

    def _renew(self) -> None:
        if self._now < self._valid_until:
            return
        measured = {address: server.throughput.speed(self._now) for address, server in self.servers.items()}
        known = [speed for speed in measured.values() if speed]
        # A server that was never measured counts as average, so that it gets rows and is measured.
        usual = sum(known) / len(known) if known else FIRST_SPEED
        self._speeds = {address: speed or usual for address, speed in measured.items()}
        # Never 0, because work of a teacher without servers is divided by it.
        self.total = max(sum(self._speeds.values()), 1e-9)
        ahead = sum(server.ahead(self._now, self._speeds[address]) for address, server in self.servers.items())
        horizon = ahead / self.total + self._waiting_seconds()
        self._end = self._now + horizon
        # While a server is unmeasured, a single answer can change all speeds, so cache for 5 ms only.
        self._valid_until = self._now + max(_FRESH_SECONDS, _FRESHNESS * horizon * (len(known) == len(measured)))

    def _waiting_seconds(self) -> float:
        """Seconds that the servers need for what waits; for other teachers, the part that falls on shared servers."""
        if self._overlaps is None:
            self._overlaps = {
                name: len(self.servers.keys() & other.servers.keys()) / max(1, len(self.servers))
                for name, other in self._others.items()
            }
        return sum(
            overlap * self._others[name]._queue.tokens / self._others[name].total
            for name, overlap in self._overlaps.items()
            if overlap
        )

    def _forget_overlaps(self) -> None:
        for other in self._others.values():
            other._overlaps = None
            other.changed()

    @property
    def alone(self) -> bool:
        """Whether a single server has all the work, so that there is nothing to balance."""
        return len(self.servers) == 1

    def keys(self) -> Set[str]:
        """Addresses of the servers."""
        return self.servers.keys()

    def speed(self, server: ServerLoad) -> float:
        """A server's tokens per second; the mean of the other servers if it was not measured yet."""
        self._renew()
        return self._speeds[server.address]

    def ahead(self, server: ServerLoad) -> float:
        """Tokens in flight on a server that it has not processed yet."""
        return server.ahead(self._now, self.speed(server))

    def share(self, server: ServerLoad) -> float:
        """A server's share, by its speed, of the tokens that wait for all its teachers."""
        speed = self.speed(server)
        return self._waiting_seconds() * speed

    def fits(self, server: ServerLoad) -> float:
        """Tokens that a server can take and still finish by the horizon, when all servers together would finish."""
        speed = self.speed(server)
        return (self._end - self._now) * _SLACK * speed - server.ahead(self._now, speed)

    def finish(self, server: ServerLoad, tokens: int) -> float:
        """Seconds until a server would finish a row of `tokens` tokens if it were sent now."""
        return (self.ahead(server) + tokens) / self.speed(server)

    def quickest(self, server: ServerLoad, task: ScoreTask) -> bool:
        """Whether no other server where a row may go would finish it sooner if it were sent now."""
        mine, barred = self.finish(server, task.tokens), task.barred_now()
        others = (other for address, other in self.servers.items() if address not in barred)
        return all(mine <= self.finish(other, task.tokens) for other in others)
