"""Write the Grafana dashboards of deploy/grafana from the panels below; run `python scripts/dashboards.py`.

A dashboard begins with a row of figures, with thresholds where they can be good or bad. Its variables are the data
source, the namespace, runs and teachers; every series of ours is filtered by those of its labels.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy" / "grafana"
WIDTH, HEIGHT, COLUMNS, STAT_HEIGHT = 8, 8, 3, 4
RATE = "[$__rate_interval]"
Panel = tuple[str, str, str, str]
"""Title, expression, legend, unit."""
BACKLOG = (
    "sum by (namespace, teacher) (opd_student_fleet_queued_tokens or opd_teacher_queued_tokens) "
    "/ avg by (namespace, teacher) (opd_teacher_tokens_per_second > 0)"
)
"""Seconds of work of one replica that wait for a teacher, in clients and servers; alert and autoscaler ask the same."""

FLEET_FIGURES: list[Panel] = [
    (
        "Replicas that can serve",
        'sum(opd_student_fleet_replicas{state="healthy"}) / sum(opd_student_fleet_replicas)',
        "",
        "percentunit",
    ),
    ("Backlog, work of one replica", f"max({BACKLOG})", "", "s"),
    ("Students wait for a teacher", "max(opd_student_fleet_down_seconds)", "", "s"),
    ("Scored tokens per second", f"sum(rate(opd_teacher_scored_tokens_total{RATE}))", "", "short"),
    (
        "Calls that fail",
        f"sum(rate(opd_student_fleet_calls_failed_total{RATE})) / sum(rate(opd_student_fleet_calls_total{RATE}))",
        "",
        "percentunit",
    ),
]
TRAINING_FIGURES: list[Panel] = [
    ("Progress", "opd_student_progress_ratio", "{{instance}}", "percentunit"),
    ("Accuracy, held out", "opd_student_eval_accuracy_ratio", "{{instance}}", "percentunit"),
    ("Reverse KL, nats per token", "opd_student_eval_reverse_kl_nats", "{{instance}}", "short"),
    ("Response tokens per second", "opd_student_tokens_per_second", "{{instance}}", "short"),
    ("Not in any checkpoint", "time() - opd_student_checkpoint_timestamp_seconds", "{{instance}}", "s"),
]
THRESHOLDS = {
    "Replicas that can serve": ("red", {0.5: "orange", 1.0: "green"}),
    "Backlog, work of one replica": ("green", {20.0: "orange", 60.0: "red"}),
    "Students wait for a teacher": ("green", {30.0: "orange", 120.0: "red"}),
    "Calls that fail": ("green", {0.05: "orange", 0.2: "red"}),
    "Not in any checkpoint": ("green", {3600.0: "orange", 7200.0: "red"}),
}
"""Colours of a figure: the lowest, and those from a value on."""
STATES = {"healthy": "green", "suspect": "yellow", "unverified": "purple", "rejected": "red", "dead": "dark-red"}
TIMELINE: Panel = (
    "State of replicas, as students see them",
    "max by (teacher, address) ("
    + " or ".join(f'{code} * opd_student_fleet_replica_info{{state="{state}"}}' for code, state in enumerate(STATES))
    + ")",
    "{{teacher}} {{address}}",
    "short",
)
GPUS: list[Panel] = [
    ("Use of GPUs", "DCGM_FI_DEV_GPU_UTIL", "{{Hostname}} {{gpu}}", "percent"),
    ("Tensor cores active", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "{{Hostname}} {{gpu}}", "percentunit"),
    ("Memory of GPUs in use", "DCGM_FI_DEV_FB_USED", "{{Hostname}} {{gpu}}", "decmbytes"),
]
"""Of NVIDIA's DCGM exporter."""

FLEET: list[Panel] = [
    (
        "Scored tokens",
        f"sum by (teacher) (rate(opd_teacher_scored_tokens_total{RATE}))",
        "{{teacher}}",
        "short",
    ),
    ("Speed of the engine", "opd_teacher_tokens_per_second", "{{teacher}} {{instance}}", "short"),
    (
        "Engine busy",
        f"rate(opd_teacher_engine_busy_seconds_total{RATE})",
        "{{teacher}} {{instance}}",
        "percentunit",
    ),
    ("Backlog in seconds", BACKLOG, "{{teacher}}", "s"),
    (
        "Tokens that wait, in clients and servers",
        "opd_student_fleet_queued_tokens or opd_teacher_queued_tokens",
        "{{teacher}} {{instance}}",
        "short",
    ),
    ("Budget in use", "opd_teacher_used_tokens / opd_teacher_budget_tokens", "{{instance}}", "percentunit"),
    (
        "Duration of calls, 99 %",
        f"histogram_quantile(0.99, sum by (le, teacher) (rate(opd_teacher_request_duration_seconds_bucket{RATE})))",
        "{{teacher}}",
        "s",
    ),
    (
        "Mean time by stage",
        f"sum by (stage) (rate(opd_teacher_stage_duration_seconds_sum{RATE})) / "
        f"sum by (stage) (rate(opd_teacher_stage_duration_seconds_count{RATE}))",
        "{{stage}}",
        "s",
    ),
    (
        "Refused calls",
        f"sum by (reason) (rate(opd_teacher_refused_calls_total{RATE}))",
        "{{reason}}",
        "reqps",
    ),
    ("Rejections", f"sum by (reason) (rate(opd_teacher_rejections_total{RATE}))", "{{reason}}", "reqps"),
    ("State of teachers", "opd_teacher_state == 1", "{{teacher}} {{state}} {{instance}}", "short"),
    ("Replicas by state", "sum by (teacher, state) (opd_student_fleet_replicas)", "{{teacher}} {{state}}", "short"),
    (
        "Hedges and re-issues",
        f"rate(opd_student_fleet_hedges_total{RATE}) + rate(opd_student_fleet_reissues_total{RATE})",
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
        f"sum by (instance, stage) (rate(opd_student_stage_seconds_sum{RATE})) "
        f"/ on (instance) group_left () sum by (instance) (rate(opd_student_steps_total{RATE}))",
        "{{instance}} {{stage}}",
        "s",
    ),
    (
        "Tokens spent by purpose",
        f"sum by (purpose) (rate(opd_student_cost_tokens_total{RATE}))",
        "{{purpose}}",
        "short",
    ),
    ("Divergence by position", "opd_student_divergence_by_position_nats", "{{position}}", "short"),
]


@cache
def series() -> dict[str, tuple[set[str], str]]:
    """Labels and meaning of each of our series, as docs/metrics.md has them."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(opd_\w+)` \| \w+ \| ([\w, ]*) \| (.*) \|$", page, re.M)
    return {name: ({label for label in labels.split(", ") if label}, text) for name, labels, text in rows}


def base(name: str) -> str:
    """The series that a histogram's parts belong to; any other as it is."""
    return name if name in series() else re.sub(r"_(bucket|sum|count)$", "", name)


def filtered(expression: str) -> str:
    """The expression with every series of ours filtered by the variables of the dashboards."""

    def select(found: re.Match[str]) -> str:
        name, more = found[1], found[2] or ""
        chosen = ['namespace=~"$namespace"']
        if "teacher" in series()[base(name)][0]:
            chosen.append('teacher=~"$teacher"')
        if name.startswith("opd_student_"):
            chosen.append('instance=~"$student"')
        return f"{name}{{{', '.join([*chosen, more] if more else chosen)}}}"

    return re.sub(r"\b(opd_\w+)(?:\{([^}]*)\})?", select, expression)


def plain(expression: str, window: str) -> str:
    """The expression without what only Grafana knows, for a Prometheus."""
    return expression.replace("$__rate_interval", window)


SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def variables() -> list[dict[str, Any]]:
    """What can be chosen above the panels; `student` follows from the runs."""

    def query(name: str, text: str, *, hidden: bool = False) -> dict[str, Any]:
        return {
            "name": name,
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": text, "refId": name},
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
            "hide": 2 if hidden else 0,
        }

    within = 'namespace=~"$namespace"'
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus"},
        query("namespace", "label_values(opd_build_info, namespace)"),
        query("run", f"label_values(opd_student_info{{{within}}}, run)"),
        query("student", f'label_values(opd_student_info{{{within}, run=~"$run"}}, instance)', hidden=True),
        query(
            "teacher", f'label_values({{__name__=~"opd_teacher_state|opd_student_fleet_replicas", {within}}}, teacher)'
        ),
    ]


def dashboard(uid: str, title: str, figures: list[Panel], panels: list[Panel], *, states: bool) -> dict[str, Any]:
    """A dashboard: figures on top, the states of replicas where wanted, curves three to a row, and the GPUs folded."""
    made, y = [], 0
    for number, panel in enumerate(figures):
        width = 24 // len(figures)
        made.append(_panel("stat", panel, number * width, y, width, STAT_HEIGHT) | {"options": _LATEST})
    y += STAT_HEIGHT
    if states:
        made.append(_panel("state-timeline", TIMELINE, 0, y, 24, HEIGHT))
        y += HEIGHT
    made += _curves(panels, y)
    y += -(-len(panels) // COLUMNS) * HEIGHT
    row = {"type": "row", "title": "GPUs (DCGM exporter)", "collapsed": True, "panels": _curves(GPUS, y + 1)}
    made.append({**row, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})
    numbers = iter(range(1, 1000))
    for one in made:
        one["id"] = next(numbers)
        for inner in one.get("panels", ()):
            inner["id"] = next(numbers)
    return {
        "uid": uid,
        "title": title,
        "schemaVersion": 39,
        "tags": ["opd"],
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "links": [{"type": "dashboards", "title": "opd", "tags": ["opd"], "keepTime": True, "includeVars": True}],
        "templating": {"list": variables()},
        "panels": made,
    }


_LATEST = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "background", "graphMode": "area"}


def _curves(panels: list[Panel], y: int) -> list[dict[str, Any]]:
    return [
        _panel("timeseries", panel, number % COLUMNS * WIDTH, y + number // COLUMNS * HEIGHT, WIDTH, HEIGHT)
        for number, panel in enumerate(panels)
    ]


def _panel(kind: str, panel: Panel, x: int, y: int, width: int, height: int) -> dict[str, Any]:
    title, expression, legend, unit = panel
    ours = map(base, re.findall(r"\bopd_\w+", expression))
    defaults: dict[str, Any] = {"unit": unit, "min": 0 if unit != "short" else None}
    if title in THRESHOLDS:
        lowest, above = THRESHOLDS[title]
        steps = [{"color": lowest, "value": None}, *({"color": c, "value": v} for v, c in above.items())]
        defaults |= {"thresholds": {"mode": "absolute", "steps": steps}, "color": {"mode": "thresholds"}}
    if kind == "state-timeline":
        options = {str(code): {"text": state, "color": STATES[state]} for code, state in enumerate(STATES)}
        defaults["mappings"] = [{"type": "value", "options": options}]
    return {
        "type": kind,
        "title": title,
        "description": " ".join(dict.fromkeys(series()[name][1] for name in ours)),
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": width, "h": height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": "A", "datasource": SOURCE, "expr": filtered(expression), "legendFormat": legend or "__auto"}
        ],
    }


def files() -> dict[str, str]:
    """Each dashboard by its file's name."""
    made = {
        "fleet.json": dashboard("opd-fleet", "opd: teachers and fleet", FLEET_FIGURES, FLEET, states=True),
        "training.json": dashboard("opd-training", "opd: training", TRAINING_FIGURES, TRAINING, states=False),
    }
    return {name: json.dumps(content, indent=1) + "\n" for name, content in made.items()}


if __name__ == "__main__":
    for name, text in files().items():
        (FOLDER / name).write_text(text)
