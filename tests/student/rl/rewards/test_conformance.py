"""What every registered reward owes: conformance tests that a new one inherits by being registered."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from registered import registered
from saved_state import save_state

from opd.config import parse_settings
from opd.tasks.prompt import Prompt
from opd.wire.types import PayloadKind, Scores
from student.data.needs import REFERENCE, TEACHER
from student.data.outcome import outcome_of, reward_of
from student.data.report import StepReport
from student.data.row import Row
from student.rl import REWARDS
from student.scoring.rewards.base import Reward
from student.scoring.rewards.chain import RewardChain
from student.scoring.rewards.rounds import StepRewards
from student.state.state_io import load_state

SETTINGS: dict[str, dict[str, Any]] = {
    "overlong": {"buffer": 3},
    "noisy_verifier": {"false_positive": 0.1},
    "function": {"function": "operator:countOf", "timeout": 60.0},
    "judge": {"endpoint": "http://nowhere.invalid", "model": "m"},
    "http_judge": {"endpoint": "http://nowhere.invalid"},
    "grpc_judge": {"endpoint": "nowhere.invalid:1"},
    "checklist": {"endpoint": "http://nowhere.invalid", "model": "m"},
    "appeals": {"endpoint": "http://nowhere.invalid", "model": "m", "share": 1.0},
    "text2grad": {"endpoint": "http://nowhere.invalid", "model": "m"},
    "rubric": {"endpoint": "http://nowhere.invalid", "model": "m"},
    "spo": {"endpoint": "http://nowhere.invalid", "model": "m"},
    "consistency": {"endpoint": "http://nowhere.invalid", "model": "m"},
    "turn_judge": {"endpoint": "http://nowhere.invalid", "model": "m"},
}
"""Settings of rewards that have no defaults for all of them."""

ASKS = ("judge", "http_judge", "grpc_judge", "checklist", "appeals")

SAYS: dict[str, tuple[str, Callable[..., Any]]] = {
    "rubric": ("met", lambda row: [len(row.text) % 2 == 0, True] if row.text else None),
    "spo": ("result", lambda pair: (1.0 + len(pair[0].text) - len(pair[1].text) / 2) / 50),
    "consistency": ("consistent", lambda row: len(row.text) % 2 == 0),
    "turn_judge": ("grade", lambda turn: len(turn[1]) / 50),
}
"""What those say of an answer that ask about several things, in place of a model."""

TEXTS = ("<answer>42</answer>", '{"a": 1}', "why <answer>7</answer>", "", "42", "42")
VALUES = (1.0, 0.0, 1.0, None, 0.5, 1.0)


@pytest.fixture(params=registered(REWARDS))
def build(request: pytest.FixtureRequest) -> Any:
    made: list[Reward] = []

    def make() -> Reward:
        cls = REWARDS.load(request.param)
        data = {"name": request.param} | SETTINGS.get(request.param, {})
        made.append(cls(parse_settings(cls.settings_type, data)))
        if request.param == "overlong":
            made[-1].limit = 5  # type: ignore[attr-defined]
        if request.param == "function":
            made[-1]._check = lambda prompt, answer: len(answer) - 3.0  # type: ignore[attr-defined]
        if request.param in ASKS:  # whose calls have tests of their own
            made[-1].value = lambda prompt, answer: len(answer) / 50 or None  # type: ignore[attr-defined]
        if request.param == "text2grad":
            made[-1].spans = lambda prompt, answer: [("4", 1.0)] if answer else None  # type: ignore[attr-defined]
        if request.param in SAYS:
            name, says = SAYS[request.param]
            setattr(made[-1], name, says)
        return made[-1]

    return make


@pytest.fixture
def rows(make_row: Callable[..., Row]) -> Callable[..., list[Row]]:
    def make(step: int = 0) -> list[Row]:
        calls = [{"name": "look", "arguments": {}}]
        extra = {"calls": calls, "rubric": ["short", {"criterion": "right", "weight": 2}]}
        prompts = [Prompt.make(name, answer="42", extra=extra) for name in ("one", "two")]
        found = [
            make_row(TEXTS[i], VALUES[i], sample=i, step=step, length=i + 1, prompt=prompts[i % 2], truncated=i == 4)
            for i in range(6)
        ]
        for row in found:
            row.notes |= {"correct/0": 1.0, "speedup/0": 1.5}
            for role, gap in ((TEACHER, 0.5), (REFERENCE, 2.0)):
                row.signals[role, PayloadKind.SAMPLED] = Scores(sampled=row.behaviour_logp - np.float32(gap))
        return found

    return make


def given(reward: Reward, rows: list[Row], services: Any) -> dict[Any, Any]:
    for row in rows:
        row.rewarded = reward.kind == "whole"
    reward.reward(rows, services)
    return {row.key: (reward_of(row), dict(row.reward_parts), dict(row.notes)) for row in rows}


@pytest.fixture
def listening(services: Any) -> Any:
    services.log_probs = lambda before, ids: [-0.1 - 0.01 * (len(before) % 7)] * len(ids)
    return services


def test_a_reward_is_finite_or_unknown(build: Any, rows: Any, listening: Any) -> None:
    found = given(build(), rows(), listening)
    rewards = [value for value, _, _ in found.values() if value is not None]
    assert rewards and all(map(math.isfinite, rewards))


def test_it_does_not_depend_on_the_order_of_rows_nor_on_other_groups(build: Any, rows: Any, listening: Any) -> None:
    def numbers(made: list[Row]) -> dict[Any, float | None]:
        return {key: value for key, (value, _, _) in given(build(), made, listening).items()}

    whole, by_group = numbers(rows()), rows()
    assert numbers(rows()[::-1]) == pytest.approx(whole)
    assert numbers(by_group[::2]) | numbers(by_group[1::2]) == pytest.approx(whole)


def test_groups_that_come_in_rounds_are_rewarded_as_if_they_came_at_once(build: Any, rows: Any, listening: Any) -> None:
    found = []
    for cuts in ((0, 6), (0, 3, 6), (0, 1, 4, 6)):
        chain, made = RewardChain([build()]), rows()
        rewards = StepRewards(chain, listening)
        for start, end in pairwise(cuts):
            rewards(made[start:end])
        found.append(({r.key: (reward_of(r), r.reward_parts, r.turn_rewards, r.notes) for r in made}, chain.take()))
    assert found[0] == found[1] == found[2]


def test_a_step_that_is_taken_again_is_rewarded_alike(build: Any, rows: Any, listening: Any) -> None:
    reward = build()
    before = reward.state_dict()
    first = given(reward, rows(), listening)
    assert reward.state_dict() == before
    assert given(reward, rows(), listening) == first


def test_its_state_survives_a_checkpoint(build: Any, rows: Any, listening: Any, tmp_path: Path) -> None:
    one, other = build(), build()
    for step in range(12):
        made = rows(step)
        given(one, made, listening)
        one.observe(StepReport(step, {}, [outcome_of(row) for row in made]))
    save_state(tmp_path, "reward", one.state_dict())
    other.load_state_dict(load_state(tmp_path, "reward"))
    assert given(one, rows(12), listening) == given(other, rows(12), listening)


def test_two_ranks_learn_what_one_learns(build: Any, rows: Any, listening: Any) -> None:
    alone, left, right = build(), build(), build()
    for step in range(7):
        made, halves = rows(step), rows(step)
        given(alone, made, listening)
        given(left, halves[::2], listening)
        given(right, halves[1::2], listening)
        alone.observe(StepReport(step, {}, [outcome_of(row) for row in made]))
        together = StepReport(step, {}, [outcome_of(row) for row in halves])
        left.observe(together)
        right.observe(together)
    assert left.state_dict() == right.state_dict() == alone.state_dict()


def test_an_unknown_verdict_never_lowers_a_reward_that_needs_one(build: Any, rows: Any, listening: Any) -> None:
    reward = build()
    if reward.needs().reward != "verdict" or reward.settings.name == "rl_struct":
        pytest.skip("it reads no verdicts, or has tiers that are known without one")
    found = {key.sample: value for key, (value, _, _) in given(reward, rows(), listening).items()}
    assert found[3] is None


def test_it_shows_that_it_acted(build: Any, rows: Any, listening: Any) -> None:
    reward = build()
    given(reward, rows(), listening)
    assert reward.fired and all(count > 0 for _, count in reward.fired.values())
    assert any(total for total, _ in reward.fired.values()) or reward.settings.name in (
        "function",
        "hapo",
        "rlpr",
        "toolrl",
        "matchtir",
        "infopo",
        "spo",
    )


def test_it_says_how_its_formula_is_known(build: Any) -> None:
    assert build().evidence in ("text and code", "text", "abstract", "inferred", "own")
