"""Reads a run folder, complete or half written, into the report's JSON data."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from opd.errors import RunFolderError
from student.report.shown import Figures, held, read_shown
from student.run.progress import evaluations, now, seconds_of, status_of
from student.run.reading import group, is_number, read_mapping, read_recipe, read_records, read_steps

VERSION = 1
POINTS = 240
"""Maximum points of a curve; longer runs are averaged over stretches of steps."""
SAMPLES = 8
"""Number of answers shown for each point in time."""
REPLICA = ("teacher", "address", "state", "reason", "engine", "tokens_per_second", "agreement_nats")
"""What the page shows of each replica."""
CURVES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "Divergence to the teacher",
        "nats per token",
        ("reverse_kl", "forward_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "eval/reverse_kl", "head_kl"),
    ),
    ("Accuracy", "share", ("eval/accuracy", "eval/pass_at_*", "domain_accuracy/*", "verdict")),
    ("Reward", "", ("reward", "reward_part/*")),
    ("Loss by term", "nats", ("loss/*",)),
    ("Entropy", "nats per token", ("student_entropy", "teacher_entropy")),
    ("Length of responses", "tokens", ("response_length", "eval/response_length")),
    ("Truncated and repeating", "share", ("truncation_rate", "repetition", "eval/repetition")),
    ("Norm of the gradient", "", ("grad_norm",)),
    ("Learning rate", "", ("learning_rate",)),
    ("Tokens learnt from, by domain", "tokens per step", ("domain_tokens/*",)),
    ("Tokens learnt from, by teacher", "tokens per step", ("teacher_tokens/*",)),
    ("Shares: did the mechanisms act?", "share", ("*_share",)),
    ("Speed", "response tokens per second", ("tokens_per_second",)),
)
"""Title, unit and metrics of each chart; charts without data are left out."""


def read_run(path: Path) -> dict[str, Any]:
    """Everything that the report shows.

    Args:
        path: the run folder.

    Raises:
        RunFolderError: if it is not a run folder. Anything else that is missing or damaged becomes a line of
            "problems".
    """
    if not path.is_dir() or not any(
        (path / name).exists() for name in ("recipe.yaml", "metrics.jsonl", "summary.json")
    ):
        raise RunFolderError(
            f"{path} is not a run folder: it has neither recipe.yaml nor metrics.jsonl nor summary.json."
        )
    problems: list[str] = []
    recipe = read_recipe(path, problems)
    summary = read_mapping(path / "summary.json", problems, needed=False)
    ending = read_mapping(path / "ending.json", problems, needed=False)
    metrics = read_steps(path, problems)
    samples = read_records(path / "samples.jsonl", problems)
    before, after = (_evaluation(summary.get(name)) for name in ("before", "after"))
    # A run that is running or was killed has no summary; as much as possible is taken from its steps instead.
    measured = evaluations(metrics, summary)
    return {
        "report": VERSION,
        "run": str(path),
        "written": now(),
        "ended": ending.get("ended"),
        "status": status_of(path, metrics, summary, ending, group(recipe, "train").get("steps")),
        "recipe": recipe,
        "provenance": read_mapping(path / "provenance.json", problems, needed=False),
        "before": before or (measured[0][1] if measured and measured[0][0] == 0 else None),
        "after": after or (measured[-1][1] if measured and measured[-1][0] else None),
        "evaluated": measured[-1][0] if measured else None,
        "steps": metrics[-1]["step"] if metrics else 0,
        "response_tokens": _number(summary.get("response_tokens"))
        or sum(r["response_tokens"] for r in metrics if is_number(r.get("response_tokens"))),
        "seconds": seconds_of(metrics, summary) or None,
        "curves": _curves(metrics, before, after, read_shown(path, problems)),
        "figures": _figures(metrics),
        "idle": _idle(metrics),
        "stages": _stages(metrics),
        "costs": _costs(metrics),
        "fleet": _fleet(ending, problems),
        "samples": _chosen(samples),
        "problems": problems,
    }


def _number(found: Any) -> float | None:
    return found if is_number(found) else None


def _evaluation(found: Any) -> dict[str, Any] | None:
    return found if isinstance(found, dict) else None


def _fleet(ending: Mapping[str, Any], problems: list[str]) -> dict[str, Any] | None:
    """The fleet's counters and replicas at the end of the run; None if they were not written."""
    found = group(ending, "fleet")
    replicas = found.get("replicas")
    if not found or not isinstance(replicas, list):
        return None
    counters = {name: value for name, value in group(found, "counters").items() if is_number(value)}
    whole = [held for held in replicas if isinstance(held, dict) and held.keys() >= set(REPLICA)]
    if len(whole) < len(replicas):
        problems.append(f"ending.json: {len(replicas) - len(whole)} of {len(replicas)} replicas lack a key.")
    known = [dict.fromkeys(REPLICA, "") | held for held in replicas if isinstance(held, dict)]
    return {**found, "counters": counters, "replicas": known}


def _names(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for record in metrics for name, value in record.items() if is_number(value)))


def _matches(name: str, pattern: str) -> bool:
    if pattern.startswith("*"):
        return name.endswith(pattern[1:])
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def _curves(metrics: Sequence[Mapping[str, Any]], before: Any, after: Any, shown: Figures) -> list[dict[str, Any]]:
    """The charts that have data: title, unit, and series with x, y and, for accuracies, half widths."""
    names, charts = _names(metrics), []
    charted = [pattern for *_, patterns in CURVES for pattern in patterns]
    own = [name for name in held(shown, names).values() if not any(_matches(name, pattern) for pattern in charted)]
    for title, unit, patterns in (("Shown by the terms", "", tuple(own)), *CURVES):
        mine = [name for pattern in patterns for name in names if _matches(name, pattern)]
        mine += [p for p in patterns if p.startswith("eval/") and "*" not in p and p not in mine and (before or after)]
        series = []
        for name in dict.fromkeys(mine):
            points = [
                (r["step"], r[name], _number(r.get(f"{name}_half_width"))) for r in metrics if is_number(r.get(name))
            ]
            points = _with_ends(name, points, before, after, metrics[-1]["step"] if metrics else 0)
            if points:
                x, y, half = zip(*_thinned(points), strict=True)
                series.append(
                    {"name": name, "x": x, "y": y, "half": half if any(h is not None for h in half) else None}
                )
        if series:
            charts.append({"title": title, "unit": unit, "series": series})
    return charts


def _with_ends(name: str, points: list[Any], before: Any, after: Any, last: int) -> list[Any]:
    """The curve of an evaluation's figure, extended by the values before the first and after the last step."""
    if not name.startswith("eval/"):
        return points
    key = {"eval/response_length": "mean_length"}.get(name, name.removeprefix("eval/"))
    half = "accuracy_half_width" if key == "accuracy" else ""
    for report, step in ((before, 0), (after, last)):
        if report is not None and is_number(report.get(key)) and step not in [p[0] for p in points]:
            points = sorted([*points, (step, report[key], _number(report.get(half)))], key=lambda point: point[0])
    return points


def _thinned(points: Sequence[tuple[float, float, float | None]]) -> list[tuple[float, float, float | None]]:
    """At most POINTS points, each the mean of a stretch of steps, placed at its last step."""
    size = -(-len(points) // POINTS)
    if size <= 1:
        return list(points)
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(part[-1][0], sum(p[1] for p in part) / len(part), part[-1][2]) for part in parts]


def _figures(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every metric with its first, last, smallest and largest value."""
    found = []
    for name in sorted(_names(metrics)):
        values = [record[name] for record in metrics if is_number(record.get(name))]
        if name != "step" and not name.startswith("by_position/"):
            found.append(
                {"name": name, "first": values[0], "last": values[-1], "least": min(values), "largest": max(values)}
            )
    return found


def _idle(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Mechanisms that never had an effect: shares, or a gradient, that are 0 in every step."""
    # The share of answers that could not be judged is not a mechanism, and should be 0.
    shares = [name for name in _names(metrics) if name.endswith("_share") and name != "unknown_share"]
    watched = [*shares, "grad_norm", "effopd/accepted"]
    return [name for name in watched if any(name in r for r in metrics) and all(r.get(name, 0) == 0 for r in metrics)]


def _stages(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Seconds by stage: total, and mean per step over stretches of the run."""
    timed = [(r["step"], r["seconds"]) for r in metrics if "seconds" in r]
    names = list(dict.fromkeys(name for _, seconds in timed for name in seconds))
    size = max(1, -(-len(timed) // 60))
    parts = [timed[i : i + size] for i in range(0, len(timed), size)]
    bars = [
        {"from": part[0][0], "to": part[-1][0], "seconds": {n: _mean(s.get(n, 0.0) for _, s in part) for n in names}}
        for part in parts
    ]
    return {"total": {name: sum(s.get(name, 0.0) for _, s in timed) for name in names}, "bars": bars}


def _mean(values: Iterable[float]) -> float:
    held = list(values)
    return sum(held) / len(held)


def _costs(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tokens by purpose and kind, over the whole run."""
    totals: dict[str, float] = {}
    for record in metrics:
        for name, value in record.items():
            if name.startswith("cost/") and is_number(value):
                totals[name] = totals.get(name, 0.0) + value
    parts = [(name.split("/", 2), tokens) for name, tokens in sorted(totals.items())]
    return [{"purpose": p[1], "kind": p[2] if len(p) > 2 else "", "tokens": tokens} for p, tokens in parts]


def _chosen(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Answers worth reading: the first evaluation's, the latest evaluation's to the same prompts, the latest step's."""
    labels = list(dict.fromkeys(str(sample.get("label", "")) for sample in samples))
    evaluations = [label for label in labels if label != "train"]
    wanted = list(dict.fromkeys([*evaluations[:1], *evaluations[-1:]]))
    groups = [[s for s in samples if s.get("label") == label][:SAMPLES] for label in wanted]
    trained = [sample for sample in samples if sample.get("label") == "train"]
    latest = trained[-1].get("step") if trained else None
    groups.append([sample for sample in trained if sample.get("step") == latest][:SAMPLES])
    return [dict(sample) for group in groups for sample in group]
