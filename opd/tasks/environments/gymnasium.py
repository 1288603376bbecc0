"""Text environments with Gymnasium's interface, by registered id or, for a class, by dotted path.

    class Guess:                                              # gymnasium.Env need not be inherited
        def reset(self, *, seed=None, options=None): ...      # (observation, info)
        def step(self, action): ...                           # (observation, reward, terminated, truncated, info)

    {"prompt": "...", "environment": {"name": "gymnasium", "options": {"env": "mine:Guess", "arguments": {"most": 9}}}}

The environment's `reset` gets the prompt's columns as `options`. The action is the whole reply or, if `action_space` is
Discrete, the last whole number in it. A declared space must be Text; that of actions may also be Discrete. An
observation that is not text ends its episode as invalid. At the end of an episode `info["success"]` or
`info["is_success"]` says whether the task was solved.
"""

import re
from importlib import import_module
from typing import Any, ClassVar

from pydantic import Field

from opd.config import Settings
from opd.errors import ConfigError
from opd.registry import Registry
from opd.tasks.environments.base import Observation
from opd.tasks.prompt import Prompt

_CLASSES = Registry("gymnasium environment", "opd.gymnasium_environments")


class GymnasiumOptions(Settings):
    """Which environment."""

    env: str = Field(
        description='Environment to make: a registered id such as "Name-v0", or a dotted path "package.module:Class".'
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments with which the environment is made."
    )


class Gymnasium:
    """A Gymnasium environment whose observations are text.

    Raises:
        ConfigError: if an id is given but Gymnasium is not installed or does not know it, or if a space is of another
            kind than the module allows.
    """

    Options: ClassVar[type[Settings]] = GymnasiumOptions

    def __init__(self, options: GymnasiumOptions) -> None:
        self._name = options.env
        self.world = self._make(options)
        seen, acts = (getattr(self.world, space, None) for space in ("observation_space", "action_space"))
        if seen is not None and type(seen).__name__ != "Text":
            raise ConfigError(
                f"environment {self._name!r} observes {seen}, not text; wrap it so that its observations are text."
            )
        if acts is not None and type(acts).__name__ not in ("Text", "Discrete"):
            raise ConfigError(f"environment {self._name!r} takes {acts}; its actions must be text or whole numbers.")
        self._numbers: range | None = None
        if type(acts).__name__ == "Discrete":
            space: Any = acts
            self._numbers = range(int(space.start), int(space.start) + int(space.n))

    def _make(self, options: GymnasiumOptions) -> Any:
        if ":" in options.env:
            return _CLASSES.load(options.env)(**options.arguments)
        try:
            gymnasium: Any = import_module("gymnasium")
        except ImportError as error:
            raise ConfigError(
                f"environment {options.env!r} needs the package gymnasium ({error}); install gymnasium."
            ) from error
        try:
            return gymnasium.make(options.env, **options.arguments)
        except (gymnasium.error.Error, TypeError) as error:
            raise ConfigError(f"environment {options.env!r} cannot be made by gymnasium: {error}.") from error

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Begin an episode."""
        content: Any = prompt.text if prompt.messages is None else [dict(message) for message in prompt.messages]
        found, _ = self.world.reset(seed=seed, options={**prompt.extra, "prompt": content, "answer": prompt.answer})
        return Observation(found)

    def step(self, action: str) -> Observation:
        """Act. With numbers as actions, a reply without a valid number gets a hint and changes nothing."""
        chosen: str | int = action
        if self._numbers is not None:
            numbers = re.findall(r"-?\d+", action)
            if not numbers or int(numbers[-1]) not in self._numbers:
                return Observation(f"Reply with a number from {self._numbers[0]} to {self._numbers[-1]}.")
            chosen = int(numbers[-1])
        found, reward, terminated, truncated, info = self.world.step(chosen)
        done = bool(terminated or truncated)
        success = info.get("success", info.get("is_success")) if done else None
        return Observation(found, reward=float(reward), done=done, success=None if success is None else bool(success))

    def close(self) -> None:
        """Close the environment if it has a method for that."""
        getattr(self.world, "close", lambda: None)()
