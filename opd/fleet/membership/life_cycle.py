"""The life cycle of one replica (a teacher on a server) as a pure state machine: no I/O, the clock is an argument.

    UNVERIFIED --admitted--> HEALTHY --a failure--> SUSPECT --more failures--> DEAD --answers again--> UNVERIFIED
        |                    HEALTHY <--an answer-- SUSPECT
        +------rejected----> REJECTED --changed, or passes a later check--> UNVERIFIED or HEALTHY

* HEALTHY: gets rows.
* SUSPECT: gets no new rows; those it has may still finish. An answered ping makes it healthy again.
* DEAD: its RPCs are cancelled and their rows go elsewhere. It is pinged, at growing intervals if it keeps failing.
* UNVERIFIED: reachable but not checked. A replica starts here and returns here after every death. Only `admitted`,
  which is reported once its weights, tokenizer and scores agree with the pool, makes it HEALTHY.
* REJECTED: it was checked and does not agree with the pool.
* RETIRED: draining or no longer listed; it finishes the rows it has. If it is listed again, it starts over as
  UNVERIFIED.

Failures of pings and of requests are counted separately, and an answered ping never makes up for a failed request, so a
wedged server that still answers pings is declared dead. (The separation, and the check before every return, follow
NeMo-RL's fleet health, where generation shards may not return before their weights are known to be current.)
"""

from dataclasses import dataclass
from enum import StrEnum

from opd.fleet.settings import HealthSettings

_CALM_CALLS = 20  # answered requests after which an earlier death no longer lengthens the cool-off period
_MOST_DOUBLINGS = 6


class ReplicaState(StrEnum):
    """The state of a replica."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    UNVERIFIED = "unverified"
    REJECTED = "rejected"
    RETIRED = "retired"


OUTSIDE = (ReplicaState.UNVERIFIED, ReplicaState.REJECTED)
"""States of a replica that is reachable but must be checked before it gets rows."""


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of state: when (seconds of the injected clock), from which state, to which, and the reason."""

    at: float
    before: ReplicaState
    after: ReplicaState
    reason: str


class ReplicaLife:
    """The health of one replica. Events take the time `now` in seconds and return the transition they caused, or None.

    Attributes:
        state: the current state.
        reason: why it is in that state, for the status view.
        since: when it entered that state.
        not_before: earliest time at which a dead replica may be checked again.
        history: the last 64 transitions, oldest first.
    """

    def __init__(self, settings: HealthSettings, now: float = 0.0) -> None:
        self._settings = settings
        self.state = ReplicaState.UNVERIFIED
        self.reason = "not checked yet"
        self.since = now
        self.not_before = now
        self.history: list[Transition] = []
        self.ping_failures = 0
        self.request_failures = 0
        self._calm_calls = _CALM_CALLS
        self._doublings = 0

    @property
    def usable(self) -> bool:
        """Whether new rows may be sent to it."""
        return self.state is ReplicaState.HEALTHY

    def ping_answered(self, now: float) -> Transition | None:
        """A ping was answered in time."""
        self.ping_failures = 0
        if self.state is ReplicaState.SUSPECT:
            return self._to(ReplicaState.HEALTHY, "answers pings again", now)
        # Never directly to HEALTHY: the process that answers may be a new one, with other weights.
        if self.state is ReplicaState.DEAD and now >= self.not_before:
            return self._to(ReplicaState.UNVERIFIED, "reachable again, to be checked", now)
        return None

    def ping_failed(self, now: float, reason: str) -> Transition | None:
        """A ping failed or was not answered in time."""
        self.ping_failures += 1
        if self.ping_failures >= self._settings.ping_failures:
            return self._died(now, f"{self.ping_failures} pings in a row failed: {reason}", cool_off=False)
        return self._suspect(now, f"ping failed: {reason}")

    def request_answered(self, now: float) -> Transition | None:
        """A request was answered completely and passed validation."""
        self.request_failures = 0
        self._calm_calls += 1
        if self._calm_calls >= _CALM_CALLS:
            self._doublings = 0
        # A request that was in flight may still be answered while pings fail, and does not make up for them.
        if self.state is ReplicaState.SUSPECT and self.ping_failures == 0:
            return self._to(ReplicaState.HEALTHY, "serves again", now)
        return None

    def request_failed(self, now: float, reason: str) -> Transition | None:
        """A request failed for a reason that lies with the replica or the connection to it."""
        if self.state in OUTSIDE:
            return None  # it was sent before the replica was taken out of service, or to its previous process
        self.request_failures += 1
        if self.request_failures >= self._settings.request_failures:
            return self._died(now, f"{self.request_failures} requests in a row failed: {reason}", cool_off=True)
        return self._suspect(now, f"request failed: {reason}")

    def sent_corrupt_data(self, now: float, reason: str) -> Transition | None:
        """It sent a response that is corrupt or violates the contract: it gets no second chance without a new check."""
        return self._died(now, f"sent a corrupt answer: {reason}", cool_off=True)

    def identity_changed(self, now: float, reason: str) -> Transition | None:
        """Its identity may have changed (another process, other weights), so it must be checked again."""
        if self.state is ReplicaState.UNVERIFIED:
            self.reason = reason
            return None
        if self.state is ReplicaState.DEAD:
            return None
        return self._to(ReplicaState.UNVERIFIED, reason, now)

    def restarted(self, now: float) -> Transition | None:
        """Another process answers at its address: its failures were the old one's, and its identity is unknown."""
        self.ping_failures = self.request_failures = self._doublings = 0
        self._calm_calls = _CALM_CALLS
        self.not_before = now
        if self.state is ReplicaState.UNVERIFIED:
            return None
        return self._to(ReplicaState.UNVERIFIED, "restarted, to be checked", now)

    def admitted(self, now: float) -> Transition | None:
        """Its check passed: weights, tokenizer and scores agree with the pool."""
        self.ping_failures = self.request_failures = 0
        if self.state not in OUTSIDE:
            return None
        return self._to(ReplicaState.HEALTHY, "agrees with the pool", now)

    def postponed(self, now: float, reason: str) -> Transition | None:
        """It could not be checked: it is not ready, or the check failed."""
        if self.state in OUTSIDE:
            self.reason = reason
        return None

    def rejected(self, now: float, reason: str) -> Transition | None:
        """It was checked and does not agree with the pool; it stays out of service until it changes."""
        if self.state is ReplicaState.REJECTED:
            self.reason = reason
            return None
        return self._to(ReplicaState.REJECTED, reason, now)

    def retired(self, now: float, reason: str) -> Transition | None:
        """It is draining or no longer listed: it gets no new rows, but may finish those it has."""
        if self.state is ReplicaState.RETIRED:
            return None
        return self._to(ReplicaState.RETIRED, reason, now)

    def _suspect(self, now: float, reason: str) -> Transition | None:
        if self.state is not ReplicaState.HEALTHY:
            return None
        return self._to(ReplicaState.SUSPECT, reason, now)

    def _died(self, now: float, reason: str, *, cool_off: bool) -> Transition | None:
        if self.state in (ReplicaState.DEAD, ReplicaState.RETIRED):
            return None
        # Without failed requests (a machine that was unplugged) there is no reason to wait: check it as soon as it
        # answers. After failed requests there is: a replica that dies whenever it serves would destroy rows again and
        # again.
        if cool_off:
            if self._calm_calls < _CALM_CALLS:
                self._doublings = min(self._doublings + 1, _MOST_DOUBLINGS)
            self._calm_calls = 0
            self.not_before = now + min(60.0, 2**self._doublings) * self._settings.cool_off_seconds
        else:
            self.not_before = now
        return self._to(ReplicaState.DEAD, reason, now)

    def _to(self, after: ReplicaState, reason: str, now: float) -> Transition:
        change = Transition(now, self.state, after, reason)
        self.state, self.reason, self.since = after, reason, now
        self.history = [*self.history[-63:], change]
        return change
