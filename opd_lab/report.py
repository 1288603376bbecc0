"""Generates results.md, plots and JSON files from finished runs; `opd lab report` writes them to docs/."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from opd.errors import ConfigError
from opd.files import check_writable, write_whole
from opd_lab.curve import Curve
from opd_lab.experiment import ROUTED, RULE, Experiment
from opd_lab.experiments import NAMES, load_experiment
from opd_lab.runner import find_plan, read_results
from opd_lab.stored import join, read_stored, rejudged, write_stored
from student.data.intervals import t_interval

_TEMPLATE = Path(__file__).parent / "results.md.jinja"


def write_report(root: Path, out: Path, *, form: str, names: Sequence[str] = NAMES) -> list[Path]:
    """Write results.md and, below results/, a PNG and a JSON for each experiment that has an arm with all replicates.

    Experiments take hours and are run on more than one machine. So an experiment that is not asked for, or that has no
    such arm in `root`, keeps the measurements in its JSON in `out`; and so do single arms, see `opd_lab.stored`.

    Args:
        root: folder of the lab.
        out: folder of the report.
        form: "full" or "quick".
        names: experiments to read from `root`, by name or file. If one of opd's own is named, the page has all of
            these; otherwise it has only the experiments named.

    Returns:
        The files written.

    Raises:
        ConfigError: when none of the experiments has been begun, so that no empty report replaces another.
        OutputError: when `out` cannot be written.
    """
    try:
        from opd_lab.plots import plot_experiment
    except ModuleNotFoundError as error:
        raise ConfigError(f"the lab's report needs the package matplotlib ({error}); install opd[lab].") from error
    listed = [*(name for name in names if name not in NAMES), *NAMES] if {*names} & {*NAMES} else names
    experiments = [load_experiment(name) for name in listed]
    asked = [one for name, one in zip(listed, experiments, strict=True) if name in names]
    started = [one for one in asked if (root / form / one.name).is_dir()]
    if not started:
        raise ConfigError(f"{root} has no runs of the {form} form; give their folder with --root.")
    folder = out / "results"
    check_writable(folder, f"--out {out}")
    folder.mkdir(parents=True, exist_ok=True)
    written, sections, missing = [], [], []
    for experiment in experiments:
        target, plot, state = folder / f"{experiment.name}.json", folder / f"{experiment.name}.png", "not run again"
        if experiment in started:
            data = join(read_results(find_plan(experiment, root, form)), read_stored(target, form))
            state = f"{data['finished_runs']} of {data['planned_runs']} runs"
            arms = [arm for arm in data["arms"] if len(arm["seeds"]) == len(data["replicates"])]
            if arms:
                write_stored(target, {**data, "arms": arms})
                plot_experiment({**data, "arms": arms}, experiment.title, plot)
                written += [target, plot]
        # The page is computed only from the files, so that a section does not change when another one is reported.
        if (stored := read_stored(target, form)) is None:
            missing.append({"experiment": experiment, "state": state})
            continue
        data = rejudged(experiment, stored)
        write_stored(target, data)
        sections.append(_section(experiment, data))
    page = out / "results.md"
    write_whole(page, _page(sections, missing, form))
    return [page, *written]


def _page(sections: Sequence[Mapping[str, Any]], missing: Sequence[Mapping[str, Any]], form: str) -> str:
    """The text of results.md: a section for each experiment that was measured, and a list of those that are missing."""
    sections = sorted(sections, key=lambda section: section["letter"])
    environment = jinja2.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        # Nearly all values are in cells of tables, which a bar would end.
        finalize=lambda value: value.replace("|", r"\|") if isinstance(value, str) else value,
    )
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    claims = [claim for section in sections for claim in section["claims"]]
    counts = {
        "judged": sum(claim["judged"] for claim in claims),
        "decided": sum(claim["judged"] and claim["outcome"] in ("holds", "does not hold") for claim in claims),
    }
    return template.render(sections=sections, missing=missing, form=form, rule=RULE, **counts)


def _section(experiment: Experiment, data: Mapping[str, Any]) -> dict[str, Any]:
    """The values of one experiment that the template shows."""
    names = {arm["name"] for arm in data["arms"]}
    left = [arm.title for arm in experiment.arms if arm.name not in names]
    return {
        "name": experiment.name,
        "letter": experiment.letter,
        "title": experiment.title,
        "question": experiment.question,
        "note": experiment.note,
        "decision": experiment.decision,
        "changes": experiment.changes,
        "finished": data["finished_runs"],
        "planned": data["planned_runs"],
        "left": left,
        "replicates": len(data["replicates"]),
        "worlds": ", ".join(f"{world['name']} {seed} ({world['key'][:8]})" for seed, world in data["worlds"].items()),
        "teachers": ", ".join(f"{name} {found['seconds']:.0f} s" for name, found in data["teachers"].items()),
        "models": [_model(name, found) for name, found in data["models"].items() if found],
        "premises": [_premise(premise) for premise in data["premises"]],
        "arms": [_arm(arm) for arm in data["arms"]],
        "modes": _modes(data),
        "domains": _domains(data),
        "metrics": _metrics(data),
        "claims": [_claim(claim) for claim in data["claims"] if claim["outcome"] != "incomplete"],
    }


def _premise(premise: Mapping[str, Any]) -> dict[str, str]:
    numbers = "; ".join(f"world {world}: {text}" for world, text in premise["numbers"].items())
    return {"text": premise["text"], "state": "present" if premise["present"] else "absent", "numbers": numbers}


def _levels(levels: Sequence[Mapping[str, float] | None]) -> dict[str, str]:
    found = [level for level in levels if level is not None]
    return {
        "accuracy": _interval([level["accuracy"] for level in found], 3),
        **{name: _mean([level[name] for level in found]) for name in ("greedy", "pass8", "pass64")},
    }


def _model(name: str, found: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    return {"title": _model_title(name), **_levels(list(found.values()))}


def _modes(data: Mapping[str, Any]) -> list[dict[str, str]]:
    """Rows with accuracy and tokens of each mode, and the figures across modes; empty without modes."""
    levels = {_model_title(name): list(found.values()) for name, found in data["models"].items()}
    levels |= {arm["title"]: [seed["level"] for seed in arm["seeds"] if seed["level"]] for arm in data["arms"]}
    rows = []
    for title, found in levels.items():
        figures = [level["modes"] for level in found]
        names = [key.removeprefix("tokens/") for key in (figures[0] if figures else {}) if key.startswith("tokens/")]

        def mean(name: str, digits: int = 3, figures: Sequence[Mapping[str, float]] = figures) -> str:
            values = [one[name] for one in figures if name in one]
            return f"{sum(values) / len(values):.{digits}f}" if values else ""

        if names:
            modes = ", ".join(f"{name} {mean(f'accuracy/{name}')} in {mean(f'tokens/{name}', 1)}" for name in names)
            rows.append(
                {"title": title, "modes": modes, "monotone": mean("monotone"), "hypervolume": mean("hypervolume")}
            )
    return rows


def _domains(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows with the accuracy on each domain at temperature 1, one per model and arm; empty with fewer than two."""
    levels = {_model_title(name): list(found.values()) for name, found in data["models"].items()}
    levels |= {arm["title"]: [seed["level"] for seed in arm["seeds"] if seed["level"]] for arm in data["arms"]}
    rows = []
    for title, found in levels.items():
        figures = [level["domains"] for level in found]
        cells = {name: _mean([one[name] for one in figures if name in one]) for name in (figures[0] if figures else {})}
        if len(cells) > 1:
            rows.append({"title": title, "cells": cells})
    return rows


def _metrics(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows with the training metrics that claims are about, one per arm; empty if no claim is about any."""
    rows = []
    for arm in data["arms"]:
        found = [seed["metrics"] for seed in arm["seeds"]]
        names = list(found[0]) if found else []
        cells = {name: _mean([one[name] for one in found if one.get(name) is not None]) for name in names}
        rows.append({"title": arm["title"], "cells": cells})
    return rows if any(row["cells"] for row in rows) else []


def _model_title(name: str) -> str:
    return "each prompt's own teacher" if name == ROUTED else f"model `{name}`"


def _arm(arm: Mapping[str, Any]) -> dict[str, str]:
    curves = [Curve(**seed["curve"]) for seed in arm["seeds"]]
    totals = [seed["totals"] for seed in arm["seeds"]]
    count = len(curves)

    def mean(name: str) -> float:
        return sum(t.get(name, 0.0) for t in totals) / count

    scored = sum(mean(f"cost/{p}/{r}_positions") for p in ("train", "probe", "gate") for r in ("teacher", "reference"))
    divergences = [curve.final("reverse_kl") for curve in curves]
    return {
        "title": arm["title"],
        "rate": f"{arm['rate']:g}{_edge(arm)}",
        **_levels([seed["level"] for seed in arm["seeds"]]),
        "reverse_kl": "" if any(map(math.isnan, divergences)) else f"{sum(divergences) / count:.4f}",
        "plateau": "yes" if arm["at_plateau"] else f"no ({100 * arm['last_gain']:+.1f})",
        "tokens": _thousands(mean("cost/train/sampled_tokens") + mean("cost/train/expert_tokens")),
        "besides": _thousands(mean("cost/probe/sampled_tokens") + mean("cost/gate/sampled_tokens")),
        "drawn": _thousands(sum(seed["drawn"] for seed in arm["seeds"]) / count),
        "scored": _thousands(scored),
        "flops": f"{sum(c.flops[-1] for c in curves) / count:,.4g}",
        "cpu": f"{sum(s['cpu_seconds'] for s in arm['seeds']) / count:.0f}",
        "fired": "" if all(s["fired"] for s in arm["seeds"]) else "never fired",
    }


def _edge(arm: Mapping[str, Any]) -> str:
    """A mark for a learning rate that was not swept, or is at the edge of its sweep, so that a better one may exist."""
    rates = sorted(float(rate) for rate in arm["swept"])
    if len(rates) < 2:
        return " †"
    return " *" if arm["rate"] in (rates[0], rates[-1]) else ""


def _claim(claim: Mapping[str, Any]) -> dict[str, Any]:
    interval, numbers = claim["interval"], ""
    if interval is not None:
        kind = "ratio" if claim["ratio"] else "difference"
        pairs = ", ".join(f"{value:.3g}" for value in claim["pairs"].values())
        numbers = f"{kind} {interval['mean']:.3g} ({interval['low']:.3g} to {interval['high']:.3g}); {pairs}"
    text = f"{claim['claim']}, {claim['scope']}" if claim["scope"] else claim["claim"]
    shown = numbers or claim["why"]
    return {"text": text, "outcome": claim["outcome"], "numbers": shown, "judged": interval is not None}


def _mean(values: Sequence[float]) -> str:
    known = [value for value in values if value is not None and not math.isnan(value)]
    return f"{sum(known) / len(known):.3f}" if known else ""


def _interval(values: Sequence[float], digits: int) -> str:
    if len(values) < 2:
        return _mean(values)
    found = t_interval(values)
    return f"{found.mean:.{digits}f} ({found.low:.{digits}f} to {found.high:.{digits}f})"


def _thousands(value: float) -> str:
    return "" if value == 0 else f"{value / 1e3:,.1f}k"
