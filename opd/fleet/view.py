"""The live table of `opd fleet status`."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from opd.fleet.status import FleetStatus, ReplicaStatus

_COLOURS = {"healthy": "green", "suspect": "yellow", "condemned": "red", "stale": "magenta", "retired": "dim"}


def status_view(status: FleetStatus) -> Group:
    """Two tables and a line: teachers, replicas, counters."""
    parts: list[Table | Text] = [_teachers(status), _replicas(status)]
    for server in status.silent:
        parts.append(Text(f"{server.address} does not answer: {server.error or 'not asked yet'}", style="red"))
    counters = status.counters
    parts.append(
        Text(
            f"rows {counters.rows_answered}/{counters.rows_submitted}, failed {counters.rows_failed}, "
            f"re-issued {counters.reissues}, hedged {counters.hedges} (won {counters.hedges_won}), "
            f"pushbacks {counters.pushbacks}, refused payloads {counters.refused_payloads}"
        )
    )
    return Group(*parts)


def _teachers(status: FleetStatus) -> Table:
    table = Table(title="teachers", title_justify="left")
    table.add_column("teacher")
    for name in ("usable", "queued rows", "queued tokens", "in flight", "down s"):
        table.add_column(name, justify="right")
    table.add_column("weights")
    for teacher in status.teachers:
        usable = f"{teacher.usable}/{teacher.replicas}"
        table.add_row(
            teacher.teacher,
            Text(usable, style="green" if teacher.usable else "red"),
            f"{teacher.queued_rows:,}",
            f"{teacher.queued_tokens:,}",
            f"{teacher.in_flight_rows:,}",
            f"{teacher.down_seconds:.0f}" if teacher.down_seconds else "",
            teacher.weights_hash[:12],
        )
    return table


def _replicas(status: FleetStatus) -> Table:
    table = Table(title="replicas", title_justify="left")
    for name in ("teacher", "address", "state"):
        table.add_column(name)
    for name in ("since s", "in flight", "server queue", "tokens/s", "agreement nats"):
        table.add_column(name, justify="right")
    for name in ("engine", "version", "weights", "reason"):
        table.add_column(name)
    for replica in status.replicas:
        table.add_row(*_replica_row(replica))
    return table


def _replica_row(replica: ReplicaStatus) -> list[str | Text]:
    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return [
        replica.teacher,
        replica.address,
        Text(replica.state, style=_COLOURS.get(replica.state, "")),
        f"{replica.since_seconds:.0f}",
        f"{replica.in_flight_tokens:,}",
        number(replica.queued_tokens, ","),
        number(replica.tokens_per_second, ",.0f"),
        number(replica.agreement_nats, ".2g"),
        replica.engine,
        replica.version,
        replica.weights_hash[:12],
        "" if replica.state == "healthy" else replica.reason,
    ]
