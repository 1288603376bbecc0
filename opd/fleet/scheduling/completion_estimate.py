"""The scheduler's expectations: how fast each lane of a teacher is, what falls to it, and when all will be done."""

from collections.abc import Mapping, Set

from opd.fleet.scheduling.in_flight import Lane
from opd.fleet.scheduling.queue import TeacherQueue
from opd.fleet.scheduling.throughput import FIRST_SPEED

_SLACK = 1.02
_FRESHNESS = 0.01
_FRESH_SECONDS = 0.005


class Outlook:
    """What a teacher's lanes are expected to do from now on; the sums are renewed at most once per hundredth of it.

    Teachers that share lanes share their time: what waits for the others counts by the part of the lanes they share.

    Args:
        teacher: which one.
        queue: its waiting rows.
        others: the outlooks of all teachers, this one included; read, not kept in step.

    Attributes:
        teacher: which one.
        lanes: where it may be asked for, by address.
        total: tokens per second of all its lanes, as last summed up.
    """

    def __init__(self, teacher: str, queue: TeacherQueue, others: "Mapping[str, Outlook]") -> None:
        self.teacher = teacher
        self.lanes: dict[str, Lane] = {}
        self.total = 1.0
        self._queue = queue
        self._others = others
        self._overlaps: dict[str, float] | None = None
        self._now = 0.0
        self._valid_until = float("-inf")
        self._speeds: dict[str, float] = {}
        self._end = 0.0

    def add(self, lane: Lane) -> None:
        """A lane may be asked from now on."""
        self.lanes[lane.key] = lane
        self._forget_overlaps()

    def remove(self, lane: Lane) -> None:
        """A lane may not be asked any more."""
        self.lanes.pop(lane.key, None)
        self._forget_overlaps()

    def changed(self) -> None:
        """Rows or lanes came or went: what was summed up is out of date."""
        self._valid_until = float("-inf")

    def at(self, now: float) -> "Outlook":
        """Set the time for all questions that follow; returns itself."""
        self._now = now
        return self

    def _renew(self) -> None:
        if self._now < self._valid_until:
            return
        measured = {key: lane.meter.speed(self._now) for key, lane in self.lanes.items()}
        known = [speed for speed in measured.values() if speed]
        usual = sum(known) / len(known) if known else FIRST_SPEED
        self._speeds = {key: speed or usual for key, speed in measured.items()}
        self.total = max(sum(self._speeds.values()), 1e-9)
        ahead = sum(lane.ahead(self._now, self._speeds[key]) for key, lane in self.lanes.items())
        horizon = ahead / self.total + self._waiting_seconds()
        self._end = self._now + horizon
        # While some lane is unmeasured every answer is news.
        self._valid_until = self._now + max(_FRESH_SECONDS, _FRESHNESS * horizon * (len(known) == len(measured)))

    def _waiting_seconds(self) -> float:
        """Seconds that the lanes need for what waits: for this teacher, and for the others by the lanes they share."""
        if self._overlaps is None:
            self._overlaps = {
                name: len(self.lanes.keys() & other.lanes.keys()) / max(1, len(self.lanes))
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

    def keys(self) -> Set[str]:
        """Addresses of the lanes."""
        return self.lanes.keys()

    def speed(self, lane: Lane) -> float:
        """Tokens per second; the mean of the other lanes where nothing was measured yet."""
        self._renew()
        return self._speeds[lane.key]

    def ahead(self, lane: Lane) -> float:
        """Tokens that the lane has still to work off."""
        return lane.ahead(self._now, self.speed(lane))

    def share(self, lane: Lane) -> float:
        """Tokens of what waits that fall to the lane by its speed, of all its teachers."""
        speed = self.speed(lane)
        return self._waiting_seconds() * speed

    def fits(self, lane: Lane) -> float:
        """Tokens the lane can take and still be done when everything is: with all lanes sharing by their speed."""
        speed = self.speed(lane)
        return (self._end - self._now) * _SLACK * speed - lane.ahead(self._now, speed)

    def finish(self, lane: Lane, tokens: int) -> float:
        """Seconds until the lane would be done with a row of `tokens`, were it sent now."""
        return (self.ahead(lane) + tokens) / self.speed(lane)

    def quickest(self, lane: Lane, tokens: int) -> bool:
        """Whether no other lane would finish a row of `tokens` sooner, were it sent now."""
        mine = self.finish(lane, tokens)
        return all(mine <= self.finish(other, tokens) for other in self.lanes.values())
