"""Golden numbers of the rewards, from their papers and code."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from opd.config import parse_settings
from opd.errors import ConfigError, DataError
from opd.tasks.prompt import Prompt
from opd_zoo.rewards.cosine_length import CosineLength, CosineLengthSettings
from student.data.outcome import outcome_of, reward_of
from student.data.report import StepReport
from student.data.row import EpisodeTrace, Row
from student.plugin.terms import build_terms
from student.rl import REWARDS

Make = Callable[..., Row]


def build(name: str, **settings: Any) -> Any:
    cls = REWARDS.load(name)
    return cls(parse_settings(cls.settings_type, {"name": name, **settings}))


def recipe(samples: int = 8, longest: int = 100) -> Any:
    return SimpleNamespace(rollout=SimpleNamespace(max_new_tokens=longest, samples_per_prompt=samples))


def report(step: int, rows: list[Row]) -> StepReport:
    return StepReport(step, {}, [outcome_of(row) for row in rows])


def test_hapo_rewards_what_is_shorter_than_the_history(make_row: Make, services: Any) -> None:
    reward = build("hapo")
    first = [make_row(value=1.0, length=10), make_row(value=1.0, length=8), make_row(value=0.0, length=2)]
    reward.reward(first, services)
    assert [row.reward_parts["hapo"] for row in first] == [0.0, 0.0, 0.0]
    reward.observe(report(0, first))
    assert list(reward.shortest.values()) == [8]
    rows = [make_row(value=1.0, length=n) for n in (4, 8, 12, 24)] + [make_row(value=0.0, length=n) for n in (4, 12)]
    reward.reward([*rows, unknown := make_row(length=1)], services)
    found = [row.reward_parts["hapo"] for row in rows]
    assert found == pytest.approx([math.sqrt(0.5), 0.0, -0.7, -0.7, 0.0, -math.sqrt(0.5)], abs=1e-12)
    assert "hapo" not in unknown.reward_parts and reward_of(unknown) is None
    again = build("hapo")
    again.load_state_dict(reward.state_dict())
    assert again.shortest == reward.shortest


def test_dler_gives_nothing_for_what_the_limit_cut(make_row: Make, services: Any) -> None:
    reward = build("dler")
    rows = [make_row(value=1.0), make_row(value=1.0, truncated=True), make_row(truncated=True), make_row()]
    reward.reward(rows, services)
    assert [row.reward for row in rows] == [1.0, 0.0, 0.0, None]


def test_dler_shortens_the_limit_of_easy_groups(make_row: Make, services: Any) -> None:
    reward = build("dler", limit=40, easy_limit=20)
    hard, easy = Prompt.make("hard"), Prompt.make("easy")
    rows = [make_row(value=v, length=n, prompt=easy) for v, n in ((1.0, 10), (1.0, 30), (0.0, 10))]
    rows += [make_row(value=v, length=n, prompt=hard) for v, n in ((1.0, 30), (1.0, 50), (0.0, 10), (0.0, 9), (0.0, 1))]
    reward.reward(rows, services)
    assert [row.reward for row in rows] == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]


SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("text", "value", "wanted"),
    [
        ('{"a": 1}', 1.0, 1.0),
        ('{"a": 1}', 0.0, 0.8),
        ('Here: {"a": 1}', 1.0, 0.8),
        ('```json\n{"a": 1}\n```', 0.0, 0.6),
        ('{"a": "x"}', 1.0, 0.6),
        ('so {"b": 1}', 1.0, 0.4),
        ('{"a": 1', 1.0, 0.0),
        ("", 1.0, 0.0),
        ('{"a": 1}', None, None),
    ],
)
def test_rl_struct_counts_tiers_in_order(
    make_row: Make, services: Any, text: str, value: float | None, wanted: float | None
) -> None:
    row = make_row(text, value)
    build("rl_struct", json_schema=SCHEMA).reward([row], services)
    assert row.reward == (None if wanted is None else pytest.approx(wanted))


def test_the_backward_correction_is_unbiased(make_row: Make, services: Any) -> None:
    reward = build("noisy_verifier", false_positive=0.1, false_negative=0.2)
    rows = [make_row(value=0.0), make_row(value=1.0), make_row()]
    reward.reward(rows, services)
    wrong, right, unknown = (row.reward for row in rows)
    assert (wrong, right) == pytest.approx((-1 / 7, 9 / 7), abs=1e-12) and unknown is None
    assert 0.8 * right + 0.2 * wrong == pytest.approx(1.0) and 0.1 * right + 0.9 * wrong == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("settings", "objective", "words"),
    [
        ({"false_positive": 0.1}, {"name": "grpo"}, "leaves nothing"),
        ({"false_positive": 0.1}, {"name": "rloo"}, "a factor that is the same"),
        ({"domains": {"d": {"false_negative": 0.2}}}, {"name": "grpo"}, "leaves nothing"),
        ({"false_positive": 0.1}, {"name": "rloo", "advantage": {"name": "lite_ppo"}}, "leaves nothing"),
        ({"false_positive": 0.1}, {"name": "rloo", "advantage": {"name": "signed"}}, "leaves nothing"),
        ({"false_positive": 0.1}, {"name": "rloo", "advantage": {"name": "asym_re"}}, "a factor that is the same"),
        (
            {"false_positive": 0.1},
            {"name": "rloo", "advantage": [{"name": "leave_one_out"}, {"name": "outliers"}]},
            "leaves nothing",
        ),
        ({}, {"name": "rloo"}, "changes nothing"),
    ],
)
def test_a_correction_that_the_advantage_takes_away_is_refused(
    settings: dict[str, Any], objective: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        build("noisy_verifier", **settings).check(recipe(), build_terms([objective]))


def test_a_correction_with_rates_by_domain_acts_on_the_weight_of_prompts() -> None:
    by_domain = build("noisy_verifier", domains={"d": {"false_negative": 0.2}})
    for advantage in ("leave_one_out", "lite_ppo", "reinforce_pp"):
        by_domain.check(recipe(), build_terms([{"name": "rloo", "advantage": {"name": advantage}}]))
    build("noisy_verifier", false_positive=0.1).check(
        recipe(), build_terms([{"name": "rloo", "advantage": {"name": "reinforce"}}])
    )


def test_ttrv_counts_votes_and_takes_the_spread_off(make_row: Make, services: Any) -> None:
    rows = [make_row(text, sample=i) for i, text in enumerate(["A", "A", "A", "B"])]
    build("ttrv").reward(rows, services)
    assert [row.reward for row in rows] == pytest.approx([0.1415, 0.1415, 0.1415, -0.3585], abs=1e-4)
    rows = [make_row(text, sample=i) for i, text in enumerate(["A", "A", ""])]
    build("ttrv").reward(rows, services)
    assert [row.reward for row in rows] == [1.0, 1.0, None]


def test_ttrv_is_refused_where_a_groups_mean_cancels_the_spread() -> None:
    with pytest.raises(ConfigError, match=r"cancels.*diversity to 0"):
        build("ttrv").check(recipe(), build_terms([{"name": "grpo"}]))
    build("ttrv", diversity=0.0).check(recipe(), build_terms([{"name": "grpo"}]))
    # The entropy may move a reward across the threshold by which signed and pacs tell right from wrong.
    for name in ("reinforce_pp", "signed", "pacs"):
        build("ttrv").check(recipe(), build_terms([{"name": "grpo", "advantage": {"name": name}}]))
    assert build("ttrv").traits.least_group == 2


def test_rlpr_is_the_gain_in_the_mean_probability_of_the_reference(make_row: Make, services: Any) -> None:
    reward = build("rlpr")
    helps, useless, bare = "good <answer>7</answer>", "bad <answer>42</answer>", "no marks"

    def log_probs(before: list[int], ids: list[int]) -> list[float]:
        assert bytes(ids) == b"42" and bytes(before).endswith(b"<answer>")
        told = {b"good": [0.9, 0.5], b"bad ": [0.2, 0.2]}.get(bytes(before[3:7]), [0.4, 0.2])
        return [math.log(p) for p in told]

    services.log_probs = log_probs
    rows = [make_row(text, sample=i) for i, text in enumerate([helps, useless, bare])]
    reward.reward(rows, services)
    assert [row.reward for row in rows] == pytest.approx([0.9 * 0.4 + 0.1, 0.1, 0.0], abs=1e-6)
    assert len(services.read_items) == 4
    # One token that is all but impossible costs at most 1 / length.
    services.log_probs = lambda before, ids: [0.0, -80.0] if b"good" in bytes(before) else [-80.0, -80.0]
    (row,) = [make_row(helps)]
    reward.reward([row], services)
    assert row.reward == pytest.approx(0.9 * 0.5 + 0.1)
    with pytest.raises(DataError, match="no reference answer"):
        reward.reward([make_row(helps, prompt=Prompt.make("q"))], services)


def test_rlpr_leaves_out_groups_of_little_spread_from_the_eleventh_step_on(make_row: Make, services: Any) -> None:
    reward = build("rlpr", filter_decay=0.5)
    even, wide = Prompt.make("even", answer="1"), Prompt.make("wide", answer="1")

    def rows(step: int) -> list[Row]:
        made = [make_row("x", sample=i, step=step, prompt=even) for i in range(2)]
        made += [make_row("x" + "<answer></answer>" * i, sample=i, step=step, prompt=wide) for i in range(2)]
        reward.reward(made, services)
        reward.observe(report(step, made))
        return made

    for step in range(10):
        assert all(row.reward is not None for row in rows(step))
        assert (reward.average is None) == (step < 5)
    assert reward.average == pytest.approx(0.025)
    left = rows(10)
    assert [row.reward is None for row in left] == [True, True, False, False]
    again = build("rlpr")
    again.load_state_dict(reward.state_dict())
    assert again.average == reward.average
    reward.average = 0.125  # what is new, 0.025, enters with half of the weight
    rows(11)
    assert reward.average == pytest.approx(0.075)


def test_a_cosine_pays_short_right_answers_most_and_long_wrong_ones_least(make_row: Any, services: Any) -> None:
    reward = CosineLength(parse_settings(CosineLengthSettings, {"name": "cosine_length", "longest": 8}))
    right, wrong = ([reward.value(kind, length) for length in (0, 2, 4, 8)] for kind in (True, False))
    assert right == pytest.approx([1.1, 0.9 + 0.2 * 2**-0.5, 0.9, 0.7])
    assert wrong == pytest.approx([0.0, -0.15 + 0.15 * 2**-0.5, -0.15, -0.3])
    rows = [make_row(value=1.0, length=n) for n in (4, 9)] + [make_row(value=None), make_row(value=0.0, truncated=True)]
    rows[0].episode = EpisodeTrace(np.array([True, True, False, False]))  # what the environment wrote does not count
    reward.reward(rows, services)
    assert [row.reward for row in rows] == [pytest.approx(0.9 + 0.2 * 2**-0.5), -0.5, None, -0.5]
    assert reward.fired["over"] == (2.0, 4.0)
