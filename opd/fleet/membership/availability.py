"""Which teachers have waiting rows but no replica that takes them: none is healthy, or all refuse calls as too busy."""

from collections.abc import Mapping

from opd.fleet.membership.outage import Outage
from opd.fleet.membership.pool import Pool
from opd.fleet.membership.replica_monitor import ReplicaMonitor
from opd.fleet.scheduling.scheduler import Scheduler
from opd.fleet.settings import OutageSettings


class Availability:
    """Finds outages.

    Args:
        monitors: the servers' monitors by address; only read.
        pools: the pools by teacher, whose `refused_since` this class maintains.
        scheduler: knows where a teacher may be asked for.
        settings: the outage budget.
    """

    def __init__(
        self,
        monitors: Mapping[str, ReplicaMonitor],
        pools: Mapping[str, Pool],
        scheduler: Scheduler,
        settings: OutageSettings,
    ) -> None:
        self._monitors = monitors
        self._pools = pools
        self._scheduler = scheduler
        self._settings = settings

    def see_refusals(self, now: float) -> None:
        """Note since when all usable replicas of a teacher have refused calls; to be called while rows wait."""
        for pool in self._pools.values():
            servers = self._scheduler.serving(pool.name) if pool.rows else []
            since = [server.refused_since for server in servers if server.refuses(now)]
            # The latest of them, because until then some replica still took rows.
            pool.refused_since = max(since) if servers and len(since) == len(servers) else None

    def outages(self, now: float) -> list[Outage]:
        """Teachers with waiting rows but without a replica that takes them."""
        return [
            Outage(pool.name, now - since, pool.rows, self._why(pool.name, now), self._settings.budget_seconds)
            for pool in self._pools.values()
            if (since := pool.out_since) is not None and pool.rows
        ]

    def _why(self, teacher: str, now: float) -> str:
        reasons = [
            f"{monitor.address} is {life.state}, "
            + ("but overloaded: it refuses calls" if life.usable and monitor.server.refuses(now) else life.reason)
            for monitor in self._monitors.values()
            if (life := monitor.lives.get(teacher)) is not None
        ]
        return "; ".join(reasons) or "no replica is listed"
