"""`opd compare`: the figures of a run next to those of others, or to what was expected of it.

    accuracy_gained         accuracy of the last evaluation minus that of the first
    reverse_kl_left         reverse KL of the last evaluation divided by that of the first
    eval/accuracy@STEP, eval/reverse_kl@STEP
                            at each evaluation; @0 is before training
    response_tokens         total over all steps; compare accuracies only between runs in which it is about equal
    tokens_per_second, payload_bytes_per_token, step_seconds, seconds/STAGE
                            medians over steps without the first two, which warm up

`student.report.expected` describes files of expected figures.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from opd.errors import ConfigError, RunFolderError
from opd.files import check_out
from opd.printable import echo
from student.report.expected import Line, against_expected, write_expected
from student.report.runs import names_of
from student.run.progress import evaluations
from student.run.reading import group, is_number, read_mapping, read_recipe, read_steps

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
    measured = evaluations(records, ends)
    by_step = {name: {step: held[name] for step, held in measured if name in held} for name in _EVALUATED}
    accuracy, divergence = (list(values.values()) for values in by_step.values())
    found: dict[str, float] = {}
    if len(accuracy) > 1:
        found["accuracy_gained"] = accuracy[-1] - accuracy[0]
    if len(divergence) > 1 and divergence[0] > 0:
        found["reverse_kl_left"] = divergence[-1] / divergence[0]
    for name, values in by_step.items():
        found |= {f"eval/{name}@{step}": value for step, value in values.items()}
    tokens = [record["response_tokens"] for record in records if is_number(record.get("response_tokens"))]
    found["response_tokens"] = float(sum(tokens)) if tokens else math.nan
    warm = steps[_WARM_UP:] or steps
    found |= {name: _median([r[name] for r in warm if is_number(r.get(name))]) for name in _METRICS}
    found["step_seconds"] = _median([_step_seconds(record) for record in warm if "seconds" in record])
    for stage in sorted({stage for record in warm for stage in record.get("seconds", {})}):
        found[f"seconds/{stage}"] = _median([record.get("seconds", {}).get(stage, 0.0) for record in warm])
    return {name: value for name, value in found.items() if not math.isnan(value)}


def _step_seconds(record: Mapping[str, Any]) -> float:
    return sum(value for stage, value in record.get("seconds", {}).items() if stage != "evaluate")


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
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the runs beside each other to this page: one file, no network.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print figures and differences of the recipes as one JSON object.")
    ] = False,
) -> None:
    """Compare speed, traffic, step times, KL and accuracy of a run with other runs or with expected figures.

    --html also shows what differs in the recipes, curves over each other and answers side by side. With a file of
    expected figures, the exit code is 1 if one of them is outside its band or missing.
    """
    if band is not None and write is None:
        raise ConfigError("--band sets the bands that --write FILE writes; add --write, or remove --band.")
    others = others or []
    files = [other for other in others if other.is_file()]
    if files and len(others) > 1:
        raise ConfigError(
            f"{files[0]} is a file of expected figures, which one run is compared with; name it alone, without other "
            "runs."
        )
    if html is not None:
        if files or not others:
            raise ConfigError("--html shows runs beside each other; name at least two run folders.")
        check_out(html)
    problems: list[str] = []
    found = [figures(one, problems) for one in (run, *(other for other in others if other not in files))]
    problems += _other_starts((run, *others), found)
    lines = against_expected(found[0], files[0]) if files else against_runs(found[0], found[1:])
    if as_json:
        _print_json((run, *others), found, lines, problems)
    else:
        _print_table((run, *others), lines, problems)
    if html is not None:
        from student.report.page.beside import write_beside

        write_beside([run, *others], found, problems, html)
        echo(f"page: {html}", err=as_json)
    if write is not None:
        share = 0.2 if band is None else band
        judged = write_expected(found[0], write, band=share, about=f"run {run}", source=_source(run))
        rest = f"; {len(found[0]) - judged} are too small for a band" if judged < len(found[0]) else ""
        echo(f"{write}: {judged} figures with a band of {share:.0%} either way{rest}", err=as_json)
    if any(line.bad for line in lines):
        raise typer.Exit(1)


def _other_starts(runs: Sequence[Path], found: Sequence[Mapping[str, float]]) -> list[str]:
    """A sentence for each figure of evaluations whose course begins at different steps in different runs."""
    said = []
    for figure in _EVALUATED:
        steps = [[int(n.partition("@")[2]) for n in one if n.startswith(f"eval/{figure}@")] for one in found]
        first = [min(held) for held in steps if held]
        if len(set(first)) > 1:
            names = ", ".join(f"{run.name} {min(held)}" for run, held in zip(runs, steps, strict=False) if held)
            said.append(f"{figure} was first evaluated at different steps ({names}), so gains do not begin alike.")
    return said


def _print_json(
    runs: Sequence[Path], found: Sequence[Mapping[str, float]], lines: Sequence[Line], problems: Sequence[str]
) -> None:
    from student.report.page.beside import differences

    folders = runs[: len(found)]
    whole = {
        "runs": [{"run": str(run), "figures": one} for run, one in zip(folders, found, strict=True)],
        "recipes": differences([read_recipe(run, []) for run in folders]),
        "verdicts": {line.name: line.verdict for line in lines if line.verdict},
        "problems": problems,
    }
    echo(json.dumps(whole, ensure_ascii=False, default=str))


def _print_table(runs: Sequence[Path], lines: Sequence[Line], problems: Sequence[str]) -> None:
    from opd.console import Console, Table

    table = Table(box=None, pad_edge=False)
    for heading in ("figure", *names_of(runs), ""):
        table.add_column(heading)
    for line in lines:
        value = "none" if line.value is None else f"{line.value:.4g}"
        table.add_row(line.name, value, *(beside or "none" for beside in line.beside), line.verdict)
    Console().print(table)
    for problem in problems:
        echo(problem, err=True)


def _source(run: Path) -> str:
    """The source of measured figures: the run, with the versions recorded in its folder."""
    versions = group(read_mapping(run / "provenance.json", []), "packages")
    named = [f"{name} {versions[name]}" for name in ("opd", "torch") if versions.get(name)]
    return ", ".join([f"measured by run {run.name}", *named])
