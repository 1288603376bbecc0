"""Reads a `FleetStatus` off the living fleet."""

from collections.abc import Mapping

from opd.fleet.dispatch import Dispatcher
from opd.fleet.membership.pool import Pool
from opd.fleet.membership.replica_monitor import Server
from opd.fleet.status.records import FleetStatus, ReplicaStatus, ServerStatus, TeacherStatus


def take_status(
    servers: Mapping[str, Server], pools: Mapping[str, Pool], dispatcher: Dispatcher, now: float
) -> FleetStatus:
    """The fleet at the time `now`; the counters are the dispatcher's own."""
    teachers = [_teacher(pool, servers, dispatcher, now) for _, pool in sorted(pools.items())]
    replicas = [
        _replica(server, name, now) for server in servers.values() for name in server.lives if name in server.infos
    ]
    replicas.sort(key=lambda replica: (replica.teacher, replica.address))
    silent = [
        ServerStatus(address, "" if server.error is None else str(server.error))
        for address, server in sorted(servers.items())
        if not server.lives
    ]
    return FleetStatus(teachers, replicas, silent, dispatcher.counters)


def _teacher(pool: Pool, servers: Mapping[str, Server], dispatcher: Dispatcher, now: float) -> TeacherStatus:
    lives = [server.lives[pool.name] for server in servers.values() if pool.name in server.lives]
    waiting = dispatcher.scheduler.waiting(pool.name)
    return TeacherStatus(
        teacher=pool.name,
        weights_hash="" if pool.identity is None else pool.identity.weights_hash,
        usable=sum(life.usable for life in lives),
        replicas=len(lives),
        queued_rows=len(waiting),
        queued_tokens=sum(job.tokens for job in waiting),
        in_flight_rows=pool.rows - len(waiting),
        down_seconds=0.0 if pool.out_since is None else now - pool.out_since,
    )


def _replica(server: Server, teacher: str, now: float) -> ReplicaStatus:
    life, info, lane = server.lives[teacher], server.infos[teacher], server.lane
    loads = [] if server.load is None else [load for load in server.load.teachers if load.teacher == teacher]
    return ReplicaStatus(
        teacher=teacher,
        address=server.address,
        state=life.state,
        reason=life.reason,
        since_seconds=now - life.since,
        weights_hash=info.weights_hash,
        engine=info.engine,
        version=server.version,
        agreement_nats=server.agreement.get(teacher),
        in_flight_rows=lane.in_flight_rows,
        in_flight_tokens=lane.in_flight_tokens,
        window_tokens=lane.window,
        tokens_per_second=lane.meter.speed(now),
        queued_tokens=loads[0].queued_tokens if loads else None,
        paused_seconds=max(0.0, lane.paused_until - now),
    )
