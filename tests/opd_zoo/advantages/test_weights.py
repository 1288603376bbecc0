"""Modifiers that weigh credit by how much there is to learn, and SPAE's credit by step: golden numbers."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rows import make_row

from opd.config import parse_settings
from opd.errors import DataError
from opd.tasks.prompt import Prompt
from opd_zoo.advantages.weights import GrpoS, GrpoSSettings
from student.data.outcome import Outcome
from student.rl.advantages.chain import AdvantageChain


def group(rewards: list[float], uid: str = "p", **fields: Any) -> list[Outcome]:
    return [Outcome(0, uid, i, reward=reward, length=4, tokens=4, **fields) for i, reward in enumerate(rewards)]


def after(rows: list[Outcome], *modifiers: dict[str, Any]) -> np.ndarray[Any, Any]:
    chain = AdvantageChain([{"name": "reinforce"}, *modifiers], "a test")
    return np.array([float(np.mean(value)) for value in chain.estimate(rows)])


def test_what_is_as_likely_as_it_is_right_counts_for_little() -> None:
    rows = [
        replace(row, sums={"behaviour": 4 * math.log(p)})
        for row, p in zip(group([1.0, 1.0, 0.0, 0.0, 3.0]), (0.9, 0.2, 0.9, 0.1, 0.5), strict=True)
    ]
    rewards = np.array([1, 1, 0, 0, 3])
    assert after(rows, {"name": "sample_balance"}) == pytest.approx(rewards * [0.1, 0.8, 0.9, 0.1, 0.5])


def classed(rewards: list[float], classes: list[float | None], uid: str = "p") -> list[Outcome]:
    notes = [{} if one is None else {"answer_class": one} for one in classes]
    return [replace(row, notes=note) for row, note in zip(group(rewards, uid), notes, strict=True)]


def test_groups_of_medium_difficulty_with_many_answers_count_most() -> None:
    alike = classed([1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0])
    assert after(alike, {"name": "puzzlecraft", "floor": 0.2}) == pytest.approx([0.2, 0, 0.2, 0])
    apart = classed([1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 2.0, None])
    assert after(apart, {"name": "puzzlecraft", "floor": 0.2}) == pytest.approx([1.0, 0, 1.0, 0])
    easy = classed([1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0])
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    weight = 0.1 + 0.9 * 4 * 0.75 * 0.25 * entropy
    assert after(easy, {"name": "puzzlecraft"}) == pytest.approx([weight] * 3 + [0])


def test_prompts_on_which_the_best_answer_is_far_above_the_others_count_more() -> None:
    rows = group([1.0, 0.0, 0.0, 0.0]) + group([1.0, 1.0, 1.0, 0.0], "q")
    found = after(rows, {"name": "grpo_s"})  # gaps of 3/4 and 1/4, whose mean is 1/2
    assert found == pytest.approx([1.5, 0, 0, 0, 0.5, 0.5, 0.5, 0])
    assert after(group([1.0, 1.0]), {"name": "grpo_s"}) == pytest.approx([1.0, 1.0])


def test_a_hardness_multiplies_the_credit_of_its_prompt() -> None:
    made = GrpoS(parse_settings(GrpoSSettings, {"name": "grpo_s", "column": "hardness"}))
    assert made.refine(make_row(prompt=Prompt.make("q", extra={"hardness": 0.25})), 2.0) == 0.5
    for value in (None, -1.0, math.inf, "hard"):
        with pytest.raises(DataError, match="hardness"):
            made.check_prompts([Prompt.make("q", extra={"hardness": value})])


def probed(reward: float, sample: int, phis: list[float]) -> Outcome:
    """Steps of two tokens."""
    notes = {f"spae/phi/{k}": phi for k, phi in enumerate(phis)} | {
        f"spae/start/{k}": 2.0 * k for k in range(len(phis))
    }
    length = 2 * len(phis)
    return Outcome(0, "p", sample, reward=reward, length=length, tokens=length, notes=notes)


def test_a_step_is_credited_by_its_change_of_the_potential_and_less_after_certainty() -> None:
    rows = [probed(1.0, 0, [0.0, 0.95, 0.97, 0.5]), probed(0.0, 1, [0.2, 0.1])]
    changes = np.array([0.95, 0.02, -0.47, -0.1])
    scaled = np.exp((changes + 0.47) / (0.95 + 0.47))
    g = scaled - scaled.mean()
    f = np.array([1.0, 1.0, 1 - 0.5 * (1 - math.exp(-1)), 1 - 0.5 * (1 - math.exp(-2))])
    first = 0.5 * f + 0.5 * np.array([g[0], g[1], g[2], 0.0])
    second = -0.5 + 0.5 * np.array([g[3], 0.0])
    every = np.concatenate([first.repeat(2), second.repeat(2)])
    expected = (every - every.mean()) / every.std()
    chain = AdvantageChain({"name": "spae"}, "a test")
    found = np.concatenate([np.asarray(value) for value in chain.estimate(rows)])
    assert found == pytest.approx(expected, abs=1e-4)
    metrics = chain.metrics()
    assert metrics["spae/saturated"] == (2.0, 6.0) and metrics["spae/rise"] == (pytest.approx(0.4), 4.0)


def test_without_potentials_a_response_is_one_step() -> None:
    rows = group([1.0, 0.0, 0.0, 0.0])
    found = [np.asarray(value) for value in AdvantageChain({"name": "spae"}, "a test").estimate(rows)]
    centred = np.array([0.75, -0.25, -0.25, -0.25])
    assert np.array([value[0] for value in found]) == pytest.approx(centred / centred.std(), abs=1e-4)
    assert all(len(set(value.tolist())) == 1 for value in found)
