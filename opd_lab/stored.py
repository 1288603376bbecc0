"""Stores results as JSON, reads those of an earlier report, joins them with new runs, and judges the claims again.

Verdicts follow from the measurements in the file and from the claims of the experiment, so they are not stored, but
judged by the present rules whenever a page is written.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from opd.errors import DataError
from opd.files import write_whole
from opd_lab.curve import Curve
from opd_lab.evaluate import Level
from opd_lab.experiment import Experiment, Replicate
from opd_lab.premises import MeasuredPremise
from opd_lab.results import ArmResult, SeedResult
from opd_lab.runs import read_json
from opd_lab.verdicts import judge

FORMAT = 2
"""Of results.json and docs/results/*.json; raised when a change of the code reads them in another way."""

_SAME = 1e-5
"""Largest relative difference between two figures that count as equal, since stored ones are rounded."""
_SHOWN_TOTALS = ("sampled_tokens", "expert_tokens", "teacher_positions", "reference_positions")
"""The totals of a run that the page shows, below cost/PURPOSE/."""
_ALL = "all"
"""Key of a list that all replicates have, such as the steps of their evaluations."""


def write_stored(path: Path, data: Mapping[str, Any]) -> None:
    """Store what claims, page and plot read: a list over replicates for each figure, of which most lines are made."""
    stored = {name: value for name, value in data.items() if name != "claims"}
    stored["arms"] = [{**arm, "seeds": _column([_shown(seed) for seed in arm["seeds"]])} for arm in data["arms"]]
    stored["models"] = {
        model: _column([{"replicate": name, **level} for name, level in levels.items()])
        for model, levels in data["models"].items()
    }
    write_whole(path, json.dumps(_rounded(stored), separators=(",", ":")) + "\n")


def _shown(seed: Mapping[str, Any]) -> dict[str, Any]:
    totals = {name: value for name, value in seed["totals"].items() if name.rpartition("/")[2] in _SHOWN_TOTALS}
    return {**seed, "totals": totals}


def _column(cells: Sequence[Any]) -> Any:
    """Values of one figure over replicates; mappings with the same keys become a mapping of columns."""
    if not cells:
        return []
    first = cells[0]
    if all(isinstance(cell, Mapping) and cell.keys() == first.keys() for cell in cells):
        return {key: _column([cell[key] for cell in cells]) for key in first}
    return {_ALL: first} if isinstance(first, list) and all(cell == first for cell in cells) else list(cells)


def _cells(column: Any, count: int) -> list[Any]:
    """The values that `_column` was given."""
    if isinstance(column, list):
        return column
    if _ALL in column:
        return [column[_ALL]] * count
    parts = {key: _cells(part, count) for key, part in column.items()}
    return [{key: part[i] for key, part in parts.items()} for i in range(count)]


def _by_replicate(columns: Any) -> list[dict[str, Any]]:
    return _cells(columns, len(columns["replicate"])) if columns else []


def _rounded(node: Any) -> Any:
    """JSON values with floats rounded to six significant digits, far below the noise, and null for those not finite."""
    if isinstance(node, float):
        value = float(f"{node:.6g}") if math.isfinite(node) else None
        return int(value) if value is not None and value.is_integer() else value
    if isinstance(node, Mapping):
        return {key: _rounded(value) for key, value in node.items()}
    return [_rounded(value) for value in node] if isinstance(node, list | tuple) else node


def read_stored(path: Path, form: str) -> dict[str, Any] | None:
    """Read the results that an earlier report stored in `path`; None if the file is missing or of another form.

    Args:
        path: the file.
        form: "full" or "quick".

    Raises:
        DataError: when the file is damaged or of another format.
    """
    if not path.exists():
        return None
    data = read_json(path, "restore it, or remove it and report the runs again")
    if data.get("format") != FORMAT:
        raise DataError(
            f"{path} has format {data.get('format')}, but this version of opd reads format {FORMAT}; remove it and "
            "report the runs again."
        )
    for arm in data["arms"]:
        arm["seeds"] = _by_replicate(arm["seeds"])
        # JSON has no NaN, so what was not measured is null.
        arm["last_gain"] = math.nan if arm["last_gain"] is None else arm["last_gain"]
        for seed in arm["seeds"]:
            # But curves themselves have None for a reverse KL that was not measured, and leave it out of means.
            seed["curve"] = {
                name: values if name == "reverse_kl" else [math.nan if x is None else x for x in values]
                for name, values in seed["curve"].items()
            }
    data["models"] = {
        model: {level.pop("replicate"): level for level in _by_replicate(levels)}
        for model, levels in data["models"].items()
    }
    return data if data["form"] == form else None


def join(data: Mapping[str, Any], earlier: Mapping[str, Any] | None) -> dict[str, Any]:
    """Add to the results of one machine the arms, premises and evaluated models that only an earlier report has.

    This is done only if worlds and replicates are the same, and every run that both have has the same figures, because
    then the other runs would give the same figures here too. Otherwise `data` is returned unchanged. An arm is taken
    from the earlier report if it has all replicates there but not here.
    """
    if earlier is None or earlier["worlds"] != data["worlds"] or earlier["replicates"] != data["replicates"]:
        return dict(data)
    known = {arm["name"]: arm for arm in earlier["arms"]}
    whole = len(data["replicates"])
    arms = []
    for arm in data["arms"]:
        other = known.get(arm["name"])
        if other is not None and not _agree(arm, other):
            return dict(data)
        missing = len(arm["seeds"]) < whole
        arms.append(other if missing and other is not None and len(other["seeds"]) == whole else arm)
    measured = {premise["name"] for premise in data["premises"]}
    return {
        **data,
        "arms": arms,
        "finished_runs": sum(len(arm["seeds"]) for arm in arms),
        "premises": [*data["premises"], *(one for one in earlier["premises"] if one["name"] not in measured)],
        "models": {name: earlier["models"].get(name, {}) | found for name, found in data["models"].items()},
    }


def _agree(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two results of an arm have the same learning rate, and equal levels in the replicates that both have."""
    theirs = {seed["replicate"]: seed["level"] for seed in other["seeds"]}
    pairs = [(seed["level"], theirs[seed["replicate"]]) for seed in one["seeds"] if seed["replicate"] in theirs]
    same = all(
        math.isclose(mine[name], level[name], rel_tol=_SAME)
        for mine, level in pairs
        if mine is not None and level is not None
        for name in ("accuracy", "greedy")
    )
    return same and (not one["seeds"] or one["rate"] == other["rate"])


def rejudged(experiment: Experiment, data: Mapping[str, Any]) -> dict[str, Any]:
    """Stored results with plateaus and verdicts by the present rules, without premises that the experiment dropped.

    Args:
        experiment: the experiment with the claims; those about arms that are not stored are incomplete.
        data: results from `read_stored`.
    """
    replicates = [_replicate(name) for name in data["replicates"]]
    arms = [_arm(arm) for arm in data["arms"]]
    missing = [ArmResult(arm.name, arm.title, 0.0) for arm in experiment.arms if arm.name not in {a.name for a in arms}]
    models = {
        name: {_replicate(key): _level(level) for key, level in found.items()} for name, found in data["models"].items()
    }
    # Matched by text too, because the text states the bound, and a premise with another bound was judged by that one.
    known = {(premise.name, premise.text) for premise in experiment.premises}
    kept = [premise for premise in data["premises"] if (premise["name"], premise["text"]) in known]
    premises = [MeasuredPremise(**premise) for premise in kept]
    claims = [asdict(judge(claim, [*arms, *missing], models, replicates, premises)) for claim in experiment.claims]
    plateaus = [{**stored, "at_plateau": arm.at_plateau} for stored, arm in zip(data["arms"], arms, strict=True)]
    return {**data, "arms": plateaus, "premises": kept, "claims": claims}


def _arm(data: Mapping[str, Any]) -> ArmResult:
    return ArmResult(data["name"], data["title"], data["rate"], data["swept"], [_seed(seed) for seed in data["seeds"]])


def _seed(data: Mapping[str, Any]) -> SeedResult:
    kept = {name: value for name, value in data.items() if name not in ("replicate", "curve", "level", "metrics")}
    level = None if data["level"] is None else _level(data["level"])
    metrics = {name: math.nan if value is None else value for name, value in data["metrics"].items()}
    return SeedResult(_replicate(data["replicate"]), Curve(**data["curve"]), level=level, metrics=metrics, **kept)


def _level(data: Mapping[str, Any]) -> Level:
    known: dict[str, Any] = {name: math.nan if value is None else value for name, value in data.items()}
    return Level(**known)


def _replicate(name: str) -> Replicate:
    world, _, seed = name.removeprefix("w").partition("-s")
    return Replicate(int(world), int(seed))
