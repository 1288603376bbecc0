"""Measures what methods assume about teacher and student, before any arm runs; reports show it above the table."""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opd.files import write_whole
from opd_lab.experiment import Arm, Premise, Replicate
from opd_lab.plan import ExperimentPlan
from opd_lab.runs import content_key, lasting, read_json


@dataclass(frozen=True, slots=True)
class MeasuredPremise:
    """A measured premise.

    Attributes:
        name: name of the premise.
        text: what must be true.
        present: whether it is true in every world.
        numbers: the measurements in words, by world seed.
    """

    name: str
    text: str
    present: bool
    numbers: dict[str, str]


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a premise's function for one world: whether the premise is present, and the numbers in words."""

    present: bool
    numbers: str


Measure = Callable[..., Measured]
"""Called as measure(plan, world, **options)."""


def measure_premises(plan: ExperimentPlan, log: Callable[[str], None] = lambda line: None) -> list[MeasuredPremise]:
    """Measure the plan's premises in each world where that was not done yet, and return them all.

    A measurement takes a minute or two. It is kept in a file whose name depends on all that decides the result.
    """
    for premise in plan.experiment.premises:
        for world in plan.worlds:
            path = _file(plan, premise, world)
            if not path.is_file():
                module, _, name = premise.measure.partition(":")
                function: Measure = getattr(importlib.import_module(module), name)
                found = function(plan, world, **premise.options)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, json.dumps(asdict(found), indent=1) + "\n")
            found = _read(path)
            log(f"premise {premise.name} in world {world}: {'' if found.present else 'absent, '}{found.numbers}")
    return read_premises(plan)


def read_premises(plan: ExperimentPlan) -> list[MeasuredPremise]:
    """Read the premises that were measured in every world."""
    found = []
    for premise in plan.experiment.premises:
        files = {world: _file(plan, premise, world) for world in plan.worlds}
        if all(file.is_file() for file in files.values()):
            measured = {world: _read(file) for world, file in files.items()}
            numbers = {str(world): one.numbers for world, one in measured.items()}
            present = all(one.present for one in measured.values())
            found.append(MeasuredPremise(premise.name, premise.text, present, numbers))
    return found


def to_json(findings: Sequence[MeasuredPremise]) -> list[Mapping[str, Any]]:
    """Premises as JSON values."""
    return [asdict(finding) for finding in findings]


def _file(plan: ExperimentPlan, premise: Premise, world: int) -> Path:
    # The name depends on all that decides the result: measure, options, arms, recipe and world.
    recipe = lasting(plan.recipe(Arm("premise", ""), Replicate(world, world), plan.default_rate()))
    arms = [dict(arm.overrides) for arm in plan.experiment.arms if arm.name in premise.options.values()]
    parts = [premise.measure, dict(premise.options), arms, recipe, plan.models[world].world.key]
    key = content_key(plan.root, parts)[:8]
    return plan.world_folder(world) / "premises" / f"{premise.name}-{key}.json"


def _read(path: Path) -> Measured:
    data = read_json(path, "remove it and measure again")
    return Measured(bool(data["present"]), str(data["numbers"]))
