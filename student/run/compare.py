"""`opd compare`: the figures of a run next to those of others, or to what was expected of it.

A file of expectations is JSON:

    {"about": "one 24 GB GPU ...",
     "expected": {"payload_bytes_per_token": {"low": 180, "high": 200, "source": "docs/performance.md"},
                  "tokens_per_second":       {"source": "unknown"},
                  "eval/accuracy@100":       {"low": 0.5, "source": "..."}}}

A figure without low and high is printed and not judged. Figures are tokens_per_second, payload_bytes_per_token,
step_seconds and seconds/STAGE (medians over steps, the first two left out: they warm up), and accuracy and reverse KL
at each evaluation as eval/accuracy@STEP and eval/reverse_kl@STEP, where @0 is before training.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from opd.errors import ConfigError, RunFolderError
from student.run.reading import group, is_number, read_mapping, read_steps

_WARM_UP = 2
_METRICS = ("tokens_per_second", "payload_bytes_per_token")
_EVALUATED = ("accuracy", "reverse_kl")


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of a comparison.

    Attributes:
        name: the figure's.
        value: of the run; None where it has none.
        beside: of each other run, or the band in words.
        verdict: "within", "below", "above", "missing", or "" where nothing is judged.
    """

    name: str
    value: float | None
    beside: tuple[str, ...]
    verdict: str = ""

    @property
    def bad(self) -> bool:
        """Whether the figure is outside its band, or not there."""
        return self.verdict in ("below", "above", "missing")


def figures(run: Path, problems: list[str]) -> dict[str, float]:
    """The figures of a run, finished or not; see the module.

    Args:
        run: the run folder.
        problems: gets a sentence about each file that is damaged.

    Raises:
        RunFolderError: when there is no run, or it has done no step.
    """
    if not (run / "metrics.jsonl").is_file():
        raise RunFolderError(f"{run} holds no metrics.jsonl; give the folder of a run that has done a step.")
    found_wrong: list[str] = []
    records = read_steps(run, found_wrong)
    ends = read_mapping(run / "summary.json", found_wrong, needed=False)
    problems += [f"{run.name}: {problem}" for problem in found_wrong]
    if not records:
        raise RunFolderError(f"{run} holds no whole step yet; wait for one.")
    warm = records[_WARM_UP:] or records
    found = {name: _median([r[name] for r in warm if is_number(r.get(name))]) for name in _METRICS}
    stages = sorted({stage for record in warm for stage in record.get("seconds", {})})
    for stage in stages:
        found[f"seconds/{stage}"] = _median([record.get("seconds", {}).get(stage, 0.0) for record in warm])
    found["step_seconds"] = _median([_step_seconds(record) for record in warm if "seconds" in record])
    for name in _EVALUATED:
        for step, value in _evaluations(records, ends, name):
            found[f"eval/{name}@{step}"] = value
    return {name: value for name, value in found.items() if not math.isnan(value)}


def _step_seconds(record: Mapping[str, Any]) -> float:
    return sum(value for stage, value in record.get("seconds", {}).items() if stage != "evaluate")


def _evaluations(records: Sequence[Mapping[str, Any]], ends: Mapping[str, Any], name: str) -> list[tuple[int, float]]:
    found = [(0, group(ends, "before").get(name))]
    found += [(int(record["step"]), record.get(f"eval/{name}")) for record in records]
    found.append((int(records[-1]["step"]), group(ends, "after").get(name)))
    return [(step, float(value)) for step, value in found if is_number(value)]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def against_expected(found: Mapping[str, float], path: Path) -> list[Line]:
    """The figures that a file names, judged by its bands.

    Raises:
        ConfigError: for a file that does not have the form of the module.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        bands: dict[str, Any] = data["expected"]
        return [_judged(name, found.get(name), dict(band)) for name, band in bands.items()]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; check the path.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not a file of expectations ({type(error).__name__}: {error}); it needs the key expected with a "
            "group of low, high and source per figure."
        ) from error


def _judged(name: str, value: float | None, band: Mapping[str, Any]) -> Line:
    low, high, source = band.get("low"), band.get("high"), str(band["source"])
    if low is None and high is None:
        return Line(name, value, (f"not known ({source})",))
    words = f"{'' if low is None else f'{low:g}'} to {'' if high is None else f'{high:g}'} ({source})"
    if value is None:
        return Line(name, value, (words,), "missing")
    below, above = low is not None and value < low, high is not None and value > high
    return Line(name, value, (words,), "below" if below else "above" if above else "within")


def against_runs(found: Mapping[str, float], others: Sequence[Mapping[str, float]]) -> list[Line]:
    """All figures of all runs, with the ratio of the first run's to each other's."""
    names = dict.fromkeys(name for figures in (found, *others) for name in figures)
    return [Line(name, found.get(name), tuple(_beside(found.get(name), o.get(name)) for o in others)) for name in names]


def _beside(value: float | None, theirs: float | None) -> str:
    ratio = f" (ratio {value / theirs:.3g})" if value is not None and theirs else ""
    return "" if theirs is None else f"{theirs:.4g}{ratio}"


def compare(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    others: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...|EXPECTED.json", help="Other run folders, or a file of expected figures."),
    ],
) -> None:
    """Show speed, traffic, step times, KL and accuracy of a run beside those of others, or beside expected ones.

    With a file of expected figures the exit code is 1 when one of them is outside its band or missing.
    """
    from rich.console import Console
    from rich.table import Table

    files = [other for other in others if other.is_file()]
    if files and len(others) > 1:
        raise ConfigError(f"{files[0]} is a file of expectations, which one run is held to; compare it by itself.")
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
        typer.echo(problem, err=True)
    if any(line.bad for line in lines):
        raise typer.Exit(1)
