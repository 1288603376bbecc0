"""Building a `FleetStatus` from the live fleet."""

from collections.abc import Mapping

from opd.fleet.dispatch import Dispatcher
from opd.fleet.membership.pool import Pool
from opd.fleet.membership.replica_monitor import ReplicaMonitor
from opd.fleet.status.records import FleetStatus, ReplicaStatus, ServerStatus, TeacherStatus


def take_status(
    monitors: Mapping[str, ReplicaMonitor], pools: Mapping[str, Pool], dispatcher: Dispatcher, now: float
) -> FleetStatus:
    """The state of the fleet at the time `now`; the counters are the dispatcher's own object."""
    teachers = [_teacher(pool, monitors, dispatcher, now) for _, pool in sorted(pools.items())]
    replicas = [
        _replica(monitor, name, now) for monitor in monitors.values() for name in monitor.lives if name in monitor.infos
    ]
    replicas.sort(key=lambda replica: (replica.teacher, replica.address))
    silent = [
        ServerStatus(address, _why_silent(monitor))
        for address, monitor in sorted(monitors.items())
        if not monitor.lives
    ]
    return FleetStatus(teachers, replicas, silent, dispatcher.counters)


def _why_silent(monitor: ReplicaMonitor) -> str:
    if monitor.error is not None:
        return str(monitor.error)
    return f"it is still loading {', '.join(monitor.loading)}" if monitor.loading else ""


def _teacher(pool: Pool, monitors: Mapping[str, ReplicaMonitor], dispatcher: Dispatcher, now: float) -> TeacherStatus:
    lives = [monitor.lives[pool.name] for monitor in monitors.values() if pool.name in monitor.lives]
    waiting = dispatcher.scheduler.waiting(pool.name)
    return TeacherStatus(
        teacher=pool.name,
        weights_hash="" if pool.identity is None else pool.identity.weights_hash,
        usable=sum(life.usable for life in lives),
        replicas=len(lives),
        queued_rows=len(waiting),
        queued_tokens=sum(task.tokens for task in waiting),
        # A row that is live and does not wait has been sent.
        in_flight_rows=pool.rows - len(waiting),
        down_seconds=0.0 if pool.out_since is None else now - pool.out_since,
    )


def _replica(monitor: ReplicaMonitor, teacher: str, now: float) -> ReplicaStatus:
    life, info, server = monitor.lives[teacher], monitor.infos[teacher], monitor.server
    loads = [] if monitor.load is None else [load for load in monitor.load.teachers if load.teacher == teacher]
    return ReplicaStatus(
        teacher=teacher,
        address=monitor.address,
        state=life.state,
        reason=life.reason,
        since_seconds=now - life.since,
        weights_hash=info.weights_hash,
        engine=info.engine,
        version=monitor.version,
        agreement_nats=monitor.agreement.get(teacher),
        in_flight_rows=server.in_flight_rows,
        in_flight_tokens=server.in_flight_tokens,
        window_tokens=server.window,
        tokens_per_second=server.throughput.speed(now),
        queued_tokens=loads[0].queued_tokens if loads else None,
        paused_seconds=max(0.0, server.paused_until - now),
    )
