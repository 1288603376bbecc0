"""Several runs on one page: state, differences of the recipes, curves over each other, answers side by side."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from opd.config.text import flatten
from opd.files import write_out
from student.report.page.chart import lines
from student.report.page.page import cut, exchanges, made, plain, template
from student.report.page.read import SAMPLES, read_run
from student.report.runs import names_of, overview
from student.run.progress import now
from student.run.reading import read_records

_CHARTS, _KEYS, _WIDTH = 40, 200, 300
_OWN = ("run", "metrics_port")
"""Keys of a recipe in which every two runs differ."""


def differences(recipes: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The dotted keys in which recipes differ, with the value of each; None where one lacks the key."""
    flat = [flatten(recipe) for recipe in recipes]
    keys = sorted({key for one in flat for key in one} - {*_OWN})
    values = {key: [one.get(key) for one in flat] for key in keys}
    return {key: held for key, held in values.items() if any(value != held[0] for value in held)}


def write_beside(
    runs: Sequence[Path], figures: Sequence[Mapping[str, float]], problems: Sequence[str], out: Path
) -> None:
    """Write the page of several runs.

    Args:
        runs: their folders.
        figures: those of `student.report.compare`, of each run.
        problems: sentences that the page shows first.
        out: the page.
    """
    names, said = names_of(runs), list(problems)
    data = [read_run(run) for run in runs]
    charts = [(chart, made(partial(lines, chart), chart["title"], said)) for chart in _charts(names, data)]
    recipes = differences([one["recipe"] for one in data])
    answered = exchanges(_latest(runs, names))
    text = template("compare").render(
        names=names,
        written=now(),
        problems=said,
        runs=[{**overview(run), "name": name} for run, name in zip(runs, names, strict=True)],
        recipes=[(key, [cut(plain(value), _WIDTH) for value in held]) for key, held in list(recipes.items())[:_KEYS]],
        charts=charts,
        exchanges=[one for one in answered if len(one["answers"]) > 1][:SAMPLES],
        figures=[(name, [one.get(name) for one in figures]) for name in dict.fromkeys(k for f in figures for k in f)],
    )
    write_out(out, text)


def _charts(names: Sequence[str], data: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A chart for each curve that a run has, with a line for each run."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for index, (name, one) in enumerate(zip(names, data, strict=True)):
        for chart in one["curves"]:
            for series in chart["series"]:
                title = chart["title"] if len(chart["series"]) == 1 else f"{chart['title']}: {series['name']}"
                held = {"title": title, "unit": chart["unit"], "series": []}
                drawn = found.setdefault((chart["title"], series["name"]), held)
                drawn["series"].append({**series, "name": name, "colour": index})
    first = {name: place for place, name in enumerate(("eval/accuracy", "eval/reverse_kl"))}
    return [found[key] for key in sorted(found, key=lambda key: first.get(key[1], len(first)))][:_CHARTS]


def _latest(runs: Sequence[Path], names: Sequence[str]) -> list[dict[str, Any]]:
    """The answers of each run's latest evaluation, under the run's name."""
    found = []
    for run, name in zip(runs, names, strict=True):
        samples = [one for one in read_records(run / "samples.jsonl", []) if one.get("label") != "train"]
        last = samples[-1].get("label") if samples else None
        found += [{**one, "label": name} for one in samples if one.get("label") == last]
    return found
