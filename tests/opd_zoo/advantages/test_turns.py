"""Credit by turn: golden numbers, and ragged episodes."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from opd_zoo.advantages.a2tgpo import accumulated
from student.data.needs import REFERENCE
from student.data.outcome import Outcome, Turns
from student.rl.advantages.chain import AdvantageChain


def episode(sample: int, rewards: tuple[float, ...], uid: str = "p", reward: float = 0.0) -> Outcome:
    """Turns of two tokens with one of the environment between them."""
    spans = tuple((3 * turn, 3 * turn + 2) for turn in range(len(rewards)))
    length = spans[-1][1]
    return Outcome(0, uid, sample, reward=reward, turns=Turns(spans, rewards), length=length, tokens=length)


def by_turn(outcomes: list[Outcome], **entry: Any) -> list[list[float]]:
    """Credit of each turn, which all its tokens must share; between turns there is none."""
    found = []
    for outcome, credit in zip(outcomes, AdvantageChain(entry, "a test").estimate(outcomes), strict=True):
        assert isinstance(credit, np.ndarray) and credit.dtype == np.float32
        for start, end in outcome.turns.spans:
            assert len(set(credit[start:end].tolist())) == 1
        assert not credit[[end for _, end in outcome.turns.spans[:-1]]].any()
        found.append([float(credit[start]) for start, _ in outcome.turns.spans])
    return found


def test_trloo_is_the_return_against_the_mean_of_the_others_at_the_turn() -> None:
    rows = [episode(i, (value,)) for i, value in enumerate((1.0, 0.0, 0.0, 0.0))]
    assert [first for (first,) in by_turn(rows, name="trloo")] == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])


def test_episodes_that_ended_early_are_in_no_later_baseline_and_one_alone_keeps_its_return() -> None:
    rows = [episode(0, (0.0, 0.0, 1.0)), episode(1, (0.0, 0.5)), episode(2, (0.0,))]
    first, second, third = by_turn(rows, name="trloo")
    # Returns at turn 0 are 1, 0.5, 0; at turn 1 they are 1, 0.5; at turn 2 one is alone with 1.
    assert first == pytest.approx([0.75, 0.5, 1.0])
    assert second == pytest.approx([0.0, -0.5])
    assert third == pytest.approx([-0.75])


def test_the_order_of_the_episodes_changes_no_bit_and_equal_returns_give_exactly_nothing() -> None:
    rows = [episode(i, (value,)) for i, value in enumerate((0.1, 0.2, 0.3, 0.7, 1.1))]
    straight, back = by_turn(rows, name="trloo"), by_turn(rows[::-1], name="trloo")
    assert straight == back[::-1]
    assert by_turn([episode(i, (0.1,)) for i in range(3)], name="trloo") == [[0.0]] * 3


def test_a_discount_weighs_later_rewards_less_and_prompts_are_kept_apart() -> None:
    rows = [episode(0, (0.0, 1.0)), episode(1, (0.0, 0.0)), episode(0, (7.0, 7.0), uid="q")]
    assert by_turn(rows, name="trloo", discount=0.5) == [
        pytest.approx([0.5, 1.0]),
        pytest.approx([-0.5, -1.0]),
        pytest.approx([10.5, 7.0]),
    ]


def test_an_episode_without_rewards_by_turn_has_its_reward_in_the_last_one() -> None:
    spans = ((0, 2), (3, 5))
    rows = [Outcome(0, "p", i, reward=float(i), turns=Turns(spans), length=5, tokens=4) for i in range(2)]
    assert by_turn(rows, name="trloo") == [pytest.approx([-1.0, -1.0]), pytest.approx([1.0, 1.0])]


def test_mapo_mixes_the_turns_group_with_the_whole_step() -> None:
    rows = [episode(0, (0.0, 1.0)), episode(1, (0.0, 0.0)), episode(0, (0.0, 0.5), uid="q")]
    # mix 1: normalised at each turn of each prompt; the prompt with one episode has no peers.
    assert by_turn(rows, name="mapo", mix=1.0)[0] == pytest.approx([1.0, 1.0], abs=1e-5)
    assert by_turn(rows, name="mapo", mix=1.0)[2] == pytest.approx([0.0, 0.0])
    # mix 0: whitened over all turns of the step, whose returns are 1, 1, 0, 0, 0.5, 0.5.
    values = np.array([1, 1, 0, 0, 0.5, 0.5])
    white = (values - values.mean()) / values.std()
    assert np.array(by_turn(rows, name="mapo", mix=0.0)).flatten() == pytest.approx(white, abs=1e-5)
    half = np.array(by_turn(rows, name="mapo")).flatten()
    ones = np.array(by_turn(rows, name="mapo", mix=1.0)).flatten()
    assert half == pytest.approx(0.5 * ones + 0.5 * white, abs=1e-5)


def at(row: Outcome, *states: str) -> Outcome:
    return replace(row, turns=replace(row.turns, states=states))


def test_gigpo_compares_turns_that_stood_at_the_same_state() -> None:
    rows = [
        at(episode(0, (0.0, 1.0), reward=1.0), "start", "left"),
        at(episode(1, (0.0, 0.0), reward=0.0), "start", "right"),
        at(episode(2, (0.0, 0.0, 1.0), reward=1.0), "start", "right", "left"),
    ]
    first, second, third = by_turn(rows, name="gigpo", discount=0.5)
    episodes = [1 / 3, -2 / 3, 1 / 3]
    # start: returns 0.5, 0, 0.25; left: 1 and 1, which agree; right: 0 and 0.5.
    assert first == pytest.approx([episodes[0] + 0.25, episodes[0]])
    assert second == pytest.approx([episodes[1] - 0.25, episodes[1] - 0.25])
    assert third == pytest.approx([episodes[2], episodes[2] + 0.25, episodes[2]], abs=1e-7)
    chain = AdvantageChain({"name": "gigpo", "scale": "std", "step_weight": 0.0}, "a test")
    plain = AdvantageChain({"name": "group_mean"}, "a test").estimate(rows)
    assert [float(np.max(np.abs(c))) for c in chain.estimate(rows)] == pytest.approx(np.abs(plain), rel=1e-5)
    assert chain.metrics() == {"gigpo/anchored_share": (7, 7), "gigpo/anchor_size": (9 + 4 + 4, 7)}


def test_a_state_that_only_one_turn_stood_at_has_the_credit_of_the_episode() -> None:
    rows = [at(episode(0, (0.0, 1.0), reward=1.0), "a", "b"), at(episode(1, (0.0,), reward=0.0), "c")]
    assert by_turn(rows, name="gigpo") == [pytest.approx([0.5, 0.5]), pytest.approx([-0.5])]


def test_gains_are_evened_out_over_depth() -> None:
    assert accumulated(np.array([1.0, -0.5, 0.5, 9.0]), 1.0) == pytest.approx([1 / math.sqrt(3), 0.0, 0.5, 0.0])


def test_a2tgpo_adds_the_outcome_to_gains_that_are_normalised_by_turn() -> None:
    rows = [episode(i, (gain, reward), reward=reward) for i, (gain, reward) in enumerate([(0.3, 1.0), (0.1, 0.0)])]
    half = math.sqrt(0.5)  # two values are one half of their gap away from the mean, over a deviation of gap / sqrt(2)
    assert by_turn(rows, name="a2tgpo") == [
        pytest.approx([2 * half, half], abs=1e-4),
        pytest.approx([-2 * half, -half], abs=1e-4),
    ]


def test_a2tgpo_takes_the_outcome_of_a_shorter_episode_for_no_gain() -> None:
    rows = [episode(0, (0.3, 1.0), reward=1.0), episode(1, (0.1, 0.2, 0.0)), episode(2, (0.2, 0.6, 0.0))]
    first, second = (1.0, -1.0, 0.0), (-math.sqrt(0.5), math.sqrt(0.5))  # a gain of two at the second turn
    outcome = math.sqrt(1 / 3)
    assert by_turn(rows, name="a2tgpo") == [
        pytest.approx([first[0] + 2 * outcome, 2 * outcome], abs=1e-4),
        pytest.approx([(first[1] + second[0]) / math.sqrt(2) - outcome, second[0] - outcome, -outcome], abs=1e-4),
        pytest.approx([(first[2] + second[1]) / math.sqrt(2) - outcome, second[1] - outcome, -outcome], abs=1e-4),
    ]


def test_infopo_counts_gains_the_more_the_less_the_outcomes_differ() -> None:
    apart = [episode(i, (gain, reward), reward=reward) for i, (gain, reward) in enumerate([(0.3, 1.0), (0.1, 0.0)])]
    alike = [episode(i, (gain, 1.0), uid="q", reward=1.0) for i, gain in enumerate((0.2, 0.6))]
    half = math.sqrt(0.5)  # of two values, one over the deviation
    rewards = np.array([1.0, 0.0, 1.0, 1.0])
    gate = rewards.std() / (rewards.std() + 0.5)
    assert by_turn([*apart, *alike], name="infopo") == [
        pytest.approx([half + gate * half, half], abs=1e-4),
        pytest.approx([-half - gate * half, -half], abs=1e-4),
        pytest.approx([-half, 0.0], abs=1e-4),
        pytest.approx([half, 0.0], abs=1e-4),
    ]


def test_matchtir_halves_the_credit_of_the_episode_and_of_the_turn() -> None:
    rows = [episode(0, (1.0, 1.0)), episode(1, (0.0, 1.0)), episode(2, (0.5,))]
    sums, first, second = np.array([2.0, 1.0, 0.5]), np.array([1.9, 0.9, 0.5]), [0.0, 0.0]
    whole, turn = ((x - x.mean()) / x.std(ddof=1) for x in (sums, first))
    found = by_turn(rows, name="matchtir")
    assert [one[0] for one in found] == pytest.approx((whole + turn) / 2, abs=1e-5)
    assert [one[1] for one in found[:2]] == pytest.approx((whole[:2] + second) / 2, abs=1e-5)


def test_agents_with_other_ranges_of_reward_get_credit_of_one_size() -> None:
    def played(sample: int, reward: float, *agents: str, uid: str = "p") -> Outcome:
        outcome = episode(sample, (0.0,) * len(agents), uid=uid, reward=reward)
        return replace(outcome, turns=replace(outcome.turns, agents=agents))

    rows = [played(0, 1.0, "solver", "critic"), played(1, 0.0, "solver", "critic", "critic"), played(2, 11.0, "judge")]
    two, three = np.array([1.0, 0.0]), np.array([1.0, 0.0, 0.0])
    solver, critic = ((x - x.mean()) / x.std(ddof=1) for x in (two, three))
    first, second, alone = by_turn(rows, name="dr_mas")
    assert first == pytest.approx([solver[0], critic[0]], abs=1e-5)
    assert second == pytest.approx([solver[1], critic[1], critic[2]], abs=1e-5)
    assert alone == [11.0]  # one sample of the judge keeps its reward
    single = [played(i, float(i), "solver") for i in range(3)]
    assert [a for (a,) in by_turn(single, name="dr_mas")] == pytest.approx([-1.0, 0.0, 1.0], abs=1e-5)


@pytest.mark.parametrize(("name", "factor"), [("ace", 1.0 + math.log(2.0)), ("sngs", 0.75)])
def test_credit_by_token_is_punished_where_it_is_negative(name: str, factor: float) -> None:
    rows = [
        Outcome(
            0,
            "p",
            i,
            reward=reward,
            length=4,
            tokens=4,
            turns=Turns(((0, 2), (2, 4)), turns),
            sums={"behaviour": -1.0, REFERENCE: -1.0},
        )
        for i, (reward, turns) in enumerate([(1.0, (0.0, 1.0)), (0.0, (1.0, 0.0))])
    ]
    plain, found = (
        AdvantageChain([{"name": "mapo", "mix": 0.0, "discount": 0.0}, *more], "a test").estimate(rows)
        for more in ([], [{"name": name}])
    )
    for before, after in zip(plain, found, strict=True):
        assert {*np.sign(before)} == {-1.0, 1.0}  # both signs in one response
        assert after == pytest.approx(np.where(before < 0, before * factor, before), rel=1e-6)
