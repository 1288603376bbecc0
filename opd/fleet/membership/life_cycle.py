"""The life cycle of one replica (a teacher on a server) as a pure state machine: no I/O, the clock is an argument.

    STALE --admitted--> HEALTHY --a failure--> SUSPECT --more failures--> CONDEMNED --probe answered--> STALE
                        HEALTHY <--an answer-- SUSPECT

* HEALTHY: gets rows.
* SUSPECT: gets no new rows; what it has may still finish. One answered probe clears it.
* CONDEMNED: its calls are cancelled and re-issued elsewhere. It is probed, at growing intervals if it keeps failing.
* STALE: reachable but unproven. A replica starts here and passes through here after every condemnation: only
  `admitted`, given once its weights, tokenizer and self-test agree with the pool, makes it HEALTHY.
* RETIRED: draining or no longer listed; it finishes what it has. Listed again, it starts over as STALE.

Failures of probes and of requests are counted apart, and an answered probe never forgives a failed request: a
wedged server that still answers its probes is condemned all the same. (The split and the gate follow NeMo-RL's
fleet health, where generation shards may not return before their weights are known to be current.)
"""

from dataclasses import dataclass
from enum import StrEnum

from opd.fleet.settings import HealthSettings

_CALM_CALLS = 20
_MOST_DOUBLINGS = 6


class ReplicaState(StrEnum):
    """State of a replica."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    CONDEMNED = "condemned"
    STALE = "stale"
    RETIRED = "retired"


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of state: when (seconds of the injected clock), from, to, and why in words."""

    at: float
    before: ReplicaState
    after: ReplicaState
    reason: str


class ReplicaLife:
    """Health of one replica. Every method takes the time `now` in seconds and returns the transition or None.

    Attributes:
        state: the state.
        reason: why it is in that state, for the status view.
        since: when it came into that state.
        not_before: earliest time at which a condemned replica may be looked at again.
        history: transitions, oldest first, at most 64.
    """

    def __init__(self, settings: HealthSettings, now: float = 0.0) -> None:
        self._settings = settings
        self.state = ReplicaState.STALE
        self.reason = "not admitted yet"
        self.since = now
        self.not_before = now
        self.history: list[Transition] = []
        self.probe_failures = 0
        self.request_failures = 0
        self._calm_calls = _CALM_CALLS
        self._doublings = 0

    @property
    def usable(self) -> bool:
        """Whether new rows may be sent to it."""
        return self.state is ReplicaState.HEALTHY

    def probe_answered(self, now: float) -> Transition | None:
        """A probe was answered in time."""
        self.probe_failures = 0
        if self.state is ReplicaState.SUSPECT:
            return self._to(ReplicaState.HEALTHY, "answers again", now)
        if self.state is ReplicaState.CONDEMNED and now >= self.not_before:
            return self._to(ReplicaState.STALE, "reachable again, to be checked", now)
        return None

    def probe_failed(self, now: float, reason: str) -> Transition | None:
        """A probe failed or was not answered in time."""
        self.probe_failures += 1
        if self.probe_failures >= self._settings.probe_failures:
            return self._condemn(now, f"{self.probe_failures} probes failed: {reason}", cool_off=False)
        return self._suspect(now, f"probe failed: {reason}")

    def request_answered(self, now: float) -> Transition | None:
        """A request was answered completely and passed validation."""
        self.request_failures = 0
        self._calm_calls += 1
        if self._calm_calls >= _CALM_CALLS:
            self._doublings = 0
        if self.state is ReplicaState.SUSPECT and self.probe_failures == 0:
            return self._to(ReplicaState.HEALTHY, "serves again", now)
        return None

    def request_failed(self, now: float, reason: str) -> Transition | None:
        """A request failed for a reason that lies with the replica or the way to it."""
        self.request_failures += 1
        if self.request_failures >= self._settings.request_failures:
            return self._condemn(now, f"{self.request_failures} requests in a row failed: {reason}", cool_off=True)
        return self._suspect(now, f"request failed: {reason}")

    def lied(self, now: float, reason: str) -> Transition | None:
        """It sent a payload that is corrupt or breaks the contract: no second chance without a new check."""
        return self._condemn(now, f"sent a payload that was refused: {reason}", cool_off=True)

    def doubted(self, now: float, reason: str) -> Transition | None:
        """Its identity may have changed (another process, other weights): it must be checked again."""
        if self.state in (ReplicaState.HEALTHY, ReplicaState.SUSPECT, ReplicaState.RETIRED):
            return self._to(ReplicaState.STALE, reason, now)
        if self.state is ReplicaState.STALE:
            self.reason = reason
        return None

    def restarted(self, now: float) -> Transition | None:
        """Another process answers at its address: the old one's sins are forgiven, its identity is unknown."""
        self.probe_failures = self.request_failures = self._doublings = 0
        self._calm_calls = _CALM_CALLS
        self.not_before = now
        if self.state is ReplicaState.STALE:
            return None
        return self._to(ReplicaState.STALE, "restarted, to be checked", now)

    def admitted(self, now: float) -> Transition | None:
        """Its weights, tokenizer and self-test agree with the pool."""
        self.probe_failures = self.request_failures = 0
        if self.state is not ReplicaState.STALE:
            return None
        return self._to(ReplicaState.HEALTHY, "agrees with the pool", now)

    def refused(self, now: float, reason: str) -> Transition | None:
        """It was checked and does not agree with the pool: it stays out until it changes."""
        if self.state is ReplicaState.STALE:
            self.reason = reason
            return None
        return self._to(ReplicaState.STALE, reason, now)

    def retired(self, now: float, reason: str) -> Transition | None:
        """It drains or left the list: no new rows, what it has may finish."""
        if self.state is ReplicaState.RETIRED:
            return None
        return self._to(ReplicaState.RETIRED, reason, now)

    def _suspect(self, now: float, reason: str) -> Transition | None:
        if self.state is not ReplicaState.HEALTHY:
            return None
        return self._to(ReplicaState.SUSPECT, reason, now)

    def _condemn(self, now: float, reason: str, *, cool_off: bool) -> Transition | None:
        if self.state in (ReplicaState.CONDEMNED, ReplicaState.RETIRED):
            return None
        if cool_off:
            if self._calm_calls < _CALM_CALLS:
                self._doublings = min(self._doublings + 1, _MOST_DOUBLINGS)
            self._calm_calls = 0
            self.not_before = now + min(60.0, 2**self._doublings) * self._settings.cool_off_seconds
        else:
            self.not_before = now
        self.probe_failures = self.request_failures = 0
        return self._to(ReplicaState.CONDEMNED, reason, now)

    def _to(self, after: ReplicaState, reason: str, now: float) -> Transition:
        change = Transition(now, self.state, after, reason)
        self.state, self.reason, self.since = after, reason, now
        self.history = [*self.history[-63:], change]
        return change
