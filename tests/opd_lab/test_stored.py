"""Results stored by an earlier report are judged anew, and joined with runs made elsewhere."""

import json
import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opd.errors import DataError
from opd_lab.experiment import Arm, Claim, Experiment, Premise
from opd_lab.stored import FORMAT, join, read_stored, rejudged, write_stored

NAMES = ["w0-s10", "w1-s10", "w0-s11", "w1-s11", "w0-s12"]
EXPERIMENT = Experiment(
    "e",
    "x",
    "",
    "",
    (),
    {},
    (),
    (Arm("a", "A"), Arm("b", "B"), Arm("c", "C")),
    (Claim("a beats b", "a", "b", "accuracy"), Claim("a beats c", "a", "c", "accuracy")),
)


def stored_arm(name: str, level: float, count: int = 5, fall: float = 0.0) -> dict[str, Any]:
    curve = {
        "steps": list(range(7)),
        "tokens": [100.0 * i for i in range(7)],
        "flops": [1.0 * i for i in range(7)],
        "accuracy": [0.0, *[level + fall] * 3, *[level] * 3],
        "reverse_kl": [None] * 7,
    }
    seeds = [
        {
            "replicate": replicate,
            "curve": curve,
            "totals": {},
            "cpu_seconds": 1.0,
            "fired": True,
            "level": {"accuracy": level + 0.01 * i, "greedy": level, "pass8": None, "pass64": None, "modes": {}},
            "drawn": 0.0,
            "metrics": {},
        }
        for i, replicate in enumerate(NAMES[:count])
    ]
    # What another rule said of the end: a fall was a plateau.
    return {
        "name": name,
        "title": name,
        "rate": 1e-3,
        "swept": {},
        "seeds": seeds,
        "last_gain": -fall,
        "at_plateau": True,
    }


def stored(*arms: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "form": "full",
        "worlds": {"0": {"name": "w", "key": "k"}},
        "replicates": NAMES,
        "models": {},
        "premises": [],
        "claims": [],
        "arms": list(arms),
        "finished_runs": 0,
    }


def test_verdicts_and_plateaus_follow_from_the_measurements_by_todays_rules() -> None:
    found = rejudged(EXPERIMENT, stored(stored_arm("a", 0.5, fall=0.1), stored_arm("b", 0.3)))
    first, second = found["claims"]
    assert (first["outcome"], first["scope"]) == ("holds", "at 1k tokens")
    assert second["outcome"] == "incomplete", "arm c is not stored"
    assert [arm["at_plateau"] for arm in found["arms"]] == [False, True]


def test_results_of_another_format_or_damaged_are_refused_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for found, said in (
        ("99", f"has format 99, but .* reads format {FORMAT}; remove it"),
        ("null", "has format None"),
        ("", "is damaged"),
    ):
        path.write_text(json.dumps(stored()).replace(f'"format": {FORMAT}', f'"format": {found}'))
        with pytest.raises(DataError, match=rf"a\.json {said}"):
            read_stored(path, "full")
    assert read_stored(tmp_path / "missing.json", "full") is None


def test_what_is_stored_is_read_back_without_what_only_the_runs_need(tmp_path: Path) -> None:
    arm = stored_arm("a", 0.512345678)
    arm["seeds"][0]["level"]["greedy"] = math.nan
    shown = {"cost/train/sampled_tokens": 9, "cost/probe/teacher_positions": 3}
    for seed in arm["seeds"]:
        seed["totals"] = {**shown, "cost/train/decoded_positions": 12}
    levels = {name: {"accuracy": 0.1 * i, "modes": {"tokens/long": 1.5}} for i, name in enumerate(NAMES[:3])}
    write_stored(tmp_path / "a.json", {**stored(arm), "models": {"teacher": levels, "base": {}}, "claims": ["judged"]})
    found = read_stored(tmp_path / "a.json", "full")
    assert found is not None and "claims" not in found
    assert found["models"] == {"teacher": levels, "base": {}}
    seeds = found["arms"][0]["seeds"]
    assert [seed["replicate"] for seed in seeds] == NAMES and all(seed["totals"] == shown for seed in seeds)
    assert seeds[0]["level"]["greedy"] is None and seeds[1]["level"]["accuracy"] == 0.522346, "six digits"
    assert all(seed["curve"]["steps"] == list(range(7)) for seed in seeds)
    assert (tmp_path / "a.json").read_text().count("[0,1,2,3,4,5,6]") == 2, "steps and flops, once for all replicates"


def test_premises_that_the_experiment_no_longer_has_leave_the_page() -> None:
    premise = {"name": "dry", "text": "at most a tenth", "present": False, "numbers": {}}
    other = {**premise, "text": "at most a fifth"}
    data = {**stored(), "premises": [premise]}
    assert rejudged(EXPERIMENT, data)["premises"] == []
    of_now = replace(EXPERIMENT, premises=(Premise("dry", "at most a tenth", "module:function"),))
    assert rejudged(of_now, data)["premises"] == [premise]
    assert rejudged(of_now, {**data, "premises": [other]})["premises"] == [], "its bound was another one"


def test_arms_that_are_whole_elsewhere_are_kept_where_the_runs_that_both_have_agree() -> None:
    earlier = stored(stored_arm("a", 0.5), stored_arm("b", 0.3))
    here = stored(stored_arm("a", 0.5, count=2), stored_arm("b", 0.3, count=0), stored_arm("c", 0.4))
    joined = join(here, earlier)
    assert [len(arm["seeds"]) for arm in joined["arms"]] == [5, 5, 5] and joined["finished_runs"] == 15


def test_premises_and_models_that_were_measured_elsewhere_are_kept_and_those_of_here_go_first() -> None:
    wet, dry = ({"name": "weather", "sentence": "it rains", "present": p, "measured": []} for p in (True, False))
    earlier, here = stored(stored_arm("a", 0.5)), stored(stored_arm("a", 0.5))
    earlier |= {"premises": [wet, {**wet, "name": "wind"}], "models": {"teacher": {NAMES[0]: 1, NAMES[1]: 2}}}
    here |= {"premises": [dry], "models": {"teacher": {NAMES[1]: 3}}}
    joined = join(here, earlier)
    assert joined["premises"] == [dry, {**wet, "name": "wind"}]
    assert joined["models"] == {"teacher": {NAMES[0]: 1, NAMES[1]: 3}}


def test_nothing_is_joined_where_a_run_a_rate_or_a_world_differs() -> None:
    earlier = stored(stored_arm("a", 0.5), stored_arm("b", 0.3))
    here = stored(stored_arm("a", 0.5, count=2), stored_arm("b", 0.3, count=0))
    other_run, other_rate, other_world = deepcopy(here), deepcopy(here), deepcopy(here)
    other_run["arms"][0]["seeds"][1]["level"]["accuracy"] += 0.001
    other_rate["arms"][0]["rate"] = 2e-3
    other_world["worlds"]["0"]["key"] = "another"
    for data in (other_run, other_rate, other_world):
        assert join(data, earlier) == data
    assert join(here, None) == here
