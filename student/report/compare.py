"""`opd compare`: the figures of a run next to those of others, or to what was expected of it.

    tokens_per_second, payload_bytes_per_token, step_seconds, seconds/STAGE
                            medians over steps without the first two, which warm up
    response_tokens         total over all steps; compare accuracies only between runs in which it is about equal
    eval/accuracy@STEP, eval/reverse_kl@STEP
                            at each evaluation; @0 is before training
    accuracy_gained         accuracy of the last evaluation minus that of the first
    reverse_kl_left         reverse KL of the last evaluation divided by that of the first

`student.report.expected` describes files of expected figures.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from opd.errors import ConfigError, RunFolderError
from opd.printable import echo
from student.report.expected import Line, against_expected, write_expected
from student.run.reading import group, is_number, read_mapping, read_steps

_WARM_UP = 2
_METRICS = ("tokens_per_second", "payload_bytes_per_token")
_EVALUATED = ("accuracy", "reverse_kl")


def figures(run: Path, problems: list[str]) -> dict[str, float]:
    """The figures of a run, finished or not; see the module docstring.

    Args:
        run: the run folder.
        problems: receives a sentence about each damaged file.

    Raises:
        RunFolderError: if there is no run, or it has not finished a step.
    """
    if not (run / "metrics.jsonl").is_file():
        raise RunFolderError(f"{run} has no metrics.jsonl; name the folder of a run that has finished a step.")
    found_wrong: list[str] = []
    records = read_steps(run, found_wrong)
    steps = [record for record in records if record["step"]]
    ends = read_mapping(run / "summary.json", found_wrong, needed=False)
    problems += [f"{run.name}: {problem}" for problem in found_wrong]
    if not steps:
        raise RunFolderError(f"{run} has not finished a step yet; wait for one.")
    warm = steps[_WARM_UP:] or steps
    found = {name: _median([r[name] for r in warm if is_number(r.get(name))]) for name in _METRICS}
    stages = sorted({stage for record in warm for stage in record.get("seconds", {})})
    for stage in stages:
        found[f"seconds/{stage}"] = _median([record.get("seconds", {}).get(stage, 0.0) for record in warm])
    found["step_seconds"] = _median([_step_seconds(record) for record in warm if "seconds" in record])
    tokens = [record["response_tokens"] for record in records if is_number(record.get("response_tokens"))]
    found["response_tokens"] = float(sum(tokens)) if tokens else math.nan
    evaluations = {name: _evaluations(records, ends, name) for name in _EVALUATED}
    for name, values in evaluations.items():
        found |= {f"eval/{name}@{step}": value for step, value in values.items()}
    accuracy, divergence = (list(values.values()) for values in evaluations.values())
    if len(accuracy) > 1:
        found["accuracy_gained"] = accuracy[-1] - accuracy[0]
    if len(divergence) > 1 and divergence[0] > 0:
        found["reverse_kl_left"] = divergence[-1] / divergence[0]
    return {name: value for name, value in found.items() if not math.isnan(value)}


def _step_seconds(record: Mapping[str, Any]) -> float:
    return sum(value for stage, value in record.get("seconds", {}).items() if stage != "evaluate")


def _evaluations(records: Sequence[Mapping[str, Any]], ends: Mapping[str, Any], name: str) -> dict[int, float]:
    """Values by step, from the first evaluation to the last."""
    found = [(0, group(ends, "before").get(name))]
    found += [(int(record["step"]), record.get(f"eval/{name}")) for record in records]
    found.append((int(records[-1]["step"]), group(ends, "after").get(name)))
    return {step: float(value) for step, value in found if is_number(value)}


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def against_runs(found: Mapping[str, float], others: Sequence[Mapping[str, float]]) -> list[Line]:
    """All figures of all runs, with the ratio of the first run's figure to each other run's."""
    names = dict.fromkeys(name for figures in (found, *others) for name in figures)
    return [Line(name, found.get(name), tuple(_beside(found.get(name), o.get(name)) for o in others)) for name in names]


def _beside(value: float | None, theirs: float | None) -> str:
    ratio = f" (ratio {value / theirs:.3g})" if value is not None and theirs else ""
    return "" if theirs is None else f"{theirs:.4g}{ratio}"


def compare(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    others: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN...|EXPECTED.json]", help="Other run folders, or one file of expected figures."),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option("--write", help="Write RUN's figures to this file, as the expected figures of later runs."),
    ] = None,
    band: Annotated[
        float | None,
        typer.Option(
            "--band", min=0, help="With --write: share of a figure by which a later run may differ. Default: 0.2."
        ),
    ] = None,
) -> None:
    """Compare speed, traffic, step times, KL and accuracy of a run with other runs or with expected figures.

    With a file of expected figures, the exit code is 1 if one of them is outside its band or missing.
    """
    from opd.console import Console, Table

    if band is not None and write is None:
        raise ConfigError("--band sets the bands that --write FILE writes; add --write, or remove --band.")
    others = others or []
    files = [other for other in others if other.is_file()]
    if files and len(others) > 1:
        raise ConfigError(
            f"{files[0]} is a file of expected figures, which one run is compared with; name it alone, without other "
            "runs."
        )
    problems: list[str] = []
    found = figures(run, problems)
    if files:
        lines = against_expected(found, files[0])
    else:
        lines = against_runs(found, [figures(other, problems) for other in others])
    table = Table(box=None, pad_edge=False)
    for heading in ("figure", run.name, *(other.name for other in others), ""):
        table.add_column(heading)
    for line in lines:
        value = "none" if line.value is None else f"{line.value:.4g}"
        table.add_row(line.name, value, *line.beside, line.verdict)
    Console().print(table)
    for problem in problems:
        echo(problem, err=True)
    if write is not None:
        share = 0.2 if band is None else band
        judged = write_expected(found, write, band=share, about=f"run {run}", source=_source(run))
        rest = f"; {len(found) - judged} are too small for a band" if judged < len(found) else ""
        echo(f"{write}: {judged} figures with a band of {share:.0%} either way{rest}")
    if any(line.bad for line in lines):
        raise typer.Exit(1)


def _source(run: Path) -> str:
    """The source of measured figures: the run, with the versions recorded in its folder."""
    versions = group(read_mapping(run / "provenance.json", []), "packages")
    named = [f"{name} {versions[name]}" for name in ("opd", "torch") if versions.get(name)]
    return ", ".join([f"measured by run {run.name}", *named])
