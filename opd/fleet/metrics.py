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
    "rows_submitted": "Rows handed to the fleet for scoring.",
    "rows_answered": "Rows whose scores were delivered.",
    "rows_failed": "Rows that were given up with an error.",
    "rows_cancelled": "Rows that the caller withdrew before they were scored.",
    "tokens_answered": "Prompt and response tokens of the rows whose scores were delivered.",
    "wire_bytes": "Bytes of score tensors received, second scores of checked rows included.",
    "calls": "Score calls started, second attempts (hedges) included.",
    "calls_failed": "Score calls that ended in an error.",
    "reissues": "Times that a row was sent again because its call failed.",
    "moved": "Times that a row was taken back from a stalled server and sent to another.",
    "hedges": "Rows sent to a second replica as well because the first was slow (hedges).",
    "hedges_won": "Hedges that were answered before the first attempt.",
    "pushbacks": "Score calls that a server refused because it was overloaded.",
    "corrupt_payloads": "Answers that were corrupt or violated the wire contract.",
    "replica_deaths": "Times that a replica was declared dead.",
    "checked_rows": "Rows that a second replica scored too, to compare the two.",
    "checked_tokens": "Prompt and response tokens of rows that a second replica scored too.",
    "disagreements": "Times that a replica was rejected because its scores of a row differed from those of others.",
    "cache_hits": "Rows whose scores were found in the score cache.",
    "cache_misses": "Rows whose scores were not found in the score cache.",
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
        "Seconds from the submission of a row to the delivery of its scores.",
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
        "queued_rows": "Rows that wait in this client to be sent.",
        "queued_tokens": "Prompt and response tokens of the rows that wait in this client to be sent.",
        "in_flight_rows": "Rows sent to servers and not answered yet.",
        "down_seconds": "Seconds since a replica of the teacher last accepted rows; 0 while one does.",
    }
    for name, text in gauges.items():
        family = GaugeMetricFamily(PREFIX + name, text, labels=["teacher"])
        for teacher in status.teachers:
            family.add_metric([teacher.teacher], float(getattr(teacher, name)))
        yield family
    info = GaugeMetricFamily(
        PREFIX + "weights_info",
        "1 for the weights that the teacher's replicas have, with their hash as a label.",
        labels=["teacher", "weights_hash"],
    )
    for teacher in status.teachers:
        info.add_metric([teacher.teacher, teacher.weights_hash], 1.0)
    yield info
    states = GaugeMetricFamily(
        PREFIX + "replicas", "Number of the teacher's replicas in each state.", labels=["teacher", "state"]
    )
    for teacher in status.teachers:
        # Every state, even without replicas in it: alerts compare with 0, and an absent series is not 0.
        for state in ReplicaState:
            count = sum(r.state == state for r in status.replicas if r.teacher == teacher.teacher)
            states.add_metric([teacher.teacher, state.value], float(count))
    yield states


def _replicas(status: FleetStatus) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        PREFIX + "replica_info", "1 for the state that a replica is in.", labels=["teacher", "address", "state"]
    )
    for replica in status.replicas:
        info.add_metric([replica.teacher, replica.address, replica.state], 1.0)
    yield info
    gauges = {
        "in_flight_tokens": (
            "replica_in_flight_tokens",
            "Prompt and response tokens sent to the server and not answered yet.",
        ),
        "window_tokens": (
            "replica_window_tokens",
            "Maximum tokens that this client has in flight on the server at present.",
        ),
        "tokens_per_second": (
            "replica_tokens_per_second",
            "Prompt and response tokens that the server scores per second, as measured by this client.",
        ),
        "agreement_nats": (
            "replica_agreement_nats",
            "Largest difference in nats between the replica's log-probs and the pool's at the last check.",
        ),
        "paused_seconds": (
            "replica_paused_seconds",
            "Seconds until the server gets calls again, after it refused one because it was overloaded.",
        ),
    }
    for field, (name, text) in gauges.items():
        family = GaugeMetricFamily(PREFIX + name, text, labels=["teacher", "address"])
        for replica in status.replicas:
            value = getattr(replica, field)
            if value is not None:
                family.add_metric([replica.teacher, replica.address], float(value))
        yield family
