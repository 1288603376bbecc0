"""Names of the student's Prometheus series: `opd_student_`, base units as suffix, bounded labels.

metrics.jsonl keeps the short names of the loop ("reverse_kl", "loss/opd", "cost/train/sampled_tokens"); here they
become series ("opd_student_reverse_kl_nats", "opd_student_loss_nats{term}", "opd_student_cost_tokens_total").
"""

import re
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from opd import __version__
from opd.errors import ConfigError
from opd.telemetry.metrics_http import describe_process
from student.report.metric_help import help_of

STAGES = (
    *("rollout", "wait_rollout", "wait_verifier", "wait_teacher"),
    *("learn", "after_update", "evaluate", "checkpoint"),
)

_NATS = re.compile(r"(kl|leakage|entropy|jsd|log_ratio|divergence|advantage)$")
_RATIO = re.compile(
    r"(mass|rate|overlap|fraction|accuracy|sampled|clipped|weight|repetition|share|pass_at_\d+|violations|truncation|monotone)$"
)

_SEVERAL = ", if there are several; 0 for those without a row."
_MODE_TEXTS = {
    "accuracy": "Accuracy of a mode within its budget, latest evaluation.",
    "tokens": "Mean tokens of answers in a mode, latest evaluation.",
    "violations": "Share of answers over the budget of their mode, latest evaluation.",
    "truncation": "Share of answers in a mode that the length limit truncated, latest evaluation.",
    "neighbour_ratio": "Tokens of a mode over those of the next smaller one, latest evaluation.",
    "recovery": "Accuracy of a mode between the start (0) and its teacher (1), latest evaluation.",
    "leakage": "KL of the student in a mode to the teacher of a mode, per token, latest evaluation.",
    "interpolation": "Where the tokens of an untrained mode lie between its neighbours', latest evaluation.",
    "share": "Share of the rows in a mode, latest step.",
    "lag": "How far a mode still is from its teacher, from 1 (as at the start) to 0 (level with it), latest step.",
    "monotone": "Share of problems whose tokens never rise as budgets fall, latest evaluation.",
    "hypervolume": "Area under the curve of best accuracy over tokens, 0 to 1, latest evaluation.",
}


class Series:
    """The series of one run, made as metrics first appear.

    Args:
        registry: where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._gauges: dict[str, Gauge] = {}
        describe_process(registry)
        self._info = Gauge(
            "opd_student_info",
            "1, with the run's folder, the terms of its objective and the version of opd.",
            ["run", "objective", "version"],
            registry=registry,
        )
        self._progress = Gauge(
            "opd_student_progress_ratio", "Share of the run's steps that are done.", registry=registry
        )
        # Dashboards may query these from the start; metrics of plug-ins get their series when they first appear.
        self._steps = self._counter("steps", "Steps done; each may make several optimizer updates.")
        self._tokens = self._counter("response_tokens", "Response tokens sampled for training.")
        self._bytes = self._counter("payload_bytes", "Bytes of tensors received from teachers.")
        self._costs = self._counter("cost_tokens", "Tokens spent, by purpose and kind.", "purpose", "kind")
        self._labelled = {
            label: self._counter(f"{label}_tokens", f"Response tokens trained on, by {label}{_SEVERAL}", label)
            for label in ("domain", "teacher")
        }
        self._loss = Gauge("opd_student_loss_nats", "Loss of a term, latest step.", ["term"], registry=registry)
        self._domains = Gauge(
            "opd_student_domain_accuracy_ratio",
            "Accuracy on held-out prompts of a domain, latest evaluation.",
            ["domain"],
            registry=registry,
        )
        self._positions = Gauge(
            "opd_student_divergence_by_position_nats",
            "Divergence from the teacher between this position of the response and the next label, latest step.",
            ["divergence", "position"],
            registry=registry,
        )
        self._checkpoint = Gauge(
            "opd_student_checkpoint_timestamp_seconds",
            "Unix time of the newest checkpoint, or of the start if there is none yet.",
            registry=registry,
        )
        self.saved()
        self._stage = Histogram(
            "opd_student_stage_seconds",
            "Seconds of a stage within a step.",
            ["stage"],
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
            registry=registry,
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"opd_student_{name}", text, labels, registry=self._registry)

    def inform(self, run: str, objective: str) -> None:
        """Name the run."""
        self._info.labels(run, objective, __version__).set(1)

    def progress(self, done: int, total: int) -> None:
        """Record how far the run is, in steps."""
        self._progress.set(done / max(1, total))

    def saved(self) -> None:
        """Record that everything up to now is in a checkpoint."""
        self._checkpoint.set_to_current_time()

    def record(self, metrics: Mapping[str, float], stages: Mapping[str, float]) -> None:
        """Record a step."""
        self._steps.inc()
        self._tokens.inc(metrics.get("response_tokens", 0.0))
        self._bytes.inc(metrics.get("payload_bytes", 0.0))
        for stage, seconds in stages.items():
            self._stage.labels(stage).observe(seconds)
        self.show(metrics)

    def show(self, metrics: Mapping[str, float]) -> None:
        """Set metrics outside of a step, such as the evaluation before the first step."""
        for name, value in metrics.items():
            if name in ("response_tokens", "payload_bytes"):
                continue
            try:
                float(value)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"metric {name!r} is {value!r}, but a metric must be a number.") from error
            try:
                self._record(name, value)
            except ValueError as error:  # the name of another series, or other labels
                raise ConfigError(
                    f"metric {name!r} cannot be a Prometheus series, because the student has one under that name or "
                    "of that form; give it another name, for example my_plugin/value."
                ) from error

    def _record(self, name: str, value: float) -> None:
        head, _, rest = name.partition("/")
        if head == "loss":
            self._loss.labels(rest).set(value)
        elif head == "domain_accuracy":
            self._domains.labels(rest).set(value)
        elif head in ("domain_tokens", "teacher_tokens"):
            self._labelled[head.removesuffix("_tokens")].labels(rest).inc(value)
        elif head == "mode" and "/" in rest:
            self._record_mode(*rest.split("/"), value=value)
        elif head == "by_position":
            self._positions.labels(*rest.split("/")).set(value)
        elif head == "cost":
            purpose, _, kind = rest.partition("/")
            self._costs.labels(purpose, kind.removesuffix("_tokens")).inc(value)
        else:
            self._gauge(name).set(value)

    def _record_mode(self, figure: str, *labels: str, value: float) -> None:
        """A figure of a mode, or of a mode and another mode's teacher."""
        full = gauge_name(f"mode_{figure}")
        if full not in self._gauges:
            text = _MODE_TEXTS.get(figure, f"{figure.replace('_', ' ').capitalize()} of a mode, latest step.")
            self._gauges[full] = Gauge(full, text, ["mode", "teacher"][: len(labels)], registry=self._registry)
        self._gauges[full].labels(*labels).set(value)

    def _gauge(self, name: str) -> Gauge:
        full = gauge_name(name)
        if full not in self._gauges:
            figure = name.removeprefix("mode/")
            text = _MODE_TEXTS.get(figure) if figure != name else None
            self._gauges[full] = Gauge(full, text or help_of(name), registry=self._registry)
        return self._gauges[full]


def gauge_name(name: str) -> str:
    """The name of a metric's series: lower case, with one unit at the end."""
    base = "opd_student_" + re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    if base.endswith("response_length"):
        return base + "_tokens"
    if _NATS.search(base):
        return base + "_nats"
    if base.endswith("learning_rate") or not _RATIO.search(base):
        return base
    return base + "_ratio"
