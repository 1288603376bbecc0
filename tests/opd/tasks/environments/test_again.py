"""Environment again: what attempts are told and paid."""

from typing import Any

import pytest

from opd.config import parse_settings
from opd.errors import ConfigError
from opd.tasks.environments.again import Again, AgainOptions
from opd.tasks.environments.service import make_environment
from opd.tasks.prompt import Prompt
from opd.tasks.verdict import Verdict

PROMPT = Prompt.make("6*7=", answer="42")


def play(*attempts: str, prompt: Prompt = PROMPT, **options: Any) -> list[Any]:
    world = Again(parse_settings(AgainOptions, options))
    assert world.reset(prompt, 0).text == ""
    seen = [world.step(attempt) for attempt in attempts]
    world.close()
    return seen


def test_wrong_attempts_are_met_with_a_word_and_a_right_one_ends() -> None:
    wrong, right = play("It is 41.", "So 42.", attempts=5)
    assert wrong.text == "That is not right. Think again." and not wrong.done and wrong.reward == 0.0
    assert right.done and right.success and right.reward == 1.0 and right.text == ""


def shouts(prompt: Prompt, answer: str) -> bool:
    """A verifier that is a plain function."""
    return answer == f"{prompt.answer}!"


class Patient:
    """A verifier whose time limit can be seen, without a default as in docs/prompts.md."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        return Verdict.unknown(f"waited {self._timeout:g}")

    def close(self) -> None:
        """Nothing is held."""


def test_verifiers_of_ones_own_judge_attempts_within_the_time_limit() -> None:
    wrong, right = play("42", "42!", verifier=f"{__name__}:shouts")
    assert not wrong.done and right.success
    (seen,) = play("42", verifier=f"{__name__}:Patient", verifier_timeout=3)
    assert seen.done and seen.info["unknown"] == "waited 3"


def test_the_last_attempt_ends_it_and_the_verifier_may_say_why() -> None:
    first, last = play("41", "40", word="No: {reason}")
    assert first.text.startswith("No: ") and first.text != "No: {reason}"
    assert last.done and last.success is False


@pytest.mark.parametrize(
    ("attempts", "reward"),
    [
        (["42"], 1.0),
        (["1", "1", "42"], 0.25 - 0.5 / 3),
        (["1", "2", "42"], 0.25),
        (["1", "1", "1", "1", "1"], -0.4),
        (["1", "2", "3", "4", "5"], 0.0),
    ],
)
def test_ufo_pays_early_answers_and_punishes_repeated_ones(attempts: list[str], reward: float) -> None:
    seen = play(*attempts, attempts=5, reward="ufo")
    assert [one.reward for one in seen[:-1]] == [0.0] * (len(attempts) - 1)
    assert seen[-1].reward == pytest.approx(reward) and seen[-1].done


@pytest.mark.parametrize(
    ("attempts", "rewards"), [(("1", "42"), [0.0, 11.0]), (("42", "1"), [1.0, -10.0]), (("42", "42"), [1.0, 1.0])]
)
def test_score_pays_the_step_from_one_attempt_to_the_next(attempts: tuple[str, str], rewards: list[float]) -> None:
    seen = play(*attempts, reward="score")
    assert [one.reward for one in seen] == rewards and [one.done for one in seen] == [False, True]


def test_last_pays_the_last_of_all_attempts_alone_whatever_came_before() -> None:
    for attempts, rewards in (("42", "1", "42"), [0.0, 0.0, 1.0]), (("42", "42", "1"), [0.0, 0.0, 0.0]):
        seen = play(*attempts, reward="last", attempts=3, word="Look again, and correct what is wrong, if anything.")
        assert [one.reward for one in seen] == rewards and [one.done for one in seen] == [False, False, True]
        assert "not right" not in seen[0].text


def test_a_verdict_that_is_unknown_ends_the_episode_without_one() -> None:
    (seen,) = play("42", prompt=Prompt.make("?"))
    assert seen.done and seen.success is None and seen.reward is None and seen.info["unknown"]


def test_options_that_cannot_work_are_refused_and_the_name_is_known() -> None:
    with pytest.raises(ConfigError, match="set it to 2"):
        parse_settings(AgainOptions, {"attempts": 3, "reward": "score"})
    made = make_environment({"name": "again", "options": {"attempts": 3}})
    made.close()
