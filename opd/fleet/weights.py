"""Replacing a teacher's weights on all its replicas while they serve, until they agree on the new ones."""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from opd.errors import IncompatibleTeacherError, OpdError, UnavailableError
from opd.fleet.membership.life_cycle import ReplicaState
from opd.fleet.membership.members import Members
from opd.fleet.membership.replica_monitor import ReplicaMonitor

log = logging.getLogger("opd.fleet")

SETTLE_SECONDS = 60.0
"""Seconds that replicas with the new weights may take to pass their check."""


@dataclass(frozen=True, slots=True)
class WeightsUpdate:
    """The result of an update of a teacher's replicas.

    Attributes:
        teacher: its name.
        weights_hash: hash of the weights that the pool has now.
        updated: addresses of the replicas that serve them.
        failures: for each replica that does not, by address, the reason; it stays out of the pool until it does.
        changed: whether the pool had other weights before.
    """

    teacher: str
    weights_hash: str
    updated: tuple[str, ...]
    failures: Mapping[str, str]
    changed: bool = True

    def sentence(self) -> str:
        """The update in one sentence."""
        failed = "".join(f"; {address} does not: {why}" for address, why in self.failures.items())
        count = "1 replica serves" if len(self.updated) == 1 else f"{len(self.updated)} replicas serve"
        before = "" if self.changed else ", as before"
        return f"teacher {self.teacher!r}: {count} weights {self.weights_hash[:12]}{before}{failed}."


async def update_weights(members: Members, teacher: str, folder: str, timeout: float) -> WeightsUpdate:
    """Swap the weights of every listed replica; see `ScoreSource.update_weights`."""
    pool = members.pools[teacher]
    before = None if pool.identity is None else pool.identity.weights_hash
    # Not those that are leaving, which may be gone before they have answered.
    monitors = [one for one in members.monitors.values() if teacher in one.lives and not one.leaving]
    if not monitors:
        raise UnavailableError(f"teacher {teacher!r} has no replica whose weights could be replaced.")
    results = await asyncio.gather(
        *(one.link.update_weights(teacher, folder, timeout) for one in monitors), return_exceptions=True
    )
    # Sorted only now, so that a failure on one server does not leave the others unaccounted for.
    hashes: dict[str, str] = {}
    errors: dict[str, OpdError] = {}
    for monitor, result in zip(monitors, results, strict=True):
        if isinstance(result, str):
            hashes[monitor.address] = result
        elif isinstance(result, OpdError):
            errors[monitor.address] = result
        else:
            raise result
    if not hashes:
        first = next(iter(errors.values()))
        each = "; ".join(f"{address}: {str(error).rstrip('.')}" for address, error in errors.items())
        raise type(first)(f"no replica of teacher {teacher!r} took the weights in {folder}; {each}.")
    # Replicas that have swapped cannot go back, so from now on the teacher is what most of them serve.
    chosen = _majority(teacher, folder, hashes)
    pool.adopt(chosen)
    _check_again(members, teacher, monitors)
    updated = [one for one in monitors if hashes.get(one.address) == chosen]
    # A replica that swapped must score a check row before it gets others: that shows what it computes with.
    await _until_admitted(members, teacher, updated)
    failures = {address: str(error) for address, error in errors.items()}
    for monitor in (one for one in monitors if one.address in hashes):
        life = monitor.lives[teacher]
        if hashes[monitor.address] != chosen:
            failures[monitor.address] = f"the folder holds other weights there, {hashes[monitor.address][:12]}"
        elif not life.usable:
            failures[monitor.address] = f"it is {life.state}, {life.reason}"
    for address, why in failures.items():
        log.warning("replica %s of %r was not updated: %s", address, teacher, why)
    served = tuple(one.address for one in monitors if one.address not in failures)
    return WeightsUpdate(teacher, chosen, served, failures, changed=chosen != before)


def adopt(members: Members, teacher: str, weights_hash: str) -> None:
    """Accept other weights: the next replica to be checked decides what the pool is, and all are checked again."""
    members.pools[teacher].adopt(weights_hash)
    _check_again(members, teacher, [one for one in members.monitors.values() if teacher in one.lives])


def _majority(teacher: str, folder: str, hashes: Mapping[str, str]) -> str:
    ranked = Counter(hashes.values()).most_common()
    if len(ranked) > 1 and ranked[0][1] == ranked[1][1]:
        each = ", ".join(f"{address} has {found[:12]}" for address, found in hashes.items())
        raise IncompatibleTeacherError(
            f"the replicas of teacher {teacher!r} found different weights in {folder}: {each}; give all of them the "
            "same files and update again."
        )
    return ranked[0][0]


def _check_again(members: Members, teacher: str, monitors: list[ReplicaMonitor]) -> None:
    now = members.now()
    for monitor in monitors:
        monitor.apply(
            teacher, monitor.lives[teacher].identity_changed(now, "the teacher gets other weights, to be checked")
        )
        monitor.admission.recheck(teacher)


async def _until_admitted(members: Members, teacher: str, monitors: list[ReplicaMonitor]) -> None:
    """Wait, for a minute at most, until each replica has passed its check, or is dead or gone."""
    final = (ReplicaState.HEALTHY, ReplicaState.DEAD, ReplicaState.RETIRED)
    end = members.now() + SETTLE_SECONDS
    while members.now() < end and any(one.lives[teacher].state not in final for one in monitors):
        await members.wait_for_news(0.5)
