"""Credit by turn: golden numbers, and ragged episodes."""

from typing import Any

import numpy as np
import pytest

from student.data.outcome import Outcome
from student.rl.advantages.chain import AdvantageChain


def episode(sample: int, rewards: tuple[float, ...], uid: str = "p", reward: float = 0.0) -> Outcome:
    """Turns of two tokens with one of the environment between them."""
    spans = tuple((3 * turn, 3 * turn + 2) for turn in range(len(rewards)))
    length = spans[-1][1]
    return Outcome(0, uid, sample, reward=reward, turn_rewards=rewards, spans=spans, length=length, tokens=length)


def by_turn(outcomes: list[Outcome], **entry: Any) -> list[list[float]]:
    """Credit of each turn, which all its tokens must share; between turns there is none."""
    found = []
    for outcome, credit in zip(outcomes, AdvantageChain(entry, "a test").estimate(outcomes), strict=True):
        assert isinstance(credit, np.ndarray) and credit.dtype == np.float32
        for start, end in outcome.spans:
            assert len(set(credit[start:end].tolist())) == 1
        assert not credit[[end for _, end in outcome.spans[:-1]]].any()
        found.append([float(credit[start]) for start, _ in outcome.spans])
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


def test_a_discount_weighs_later_rewards_less_and_prompts_are_kept_apart() -> None:
    rows = [episode(0, (0.0, 1.0)), episode(1, (0.0, 0.0)), episode(0, (7.0, 7.0), uid="q")]
    assert by_turn(rows, name="trloo", discount=0.5) == [
        pytest.approx([0.5, 1.0]),
        pytest.approx([-0.5, -1.0]),
        pytest.approx([10.5, 7.0]),
    ]


def test_an_episode_without_rewards_by_turn_has_its_reward_in_the_last_one() -> None:
    spans = ((0, 2), (3, 5))
    rows = [Outcome(0, "p", i, reward=float(i), spans=spans, length=5, tokens=4) for i in range(2)]
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
