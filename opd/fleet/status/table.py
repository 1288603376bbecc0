"""The table of `opd fleet status`, narrow enough for a terminal with 80 columns."""

from collections import defaultdict
from collections.abc import Iterator

from rich import box
from rich.console import Group
from rich.text import Text

from opd.console import Table, line
from opd.fleet.status.records import FleetStatus, ReplicaStatus

_COLOURS = {
    "healthy": "green",
    "suspect": "yellow",
    "dead": "red",
    "unverified": "magenta",
    "rejected": "red",
    "retired": "dim",
}


def status_view(status: FleetStatus) -> Group:
    """Tables of teachers and replicas, then what each runs, what is wrong, and the counters."""
    parts: list[Table | Text] = [_teachers(status), _replicas(status), *_versions(status), *_troubles(status)]
    counters = status.counters
    parts.append(
        Text(
            f"rows {counters.rows_answered}/{counters.rows_submitted}, failed {counters.rows_failed}, "
            f"re-issued {counters.reissues}, hedged {counters.hedges} (won {counters.hedges_won}), "
            f"pushbacks {counters.pushbacks}, corrupt payloads {counters.corrupt_payloads}"
        )
    )
    return Group(*parts)


def _table(*names: str, left: int) -> Table:
    """A table without lines between columns; the first `left` columns hold text, the others numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(names):
        words = index < left
        table.add_column(name, justify="left" if words else "right", no_wrap=words, overflow="fold")
    return table


def _teachers(status: FleetStatus) -> Table:
    table = _table("teacher", "usable", "queued rows", "queued tokens", "rows in flight", "down s", left=1)
    for teacher in status.teachers:
        table.add_row(
            teacher.teacher,
            Text(f"{teacher.usable}/{teacher.replicas}", style="green" if teacher.usable else "red"),
            f"{teacher.queued_rows:,}",
            f"{teacher.queued_tokens:,}",
            f"{teacher.in_flight_rows:,}",
            f"{teacher.down_seconds:.0f}" if teacher.down_seconds else "",
        )
    return table


def _replicas(status: FleetStatus) -> Table:
    names = ("teacher", "replica", "state", "for s", "in flight", "queue", "tokens/s", "nats off")
    table = _table(*names, left=3)
    for replica in status.replicas:
        table.add_row(*_replica_row(replica))
    for server in status.silent:
        table.add_row("", server.address, Text("silent", style="red"))
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
    ]


def _versions(status: FleetStatus) -> Iterator[Text]:
    """A line for each combination of engine, version and weights that a teacher's replicas run; one is normal."""
    who: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for replica in status.replicas:
        runs = f"{replica.engine}, opd {replica.version}, weights {replica.weights_hash[:12]}"
        who[replica.teacher, runs].append(replica.address)
    for (teacher, runs), addresses in who.items():
        yield line(f"{teacher}: {runs} on {', '.join(addresses)}")


def _troubles(status: FleetStatus) -> Iterator[Text]:
    for replica in status.replicas:
        if replica.state != "healthy":
            style = _COLOURS.get(replica.state, "")
            yield line(f"{replica.teacher} on {replica.address} is {replica.state}: {replica.reason}", style=style)
    for server in status.silent:
        yield line(f"{server.address} does not answer: {server.error or 'not asked yet'}", style="red")
