"""`opd reproduce RUN`: reruns a run from its own folder and says whether the result is the same."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from opd.config import load_settings
from opd.errors import RunFolderError
from opd.printable import echo
from student.run.reading import group, read_mapping, read_steps
from student.settings.recipe import Recipe


def is_timed(name: str) -> bool:
    """Whether a metric depends on the machine rather than on the run, such as speeds, times and waits."""
    return name in ("tokens_per_second", "scored_while_learning") or name.endswith("seconds")


def first_difference(
    one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]
) -> tuple[int, str, Any, Any] | None:
    """Step, metric and both values of the first difference; None if all metrics except times are bit-identical.

    A run that ended early is compared as far as it got.
    """
    for left, right in zip(one, other, strict=False):
        for name in sorted(left.keys() | right.keys()):
            if not is_timed(name) and not _same(left.get(name), right.get(name)):
                return int(left["step"]), name, left.get(name), right.get(name)
    if len(one) > len(other):
        return int(one[len(other)]["step"]), "step", one[len(other)]["step"], None
    return None


def _same(one: Any, other: Any) -> bool:
    nothing = all(isinstance(value, float) and math.isnan(value) for value in (one, other))
    return nothing or bool(one == other)


def changed_versions(run: Path, again: Path) -> list[str]:
    """A line for each package, code revision and teacher that differs from the first run."""
    found = []
    before, now = (_provenance(path) for path in (run, again))
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            found.append(f"{name}: {before.get(name)} then, {now.get(name)} now")
    return found


def _provenance(run: Path) -> dict[str, Any]:
    held = read_mapping(run / "provenance.json", [])
    flat = {"python": held.get("python"), "code": held.get("git_revision")}
    for kind in ("packages", "fleet"):
        flat |= {f"{kind}.{name}": json.dumps(value) for name, value in group(held, kind).items()}
    return flat


def reproduce(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[dotted.key=value ...]",
            help="Replace keys of the recipe, for example the teachers' current endpoints.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the new run. Default: RUN-again.")] = None,
) -> None:
    """Run the recipe of a run folder again and compare every metric of every step.

    On a CPU, with teachers served with --deterministic, equal means bit-identical. If there is a difference, it is
    named after a list of what has changed since (packages, code, teachers' weights), and the exit code is 1.
    """
    if not (run / "recipe.yaml").is_file():
        raise RunFolderError(f"{run} is not a run folder: it has no recipe.yaml.")
    if any(run.glob("recipe-until-*.yaml")):
        raise RunFolderError(f"{run} was resumed with another recipe, so one recipe cannot reproduce it.")
    before = read_steps(run, [])
    if not before or not before[-1]["step"]:
        raise RunFolderError(f"{run} has not finished a step, so there is nothing to compare a new run with.")
    # Another folder, and no metrics port, which the first run may still hold; neither affects the result.
    again = out or run.with_name(f"{run.name}-again")
    if again.exists():
        raise RunFolderError(f"{again} exists already; name another folder for the new run with --out.")
    recipe = load_settings(Recipe, run / "recipe.yaml", [f"run={again}", "metrics_port=0", *(overrides or ())])
    # Imported after all checks, because importing torch takes seconds.
    from student.job.session import train

    train(recipe)
    for line in changed_versions(run, again):
        echo(f"changed: {line}")
    now = read_steps(again, [])
    difference = first_difference(before, now)
    if difference is None:
        steps, all_steps = (int(records[-1]["step"]) for records in (before, now))
        rest = f"; {run} ended there, {again} went on to {all_steps}" if all_steps > steps else ""
        echo(f"reproduced: in {steps} steps every metric is equal to the bit{rest}")
        return
    step, name, old, new = difference
    echo(f"differs from step {step} on: {name} was {old} and is {new}; both runs: {run}, {again}")
    raise typer.Exit(1)
