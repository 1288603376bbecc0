"""Rewards of turns and tool calls: golden numbers."""

import json
import math
from typing import Any

import numpy as np
import pytest

from opd.config import parse_settings
from opd.errors import ConfigError, DataError
from opd.tasks.prompt import Prompt
from opd.tasks.tools import Call
from opd_zoo.rewards.igpo import Igpo, IgpoSettings
from opd_zoo.rewards.matchtir import MatchTir, MatchTirSettings, similarity, transport
from opd_zoo.rewards.profiling import Profiling, ProfilingSettings
from opd_zoo.rewards.toolrl import ToolRl, ToolRlSettings, match_share, same_value
from student.job.plugins import build_plugins
from student.settings.recipe import Recipe


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_turn_is_worth_what_it_adds_to_the_belief_in_the_answer(make_row: Any, services: Any) -> None:
    beliefs = {3: 0.1, 5: 0.3, 8: 0.25}  # by the ids before the answer: the prompt's 3, then up to each later turn
    services.log_probs = lambda before, ids: [math.log(beliefs[len(before)])] * len(ids)
    row = make_row(value=1.0, length=7)
    row.turns = ((0, 1), (2, 4), (5, 7))
    reward = Igpo(parse_settings(IgpoSettings, {"name": "igpo"}))
    reward.reward([row], services)
    assert row.turn_rewards == pytest.approx((0.2, -0.05, 1.0))
    assert [item.response_ids.tolist() for item in services.read_items] == [list(b"42")] * 3
    assert row.reward is None and not row.reward_parts  # the row's own reward stays the verdict


def test_the_rewards_add_up_to_the_whole_gain_and_the_verdict(make_row: Any, services: Any) -> None:
    services.log_probs = lambda before, ids: [-1.0 / len(before)] * len(ids)
    row = make_row(value=0.0, length=9)
    row.turns = ((0, 2), (3, 5), (6, 9))
    Igpo(parse_settings(IgpoSettings, {"name": "igpo", "before": "<a>"})).reward([row], services)
    assert sum(row.turn_rewards) == pytest.approx(np.exp(-1 / (3 + 6 + 3)) - np.exp(-1 / (3 + 3)))
    unknown = make_row(value=None)
    Igpo(parse_settings(IgpoSettings, {"name": "igpo"})).reward([unknown], services)
    assert unknown.turn_rewards == ()


def test_rewards_by_turn_that_no_advantage_reads_are_refused() -> None:
    def build(advantage: str) -> None:
        data = {
            "run": "run",
            "model": {"path": "student"},
            "prompts": {"task": "lock"},
            "objective": [{"name": "grpo", "advantage": {"name": advantage}}],
            "rewards": [{"name": "igpo"}],
            "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 64},
            "train": {"steps": 1, "learning_rate": 1e-3},
        }
        build_plugins(parse_settings(Recipe, data))

    build("trloo")
    with pytest.raises(ConfigError, match="trloo or mapo"):
        build("group_mean")


LOOK = Call("look", {"at": "door", "for": 2})


@pytest.mark.parametrize(
    ("calls", "share"),
    [
        ([LOOK], 1.0),
        ([], 0.0),
        ([Call("jump", {})], 0.0),
        ([Call("jump", LOOK.arguments)], 0.0),  # names must agree
        ([Call("look", {})], 1 / 4),
        ([Call("look", {"at": "door", "by": 1})], (1 + 1 / 3 + 1) / 4),
        ([LOOK, LOOK], (1 / 2 + 1 + 2) / 4),  # a call too many lowers the Jaccard index of names
        ([Call("look", {"at": "door", "for": "2"}, coerced=True)], 1.0),
    ],
)
def test_the_share_of_reference_calls_that_is_matched(calls: list[Call], share: float) -> None:
    assert match_share([LOOK], calls) == pytest.approx(share)


def test_where_nothing_is_asked_for_nothing_is_to_be_called() -> None:
    assert match_share([], []) == 1.0 and match_share([], [LOOK]) == 0.0


def test_each_reference_call_takes_one_call_and_the_best_pair_first() -> None:
    near, exact = Call("look", {"at": "wall", "for": 2}), LOOK
    other = Call("look", {"at": "wall", "for": 3})
    assert match_share([exact, other], [near, exact]) == pytest.approx((1 + (1 + 2) + (1 + 1)) / (1 + 2 + 4))


def test_one_call_answers_one_of_two_equal_reference_calls() -> None:
    assert match_share([LOOK, LOOK], [LOOK]) == pytest.approx((1 / 2 + 1 + 2) / (1 + 2 + 4))
    assert match_share([Call("look", {})], [Call("look", {})]) == 1.0


@pytest.mark.parametrize(
    ("wanted", "found", "same"),
    [(True, "true", True), (True, "True", True), (["a", 1], '["a",1]', True), ("7", "7", True), (7, "8", False)],
)
def test_a_value_of_an_xml_call_is_read_as_text_or_as_json(wanted: Any, found: str, same: bool) -> None:
    share = match_share([Call("f", {"x": wanted})], [Call("f", {"x": found}, coerced=True)])
    assert share == (1.0 if same else 2 / 3)
    assert not same_value(7, "7", coerced=False)


@pytest.mark.parametrize(
    "column",
    [
        '[{"name": "look", "arguments": {"at": "door"}}]',
        [{"name": "look", "arguments": '{"at": "door"}'}],
        [{"name": "look", "arguments": {"at": "door", "for": None}}],  # as parquet gives it
    ],
    ids=["json", "json within", "parquet"],
)
def test_reference_calls_are_read_as_data_sets_hold_them(make_row: Any, services: Any, column: Any) -> None:
    row = make_row(call("look", at="door"), 1.0, prompt=Prompt.make("q", extra={"calls": column}))
    ToolRl(parse_settings(ToolRlSettings, {"name": "toolrl"})).reward([row], services)
    assert row.reward == 4.0


def test_the_reward_is_the_format_and_six_times_the_share_less_three(make_row: Any, services: Any) -> None:
    prompt = Prompt.make("q", extra={"calls": [{"name": "look", "arguments": {"at": "door"}}]})
    bad = "<tool_call>{</tool_call>"
    texts = [call("look", at="door"), "I look.", bad, call("look"), call("look", at="door") + bad]
    rows = [make_row(text, prompt=prompt, sample=i) for i, text in enumerate(texts)]
    ToolRl(parse_settings(ToolRlSettings, {"name": "toolrl"})).reward(rows, services)
    assert [row.reward for row in rows] == pytest.approx([4.0, -3.0, -3.0, 1 + 6 / 3 - 3, 3.0])
    plain = make_row("x")
    ToolRl(parse_settings(ToolRlSettings, {"name": "toolrl"})).reward([plain], services)
    assert plain.reward is None
    for calls, words in (
        (["look"], "needs a name and arguments"),
        ([{"name": "look", "arguments": "door"}], "needs a name and arguments"),
        ("look", "'calls' of .* is 'look'; it must be a list of calls"),
    ):
        other = make_row("x", prompt=Prompt.make("q", extra={"calls": calls}))
        with pytest.raises(DataError, match=words):
            ToolRl(parse_settings(ToolRlSettings, {"name": "toolrl"})).reward([other], services)


def test_calls_are_as_similar_as_their_names_and_values() -> None:
    wanted = Call("f", {"a": 1, "b": 2})
    calls = [Call("f", {"a": 1, "c": 3}), wanted, Call("g", {"a": 1, "b": 2}), Call("f", {})]
    assert similarity([wanted], calls)[:, 0] == pytest.approx([(1 + 1 / 3 + 1) / 4, 1.0, 0.0, 1 / 4])


def test_the_best_assignment_is_not_always_the_greedy_one() -> None:
    scores = np.array([[0.9, 0.8], [0.8, 0.0]])
    hard = MatchTir(parse_settings(MatchTirSettings, {"name": "matchtir", "miss": -0.5}))
    assert hard.paid(scores) == [0.8, 0.8]  # greedy takes 0.9 and leaves the other nothing
    assert hard.paid(np.array([[1.0], [1.0]])) == [1.0, -0.5]  # a reference call pays one call
    assert hard.paid(np.zeros((2, 0))) == [-0.5, -0.5]


def test_a_plan_of_transport_has_uniform_margins_and_pays_shares() -> None:
    scores = np.array([[1.0, 0.0, 0.2], [0.1, 1.0, 0.0]])
    plan = transport(scores, 0.1)
    assert plan.sum(1) == pytest.approx([0.5, 0.5]) and plan.sum(0) == pytest.approx([1 / 3] * 3)
    soft = MatchTir(parse_settings(MatchTirSettings, {"name": "matchtir", "assignment": "soft"}))
    assert soft.paid(scores) == pytest.approx((plan * scores).sum(1))
    # Of two by two: the odds of the diagonal are exp((0.3 + 0.2 - 0.2 - 0.1) / 0.1), the square of e.
    two = transport(np.array([[0.3, 0.2], [0.1, 0.2]]), 0.1)
    assert two[0, 0] / two[0, 1] == pytest.approx(np.e)


def test_a_turn_is_paid_the_mean_of_its_calls_and_the_last_one_the_verdict(make_row: Any, services: Any) -> None:
    turns = [call("look", at="door") + call("jump"), "I wait.", "42"]
    text = "".join(turns)
    prompt = Prompt.make("q", extra={"calls": [{"name": "look", "arguments": {"at": "door"}}]})
    row = make_row(text, 1.0, prompt=prompt, length=len(text))
    row.response_ids = np.frombuffer(text.encode(), np.uint8).astype(np.uint32)
    ends = np.cumsum([len(turn) for turn in turns]).tolist()
    row.turns = tuple(zip([0, *ends[:-1]], ends, strict=True))
    reward = MatchTir(parse_settings(MatchTirSettings, {"name": "matchtir"}))
    reward.reward([row], services)
    assert row.turn_rewards == pytest.approx((0.5, 0.0, 1.0)) and row.reward is None
    assert reward.fired == {"calls": (2.0, 1.0), "matched": (1.0, 2.0)}


def test_a_profiled_turn_is_paid_by_correctness_speed_and_coverage(make_row: Any, services: Any) -> None:
    reward = Profiling(parse_settings(ProfilingSettings, {"name": "profiling", "penalty": -0.5, "floor": 1.0}))
    right = {"correct": 1.0, "speedup": 1.5, "coverage": 0.4, "decoy": 0.0}
    assert reward.paid(right) == pytest.approx(1 + 1.5 + 0.5 * 0.4)
    assert reward.paid({**right, "speedup": 7.0}) == pytest.approx(1 + 3 + 0.2)  # capped
    assert reward.paid({**right, "speedup": 0.9}) == pytest.approx(1 + 0.2)  # under the floor
    assert reward.paid({**right, "decoy": 1.0}) == reward.paid({}) == -0.5
    assert reward.paid({"correct": 0.0, "coverage": 1.0}) == 0.0  # coverage of what is wrong counts for nothing
    fast = {"correct": 0.0, "speedup": 3.0}
    assert reward.paid(fast) == 0.0  # and so does its speed, unless it is asked for
    asked = parse_settings(ProfilingSettings, {"name": "profiling", "speed_of": "all"})
    assert Profiling(asked).paid(fast) == pytest.approx(3.0)
    # However fast a decoy seems, an honest slow kernel is paid more.
    assert reward.paid({**right, "speedup": 99.0, "decoy": 1.0}) < reward.paid({"correct": 1.0, "speedup": 0.1})
    row, other = make_row(value=1.0, length=4), make_row(value=1.0, length=4)
    row.turns = other.turns = ((0, 1), (2, 4))
    row.notes = {f"{name}/1": value for name, value in right.items()}
    other.turn_rewards = (3.0, 4.0)
    reward.reward([row, other], services)
    assert row.turn_rewards == pytest.approx((-0.5, 2.7)) and other.turn_rewards == (3.0, 4.0)
    assert reward.fired["unmeasured"] == (1.0, 2.0) and reward.fired["speedup"] == (1.5, 1.0)
