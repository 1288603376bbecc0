"""Hard optimisation: what is feasible, what the heuristic finds, and how an answer is scored against it."""

from itertools import permutations, product
from random import Random
from typing import get_args

import pytest

from opd.config import parse_settings
from opd_zoo.tasks.optimisation import Kind, Optimisation, heuristic, quality


def best(problem: dict) -> float:  # type: ignore[type-arg]
    size = problem["size"]
    if problem["kind"] == "tour":
        return max(quality(problem, way) for way in permutations(range(size)))
    return max(quality(problem, [i for i, on in enumerate(bits) if on]) for bits in product((0, 1), repeat=size))


@pytest.mark.parametrize("kind", get_args(Kind))
def test_the_heuristic_is_feasible_near_the_best_and_scores_one(kind: str) -> None:
    task = Optimisation(parse_settings(Optimisation.Options, {"kinds": [kind], "least": 1, "most": 1}))
    ratios = []
    for seed in range(12):
        prompt = task.draw(Random(seed))
        problem = prompt.extra["problem"]
        assert problem["size"] == 5 and prompt.extra["level"] == 1 and prompt.domain == kind
        ratios.append(prompt.extra["quality"] / best(problem))
        assert task.verify(prompt, f"[9] no: {heuristic(problem)}").value == 1.0
        assert task.verify(prompt, "[0, 0]").value == task.verify(prompt, "[7]").value == 0.0
        assert task.verify(prompt, "none").value == 0.0
    assert min(ratios) > 0.5 and max(ratios) <= 1.0


def test_a_worse_answer_earns_its_share_and_a_better_one_no_more_than_all() -> None:
    task = Optimisation(parse_settings(Optimisation.Options, {"kinds": ["knapsack"]}))
    prompt = task.draw(Random(0))
    prompt.extra["problem"].update(kind="knapsack", size=3, items=[(1, 4), (1, 2), (5, 9)], limit=5)
    prompt.extra["quality"] = quality(prompt.extra["problem"], [0, 1])
    assert [
        task.verify(prompt, text).value for text in ("[1]", "[0]", "[1, 0]", "[2]", "[0, 2]", "[]")
    ] == pytest.approx([2 / 6, 4 / 6, 1.0, 1.0, 0.0, 0.0])
    assert task.extract(prompt, "[2, 0]") == "0 2"


def test_a_level_adds_two_items() -> None:
    task = Optimisation(parse_settings(Optimisation.Options, {"least": 2, "most": 5}))
    drawn = [task.draw(Random(seed)).extra for seed in range(60)]
    assert {one["level"] for one in drawn} == {2, 3, 4, 5}
    assert all(one["problem"]["size"] == 3 + 2 * one["level"] for one in drawn)
