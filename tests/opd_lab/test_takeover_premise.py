"""What a teacher wins when it takes over, in houses: which episodes count, and what is said of them."""

from pathlib import Path
from random import Random

import pytest

from opd.config import parse_settings
from opd.tasks.environments import ENVIRONMENTS
from opd.tasks.prompt import Prompt
from opd_lab.experiments import load_experiment
from opd_lab.plan import ExperimentPlan
from opd_lab.takeover_premise import measure, winnable
from opd_lab.tiny.summary import read_summary
from opd_lab.world import WorldModels


@pytest.fixture
def house() -> Prompt:
    cls = ENVIRONMENTS.load("rooms")
    return cls(parse_settings(cls.Options, {"depth": 10, "turns": 14, "words": "terse"})).draw(Random(0))


def test_a_house_can_be_won_while_turns_are_left_for_the_shortest_way(house: Prompt) -> None:
    path = house.extra["path"]
    assert winnable(house, []) and winnable(house, path[:9])
    assert winnable(house, ["x"] * 4) and not winnable(house, ["x"] * 5)
    assert not winnable(house, path)  # won already
    back = {"n": "s", "s": "n", "e": "w", "w": "e"}
    there = next(command for command in path if command[0] == "g")
    out_and_back = [*path[: path.index(there)], there, f"g{back[there[1]]}", there]
    assert winnable(house, out_and_back) and winnable(house, [*out_and_back, "x", "x"])
    assert not winnable(house, [*out_and_back, "x", "x", "x"])


def test_a_teacher_that_knows_nothing_is_found_out_wherever_it_takes_over(world: Path, tmp_path: Path) -> None:
    summary = read_summary(world)
    assert summary is not None
    models = {0: WorldModels(summary, "quick")}
    plan = ExperimentPlan(load_experiment("rooms"), "quick", tmp_path, models, ())
    found = measure(plan, 0, teacher="teacher", kept=0.5, prompts=4, depths=(0, 3), astray="side rooms")
    assert not found.present
    assert "teacher wins 0.00 [0.00, 0.49] of 4 after 0 turns, 0.00 [0.00, 0.49] of 4 after 3 turns" in found.numbers
    assert "nats by turn on gold states" in found.numbers and "on own states" in found.numbers
