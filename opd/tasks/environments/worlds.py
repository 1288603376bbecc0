"""Episodes of one environment, in processes (`pool`) or in this one."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from opd.errors import CancelledError, ConfigError, DataError
from opd.tasks.environments.base import Environment, Observation
from opd.tasks.environments.host import answer_with, explain, make_environment
from opd.tasks.environments.pool import EpisodeError, Failure, PoolSettings
from opd.tasks.prompt import Prompt

Seen = Observation | EpisodeError
log = logging.getLogger(__name__)


class Worlds(Protocol):
    """Episodes of one environment, each named by a number."""

    def reset(self, episodes: Mapping[int, tuple[Prompt, int]]) -> dict[int, Seen]:
        """Begin episodes, each with its prompt and seed."""

    def step(self, actions: Mapping[int, str]) -> dict[int, Seen]:
        """Act."""

    def close(self) -> None:
        """Release what they hold."""


class InProcess:
    """`Worlds` in this process: an error, or an invalid answer, costs its own episode as in a pool.

    Nothing here bounds time or memory, or survives a crash of the interpreter: that takes processes.

    Args:
        spec: {"name": registered name or dotted path, "options": its settings}.
        settings: limits, of which those on text hold here.

    Attributes:
        failures: how many episodes broke, by kind.

    Raises:
        ConfigError: when the environment cannot be made; its own sentence follows.
    """

    def __init__(self, spec: Mapping[str, Any], settings: PoolSettings | None = None) -> None:
        self.settings = settings or PoolSettings()
        self.failures: Counter[str] = Counter()
        self._spec = dict(spec)
        self._worlds: dict[int, Environment] = {}
        self._told = False
        try:
            self._spare: Environment | None = make_environment(self._spec)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"environment {spec.get('name')!r} cannot be made: {explain(error)}.") from error

    def reset(self, episodes: Mapping[int, tuple[Prompt, int]]) -> dict[int, Seen]:
        """See `Worlds.reset`."""
        return {
            number: self._ask(number, partial(_reset, prompt=prompt, seed=seed))
            for number, (prompt, seed) in episodes.items()
        }

    def step(self, actions: Mapping[int, str]) -> dict[int, Seen]:
        """See `Worlds.step`."""
        return {number: self._ask(number, partial(_step, action=action)) for number, action in actions.items()}

    def close(self) -> None:
        """See `Worlds.close`."""
        left = [*self._worlds.values(), *([self._spare] if self._spare is not None else [])]
        self._worlds.clear()
        self._spare = None
        for world in left:
            self._end(world)

    def _world(self, number: int) -> Environment:
        if number not in self._worlds:
            spare, self._spare = self._spare, None
            self._worlds[number] = spare if spare is not None else make_environment(self._spec)
        return self._worlds[number]

    def _ask(self, number: int, call: Callable[[Environment], object]) -> Seen:
        try:
            # By way of text, as from a process: what cannot be written as JSON fails here too.
            reply = json.loads(json.dumps(answer_with(call(self._world(number)))))
        except CancelledError:
            raise  # a signal came while the environment ran
        except (Exception, SystemExit) as error:
            return self._fail(number, "raised", explain(error))
        try:
            return Observation.from_dict(reply["observation"], longest=self.settings.text_characters)
        except DataError as error:
            return self._fail(number, "invalid", str(error))

    def _fail(self, number: int, kind: Failure, reason: str) -> EpisodeError:
        self.failures[kind] += 1
        world = self._worlds.pop(number, None)
        if world is not None:
            self._end(world)
        return EpisodeError(kind, reason)

    def _end(self, world: Environment) -> None:
        try:
            world.close()
        except CancelledError:
            raise
        except (Exception, SystemExit) as error:
            if not self._told:  # thousands of episodes would say the same
                log.warning("environment %r did not close: %s.", self._spec.get("name"), explain(error))
            self._told = True


def _reset(world: Environment, prompt: Prompt, seed: int) -> object:
    return world.reset(prompt, seed)


def _step(world: Environment, action: str) -> object:
    return world.step(action)
