"""Write docs/metrics.md from the code: python scripts/metrics_doc.py [OUT]."""

import sys
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

ROOT = Path(__file__).resolve().parent.parent
INTRO = """# Metrics

Written by `python scripts/metrics_doc.py`; a test fails when it is out of date. Base units, `_total` on counters, no
unbounded labels.

A student also writes metrics.jsonl in its run folder, one line per step, under the short names; gauges of metrics that
only some objectives have (`head_kl`, `student_head_mass`, ...) appear as `opd_student_<name>` with the unit as suffix,
and parts of rewards (here `overlong`) as `opd_student_reward_part_<name>`.
"""
# A step's metrics with the objective `opd`; other terms add their own.
STEP = (
    *("reverse_kl", "student_entropy", "teacher_entropy", "student_head_mass", "teacher_head_mass", "topk_overlap"),
    *(
        "tail_sampled",
        "importance_weight",
        "importance_truncated",
        "scored_while_learning",
        "staleness",
        "updates",
        "updates_skipped",
        "rollout_rounds",
        "sampled_rows",
        "episodes_broken",
        "episode_windows",
        "summaries",
        "summaries_empty",
        "summaries_cut",
        "context_saved",
        "grad_norm",
    ),
    *("grad_clipped", "learning_rate", "response_length", "truncation_rate", "repetition", "stop_log_ratio"),
    *("effopd/jumps", "effopd/tried", "window", "adwin/at_longest_share", "adwin/at_shortest_share"),
    *("hinted_share", "hint_quoted", "context_missing_share", "clipped_share", "unknown_share"),
    *("mismatch/log_ratio", "mismatch/max_log_ratio", "mismatch/kl"),
    *("engine/syncs", "engine/sync_seconds", "engine/restarts"),
    *(
        "reward",
        "verdict",
        "reward_part/overlong",
        "ema_distance",
        "follow/seconds",
        "follow/gap",
        "tokens_per_second",
        "payload_bytes_per_token",
        "unasked_share",
    ),
    *("rollout_seconds", "sampler_idle_seconds"),
    *("eval/accuracy", "eval/reverse_kl", "eval/response_length"),
    *("eval/repetition", "eval/pass_at_4", "loss/opd"),
    *(f"mode/{figure}/long" for figure in ("accuracy", "tokens", "violations", "truncation", "neighbour_ratio")),
    *("mode/recovery/long", "mode/leakage/long/short", "mode/share/long", "mode/lag/long"),
    *("mode/interpolation/between", "mode/monotone", "mode/hypervolume"),
)


def rows(families: Iterable[Metric]) -> str:
    """A row per family that is collected at scrape time: name, type, labels, meaning."""
    return "\n".join(_row(family, getattr(family, "_labelnames", ())) for family in families)


def table(registry: CollectorRegistry) -> str:
    """The series of a registry, with a heading."""
    lines = ["| series | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for collector in dict.fromkeys(registry._collector_to_names):
        labels = getattr(collector, "_labelnames", ())
        lines += [_row(family, labels) for family in collector.describe()] if hasattr(collector, "describe") else []
    return "\n".join(lines)


def _row(family: Metric, labels: Iterable[str]) -> str:
    # The client library strips a counter's suffix from the family's name; the series that is scraped has it.
    name = family.name + ("_total" if family.type == "counter" else "")
    return f"| `{name}` | {family.type} | {', '.join(labels)} | {family.documentation} |"


def render() -> str:
    """The whole document."""
    from opd.fleet.metrics import collect_status
    from opd.fleet.status.records import FleetStatus
    from student.run.series import Series
    from teacher_server.observe.metrics import ServerMetrics

    student = CollectorRegistry()
    Series(student).record(dict.fromkeys(STEP, 0.0), {})
    fleet = rows(collect_status(FleetStatus([], [], [])))
    return (
        f"{INTRO}\n## Teacher server (`opd serve --metrics-port`)\n\n{table(ServerMetrics().registry)}\n"
        f"\n## Student (`metrics_port` of a recipe)\n\n{table(student)}\n{fleet}\n"
    )


if __name__ == "__main__":
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "metrics.md"
    out.write_text(render(), encoding="utf-8")
