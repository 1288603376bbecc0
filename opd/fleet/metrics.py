"""The fleet as Prometheus metrics, `opd_student_fleet_*`. They are collected at each scrape and cost nothing between.

registry = CollectorRegistry()
register_metrics(fleet, registry)
"""

from collections.abc import Iterator
from dataclasses import fields

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from opd.errors import OpdError
from opd.fleet.membership.life_cycle import ReplicaState
from opd.fleet.source import ScoreSource
from opd.fleet.status.records import FleetCounters, FleetStatus

PREFIX = "opd_student_fleet_"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)

COUNTERS = {
    "rows_submitted": "Rows handed to the fleet.",
    "rows_answered": "Rows whose scores were delivered.",
    "rows_failed": "Rows whose future failed.",
    "rows_cancelled": "Rows withdrawn by the caller.",
    "tokens_answered": "Prompt and response tokens of answered rows.",
    "wire_bytes": "Bytes of tensors received with answered rows.",
    "calls": "Score calls started, hedges included.",
    "calls_failed": "Score calls that ended in an error.",
    "reissues": "Rows sent again after a failure.",
    "moved": "Rows taken back from a server that stalled.",
    "hedges": "Rows sent to a second replica.",
    "hedges_won": "Hedged rows that the second replica answered first.",
    "pushbacks": "Score calls refused by a busy server.",
    "corrupt_payloads": "Answers that were corrupt or broke the contract.",
    "replica_deaths": "Times that a replica was given up as dead.",
    "checked_rows": "Rows that a second replica scored too, to compare them.",
    "checked_tokens": "Prompt and response tokens of rows that a second replica scored too.",
    "disagreements": "Replicas rejected for scores of a row that differ from other replicas'.",
    "cache_hits": "Rows that were found in the score cache.",
    "cache_misses": "Rows that were not found in the score cache.",
}
"""Help text of each counter in `FleetCounters`. The metric's name is the prefix, the counter's name and `_total`."""


def register_metrics(fleet: ScoreSource, registry: CollectorRegistry) -> None:
    """Add a fleet's metrics to a registry; once per registry.

    Args:
        fleet: the fleet; once it is closed, there are no metrics.
        registry: for example the registry that the trainer serves.
    """
    seconds = Histogram(
        PREFIX + "row_seconds",
        "Seconds from submission of a row to its scores.",
        ["teacher"],
        buckets=_SECONDS,
        registry=registry,
    )
    fleet.observe(lambda teacher, elapsed: seconds.labels(teacher).observe(elapsed))
    registry.register(FleetCollector(fleet))


class FleetCollector(Collector):
    """Turns a fleet's status into metrics."""

    def __init__(self, fleet: ScoreSource) -> None:
        self._fleet = fleet

    def describe(self) -> list[Metric]:
        """Names and help texts, without asking the fleet."""
        return list(collect_status(FleetStatus([], [], [])))

    def collect(self) -> Iterator[Metric]:
        """The current metrics; none if the fleet is closed."""
        try:
            status = self._fleet.status()
        except OpdError:
            return
        yield from collect_status(status)


def collect_status(status: FleetStatus) -> Iterator[Metric]:
    """The metrics of a status."""
    for field in fields(FleetCounters):
        value = getattr(status.counters, field.name)
        yield CounterMetricFamily(PREFIX + field.name, COUNTERS[field.name], value=value)
    yield from _teachers(status)
    yield from _replicas(status)


def _teachers(status: FleetStatus) -> Iterator[Metric]:
    gauges = {
        "queued_rows": "Rows that wait in this client.",
        "queued_tokens": "Tokens of the rows that wait in this client.",
        "in_flight_rows": "Rows sent and not answered.",
        "down_seconds": "Seconds since a replica of the teacher last took rows; 0 while one does.",
    }
    for name, text in gauges.items():
        family = GaugeMetricFamily(PREFIX + name, text, labels=["teacher"])
        for teacher in status.teachers:
            family.add_metric([teacher.teacher], float(getattr(teacher, name)))
        yield family
    info = GaugeMetricFamily(PREFIX + "weights_info", "1 for the weights in use.", labels=["teacher", "weights_hash"])
    for teacher in status.teachers:
        info.add_metric([teacher.teacher, teacher.weights_hash], 1.0)
    yield info
    states = GaugeMetricFamily(PREFIX + "replicas", "Replicas by state.", labels=["teacher", "state"])
    for teacher in status.teachers:
        # Every state, even without replicas in it: alerts compare with 0, and an absent series is not 0.
        for state in ReplicaState:
            count = sum(r.state == state for r in status.replicas if r.teacher == teacher.teacher)
            states.add_metric([teacher.teacher, state.value], float(count))
    yield states


def _replicas(status: FleetStatus) -> Iterator[Metric]:
    gauges = {
        "in_flight_tokens": ("replica_in_flight_tokens", "Tokens sent to the server and not answered."),
        "window_tokens": ("replica_window_tokens", "Tokens that may be in flight to the server."),
        "tokens_per_second": ("replica_tokens_per_second", "Speed of the server as this client measures it."),
        "agreement_nats": (
            "replica_agreement_nats",
            "Largest difference of log-probs from the pool at the last check, nats.",
        ),
        "paused_seconds": ("replica_paused_seconds", "Seconds until the server is asked again after it pushed back."),
    }
    for field, (name, text) in gauges.items():
        family = GaugeMetricFamily(PREFIX + name, text, labels=["teacher", "address"])
        for replica in status.replicas:
            value = getattr(replica, field)
            if value is not None:
                family.add_metric([replica.teacher, replica.address], float(value))
        yield family
