"""Write the Grafana dashboards of deploy/grafana from the panels below; run `python scripts/dashboards.py`."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "deploy" / "grafana"
WIDTH, HEIGHT, COLUMNS = 8, 8, 3
Panel = tuple[str, str, str, str]
"""Title, expression, legend, unit."""

FLEET: list[Panel] = [
    ("Scored tokens", "sum by (teacher) (rate(opd_teacher_scored_tokens_total[5m]))", "{{teacher}}", "short"),
    ("Speed of the engine", "opd_teacher_tokens_per_second", "{{teacher}} {{instance}}", "short"),
    ("Engine busy", "rate(opd_teacher_engine_busy_seconds_total[5m])", "{{teacher}} {{instance}}", "percentunit"),
    ("Queued tokens", "opd_teacher_queued_tokens", "{{teacher}} {{instance}}", "short"),
    ("Budget in use", "opd_teacher_used_tokens / opd_teacher_budget_tokens", "{{instance}}", "percentunit"),
    (
        "Duration of calls, 99 %",
        "histogram_quantile(0.99, sum by (le, teacher) (rate(opd_teacher_request_duration_seconds_bucket[5m])))",
        "{{teacher}}",
        "s",
    ),
    (
        "Mean time by stage",
        "sum by (stage) (rate(opd_teacher_stage_duration_seconds_sum[5m])) / "
        "sum by (stage) (rate(opd_teacher_stage_duration_seconds_count[5m]))",
        "{{stage}}",
        "s",
    ),
    ("Refused calls", "sum by (reason) (rate(opd_teacher_refused_calls_total[5m]))", "{{reason}}", "reqps"),
    ("Rejections", "sum by (reason) (rate(opd_teacher_rejections_total[5m]))", "{{reason}}", "reqps"),
    ("State of teachers", "opd_teacher_state == 1", "{{teacher}} {{state}} {{instance}}", "short"),
    ("Replicas by state", "sum by (teacher, state) (opd_student_fleet_replicas)", "{{teacher}} {{state}}", "short"),
    (
        "Hedges and re-issues",
        "rate(opd_student_fleet_hedges_total[5m]) + rate(opd_student_fleet_reissues_total[5m])",
        "",
        "short",
    ),
]

TRAINING: list[Panel] = [
    ("Reverse KL, nats per token", "opd_student_reverse_kl_nats", "{{instance}}", "short"),
    ("Accuracy, held out", "opd_student_eval_accuracy_ratio", "{{instance}}", "percentunit"),
    ("Reward", "opd_student_reward", "{{instance}}", "short"),
    ("Entropy of the student", "opd_student_student_entropy_nats", "{{instance}}", "short"),
    ("Loss by term", "opd_student_loss_nats", "{{term}}", "short"),
    ("Norm of the gradient", "opd_student_grad_norm", "{{instance}}", "short"),
    ("Length of responses", "opd_student_response_length_tokens", "{{instance}}", "short"),
    (
        "Truncated and repeating",
        # Series with equal labels are one to `or`, whatever their names.
        "opd_student_truncation_rate_ratio or "
        'label_replace(opd_student_repetition_ratio, "what", "repeated", "instance", ".*")',
        "{{__name__}}",
        "percentunit",
    ),
    ("Tokens per second", "opd_student_tokens_per_second", "{{instance}}", "short"),
    (
        "Time of a step by stage",
        "sum by (stage) (rate(opd_student_stage_seconds_sum[5m])) / ignoring (stage) group_left () "
        "sum(rate(opd_student_steps_total[5m]))",
        "{{stage}}",
        "s",
    ),
    ("Tokens spent by purpose", "sum by (purpose) (rate(opd_student_cost_tokens_total[5m]))", "{{purpose}}", "short"),
    ("Divergence by position", "opd_student_divergence_by_position_nats", "{{position}}", "short"),
]


def dashboard(uid: str, title: str, panels: list[Panel]) -> dict[str, Any]:
    """A dashboard of time series, three to a row."""
    return {
        "uid": uid,
        "title": title,
        "schemaVersion": 39,
        "tags": ["opd"],
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "panels": [_panel(number, *panel) for number, panel in enumerate(panels)],
    }


def _panel(number: int, title: str, expression: str, legend: str, unit: str) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "prometheus"}
    row, column = divmod(number, COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0 if unit != "short" else None}, "overrides": []},
        "targets": [{"refId": "A", "datasource": source, "expr": expression, "legendFormat": legend or "__auto"}],
    }


def files() -> dict[str, str]:
    """Each dashboard by its file's name."""
    made = {
        "fleet.json": dashboard("opd-fleet", "opd: teachers and fleet", FLEET),
        "training.json": dashboard("opd-training", "opd: training", TRAINING),
    }
    return {name: json.dumps(content, indent=1) + "\n" for name, content in made.items()}


if __name__ == "__main__":
    for name, text in files().items():
        (FOLDER / name).write_text(text)
