"""The scheduler's expectations: how fast each server of a teacher is, its share of the work, and when all is done."""

from collections.abc import Mapping, Set

from opd.fleet.scheduling.in_flight import ScoreTask, ServerLoad
from opd.fleet.scheduling.queue import TeacherQueue
from opd.fleet.scheduling.throughput import FIRST_SPEED

_SLACK = 1.02  # a row may end this much after the horizon: estimates are not exact, and a server left idle is a loss
_FRESHNESS = 0.01
_FRESH_SECONDS = 0.005


class CompletionEstimate:
    """When a teacher's servers are expected to be done with all that waits, and how much each can take until then.

    The sums over all servers are cached for 1 % of that time and at least 5 ms: they are asked for at every choice, and
    to know them better would not change it.

    Teachers that share servers share their time: the work that waits for another teacher counts by the fraction of this
    teacher's servers that it shares.

    Args:
        teacher: which one.
        queue: its waiting rows.
        others: the estimates of all teachers, this one included; read, not kept in step.

    Attributes:
        teacher: which one.
        servers: where it may be asked for, by address.
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
        """A server may be asked from now on."""
        self.servers[server.address] = server
        self._forget_overlaps()

    def remove(self, server: ServerLoad) -> None:
        """A server may not be asked any more."""
        self.servers.pop(server.address, None)
        self._forget_overlaps()

    def changed(self) -> None:
        """Rows or servers came or went: the cached sums are out of date."""
        self._valid_until = float("-inf")

    def at(self, now: float) -> "CompletionEstimate":
        """Set the time for all questions that follow; returns itself."""
        self._now = now
        return self

    def _renew(self) -> None:
        if self._now < self._valid_until:
            return
        measured = {address: server.throughput.speed(self._now) for address, server in self.servers.items()}
        known = [speed for speed in measured.values() if speed]
        # A server that was never measured counts as an average one, so that it gets rows and is measured.
        usual = sum(known) / len(known) if known else FIRST_SPEED
        self._speeds = {address: speed or usual for address, speed in measured.items()}
        # Never 0: without any server the teacher's work would otherwise divide by it.
        self.total = max(sum(self._speeds.values()), 1e-9)
        ahead = sum(server.ahead(self._now, self._speeds[address]) for address, server in self.servers.items())
        horizon = ahead / self.total + self._waiting_seconds()
        self._end = self._now + horizon
        # While some server is unmeasured, an answer can change every speed: cache for the 5 ms only.
        self._valid_until = self._now + max(_FRESH_SECONDS, _FRESHNESS * horizon * (len(known) == len(measured)))

    def _waiting_seconds(self) -> float:
        """Seconds that the servers need for what waits; of other teachers, the part that falls to shared servers."""
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
        """Whether one server has all the work, so that there is nothing to balance."""
        return len(self.servers) == 1

    def keys(self) -> Set[str]:
        """Addresses of the servers."""
        return self.servers.keys()

    def speed(self, server: ServerLoad) -> float:
        """Tokens per second; the mean of the other servers where nothing was measured yet."""
        self._renew()
        return self._speeds[server.address]

    def ahead(self, server: ServerLoad) -> float:
        """Tokens in flight there that the server has not processed yet."""
        return server.ahead(self._now, self.speed(server))

    def share(self, server: ServerLoad) -> float:
        """The server's share, by its speed, of the tokens that wait for all its teachers."""
        speed = self.speed(server)
        return self._waiting_seconds() * speed

    def fits(self, server: ServerLoad) -> float:
        """Tokens that the server can take and still be done by the horizon, when all servers together would be."""
        speed = self.speed(server)
        return (self._end - self._now) * _SLACK * speed - server.ahead(self._now, speed)

    def finish(self, server: ServerLoad, tokens: int) -> float:
        """Seconds until the server would be done with a row of `tokens`, were it sent now."""
        return (self.ahead(server) + tokens) / self.speed(server)

    def quickest(self, server: ServerLoad, task: ScoreTask) -> bool:
        """Whether no other server where a row may go would finish it sooner, were it sent now."""
        mine, barred = self.finish(server, task.tokens), task.barred_now()
        others = (other for address, other in self.servers.items() if address not in barred)
        return all(mine <= self.finish(other, task.tokens) for other in others)
