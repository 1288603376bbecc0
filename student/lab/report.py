"""docs/results.md, plots and JSON files, generated from the runs that are finished."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from opd.errors import ConfigError
from student.lab.experiment import ROUTED, Experiment
from student.lab.experiments import NAMES, load_experiment
from student.lab.plots import plot_experiment
from student.lab.runner import read_results
from student.lab.stats import bootstrap
from student.lab.world import open_world

_TEMPLATE = Path(__file__).parent / "results.md.jinja"


def write_report(root: Path, out: Path, *, form: str) -> list[Path]:
    """Write results.md and, below results/, a PNG and a JSON for each experiment whose runs are all finished.

    Args:
        root: folder of the lab.
        out: folder of the report.
        form: "full" or "quick".

    Returns:
        The files written.

    Raises:
        ConfigError: when no experiment has been begun, rather than to write a report of nothing over another.
    """
    started = [name for name in NAMES if (root / form / name).is_dir()]
    if not started:
        raise ConfigError(f"there are no runs of the {form} form in {root}; give their folder with --root.")
    folder = out / "results"
    folder.mkdir(parents=True, exist_ok=True)
    cast = open_world(root, form)
    written, sections = [], []
    unfinished = dict.fromkeys(NAMES, "not begun")
    for name in started:
        experiment = load_experiment(name)
        data = read_results(experiment, cast, root, form=form)
        if data["finished_runs"] < data["planned_runs"]:
            unfinished[name] = f"{data['finished_runs']} of {data['planned_runs']} runs are finished"
            continue
        del unfinished[name]
        target = folder / f"{name}.json"
        target.write_text(json.dumps(_rounded(data), indent=1) + "\n", encoding="utf-8")
        plot = folder / f"{name}.png"
        plot_experiment(data, experiment.title, plot)
        written += [target, plot]
        sections.append(_section(experiment, data))
    sections.sort(key=lambda section: section["letter"])
    missing = [{"experiment": load_experiment(name), "state": state} for name, state in unfinished.items()]
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    models = [{"name": name, "parameters": model.parameters} for name, model in cast.world.models.items()]
    page = out / "results.md"
    page.write_text(template.render(sections=sections, missing=missing, form=form, models=models), encoding="utf-8")
    return [page, *written]


def _section(experiment: Experiment, data: Mapping[str, Any]) -> dict[str, Any]:
    """What the template shows of one experiment."""
    return {
        "name": experiment.name,
        "letter": experiment.letter,
        "title": experiment.title,
        "question": experiment.question,
        "note": experiment.note,
        "finished": data["finished_runs"],
        "planned": data["planned_runs"],
        "models": {_model(name): _levels(found) for name, found in data["models"].items() if found},
        "arms": [_arm(arm) for arm in data["arms"] if arm["seeds"]],
        "claims": [_claim(claim) for claim in data["claims"]],
    }


def _arm(arm: Mapping[str, Any]) -> dict[str, str]:
    from student.lab.curve import Curve

    curves = [Curve(**seed["curve"]) for seed in arm["seeds"]]
    totals = [seed["totals"] for seed in arm["seeds"]]

    def mean(name: str) -> float:
        return sum(t.get(name, 0.0) for t in totals) / len(totals)

    def tokens(purpose: str, kind: str = "sampled_tokens") -> str:
        return _thousands(mean(f"cost/{purpose}/{kind}"))

    scored = sum(mean(f"cost/{p}/{r}_positions") for p in ("train", "probe", "gate") for r in ("teacher", "reference"))
    divergences = [curve.final("reverse_kl") for curve in curves]
    rollout = mean("cost/train/sampled_tokens") + mean("cost/train/expert_tokens")
    return {
        "title": arm["title"],
        "rate": f"{arm['rate']:g}{_edge(arm)}",
        "accuracy": _interval([curve.final("accuracy") for curve in curves], 3),
        "greedy": _mean([seed["greedy"] for seed in arm["seeds"]]),
        "reverse_kl": "" if any(map(math.isnan, divergences)) else _interval(divergences, 4),
        "rollout": _thousands(rollout),
        "probe": tokens("probe"),
        "gate": tokens("gate"),
        "scored": _thousands(scored),
        "flops": f"{sum(c.flops[-1] for c in curves) / len(curves) / 1e9:,.4g}",
        "cpu": f"{sum(s['cpu_seconds'] for s in arm['seeds']) / len(totals):.0f}",
        "wall": f"{sum(s['wall_seconds'] for s in arm['seeds']) / len(totals):.0f}",
        "fired": "" if all(s["fired"] for s in arm["seeds"]) else "never fired",
    }


def _edge(arm: Mapping[str, Any]) -> str:
    """A mark for a rate at the edge of its sweep: a better one may lie outside."""
    rates = sorted(float(rate) for rate in arm["swept"])
    return " *" if len(rates) > 1 and arm["rate"] in (rates[0], rates[-1]) else ""


def _claim(claim: Mapping[str, Any]) -> dict[str, str]:
    interval, numbers = claim["interval"], ""
    if interval is not None:
        kind = "ratio" if claim["ratio"] else "difference"
        seeds = ", ".join(f"{value:.3g}" for value in claim["seeds"])
        numbers = f"{kind} {interval['mean']:.3g} ({interval['low']:.3g} to {interval['high']:.3g}); seeds {seeds}"
    return {"text": claim["claim"], "outcome": claim["outcome"], "numbers": numbers or claim["why"]}


def _model(name: str) -> str:
    return "Each prompt's own teacher" if name == ROUTED else f"Model `{name}`"


def _levels(found: Mapping[str, Mapping[str, float]]) -> str:
    levels = list(found.values())
    return f"{_interval([x['accuracy'] for x in levels], 3)}, greedy {_mean([x['greedy'] for x in levels])}"


def _mean(values: list[float]) -> str:
    return "" if any(map(math.isnan, values)) else f"{sum(values) / len(values):.3f}"


def _interval(values: list[float], digits: int) -> str:
    found = bootstrap(values)
    return f"{found.mean:.{digits}f} ({found.low:.{digits}f} to {found.high:.{digits}f})"


def _thousands(value: float) -> str:
    return "" if value == 0 else f"{value / 1e3:,.1f}k"


def _rounded(node: Any) -> Any:
    """Floats with six significant digits, which is far below the noise and keeps the files small."""
    if isinstance(node, float):
        return float(f"{node:.6g}") if math.isfinite(node) else None
    if isinstance(node, Mapping):
        return {key: _rounded(value) for key, value in node.items()}
    return [_rounded(value) for value in node] if isinstance(node, list | tuple) else node
