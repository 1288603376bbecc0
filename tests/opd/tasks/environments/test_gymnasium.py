"""Environments in Gymnasium's shape: classes of one's own, and registered ids where Gymnasium is installed."""

from string import printable
from types import SimpleNamespace
from typing import Any

import pytest

from opd.config import parse_settings
from opd.errors import ConfigError
from opd.tasks.environments.gymnasium import Gymnasium, GymnasiumOptions
from opd.tasks.environments.pool import EpisodeError
from opd.tasks.environments.worlds import InProcess
from opd.tasks.prompt import Prompt

HERE = "tests.opd.tasks.environments.test_gymnasium"
PROMPT = Prompt.make("Guess.", answer="6", extra={"hint": "below 9"})


class Guess:
    """A number is guessed in as many tries."""

    closed = False

    def __init__(self, tries: int = 2) -> None:
        self.tries = tries

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        assert options is not None
        self.goal, self.left = str(options["answer"]), self.tries
        return f"{options['prompt']} {options['hint']}, seed {seed}", {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        right = str(action) == self.goal
        return "" if right else f"not {action!r}", float(right), right, not self.left, {"success": right}

    def close(self) -> None:
        self.closed = True


class Discrete:
    """The part of gymnasium.spaces.Discrete that is read."""

    n, start = 9, 1


class Text: ...


class Numbers(Guess):
    observation_space, action_space = Text(), Discrete()


class Pixels(Guess):
    observation_space = SimpleNamespace()


class Continuous(Guess):
    action_space = SimpleNamespace()


class Vector(Guess):
    """Declares nothing and observes no text."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return [0.5, 1.0], {}


def made(name: str, **arguments: Any) -> Gymnasium:
    env = f"{HERE}:{name}" if name in globals() else name
    return Gymnasium(parse_settings(GymnasiumOptions, {"env": env, "arguments": arguments}))


def test_an_episode_is_told_the_prompt_and_ends_with_a_right_guess() -> None:
    env = made("Guess", tries=3)
    assert env.reset(PROMPT, 7).text == "Guess. below 9, seed 7"
    wrong = env.step("5")
    assert (wrong.text, wrong.reward, wrong.done, wrong.success) == ("not '5'", 0.0, False, None)
    right = env.step("6")
    assert (right.text, right.reward, right.done, right.success) == ("", 1.0, True, True)
    env.close()
    assert env.world.closed


def test_an_episode_that_is_truncated_has_ended_without_success() -> None:
    env = made("Guess", tries=1)
    env.reset(PROMPT, 0)
    seen = env.step("5")
    assert seen.done and seen.success is False


def test_a_discrete_action_is_the_last_number_and_none_is_answered() -> None:
    env = made("Numbers")
    env.reset(PROMPT, 0)
    for nonsense in ("up", "0", "10"):
        assert env.step(nonsense).text == "Reply with a number from 1 to 9."
    assert env.world.left == 2
    assert env.step("Not 5, I say 6.").success


def test_what_is_not_in_text_is_refused_or_breaks_its_own_episode() -> None:
    with pytest.raises(ConfigError, match="not text; wrap it"):
        made("Pixels")
    with pytest.raises(ConfigError, match="text or whole numbers"):
        made("Continuous")
    worlds = InProcess({"name": "gymnasium", "options": {"env": f"{HERE}:Vector"}})
    seen = worlds.reset({0: (PROMPT, 0)})[0]
    assert isinstance(seen, EpisodeError) and seen.kind == "invalid" and "list, not text" in seen.reason
    assert worlds.failures["invalid"] == 1
    worlds.close()


def test_registered_ids_are_made_by_gymnasium() -> None:
    gymnasium: Any = pytest.importorskip("gymnasium", reason="Gymnasium is not installed; run by `make envs`")

    class Registered(Guess, gymnasium.Env):  # type: ignore[misc]
        observation_space, action_space = (
            gymnasium.spaces.Text(99, min_length=0, charset=printable),
            gymnasium.spaces.Discrete(9, start=1),
        )

    gymnasium.register("OpdGuess-v0", entry_point=Registered)
    try:
        env = made("OpdGuess-v0", tries=4)
        env.reset(PROMPT, 0)
        assert env.step("I say 6").success
        env.close()
        with pytest.raises(ConfigError, match="observes Discrete"):
            made("FrozenLake-v1")
        with pytest.raises(ConfigError, match="made by gymnasium"):
            made("NoSuchThing-v0")
    finally:
        del gymnasium.registry["OpdGuess-v0"]
