"""The interface to episodes of one environment, and its implementation in this process; `pool` uses other processes."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from opd.errors import CancelledError, ConfigError, DataError
from opd.procs.host import explain
from opd.tasks.environments.base import Environment, NoPlaceError, Observation
from opd.tasks.environments.pool import EpisodeError, Failure, PoolSettings
from opd.tasks.environments.service import answer_with, make_environment
from opd.tasks.prompt import Prompt

Seen = Observation | EpisodeError
log = logging.getLogger(__name__)


class Worlds(Protocol):
    """Episodes of one environment, each identified by a number that the caller chooses."""

    def reset(self, episodes: Mapping[int, tuple[Prompt, int]]) -> dict[int, Seen]:
        """Begin episodes, from the prompt and seed of each."""

    def step(self, actions: Mapping[int, str]) -> dict[int, Seen]:
        """Carry out an action in each of the given episodes."""

    def close(self) -> None:
        """Release all resources."""


class InProcess(Worlds):
    """`Worlds` in this process. As in a pool, an error or an invalid answer costs only its own episode.

    Time and memory are not bounded, and a crash of the interpreter is not survived; these need `EnvironmentPool`.

    Args:
        spec: {"name": registered name or dotted path, "options": its settings}.
        settings: the limits, of which only the one on text is applied here.

    Attributes:
        failures: number of broken episodes, by kind.

    Raises:
        ConfigError: if the environment cannot be made; the message includes the reason.
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
        return {
            number: self._ask(number, partial(_reset, prompt=prompt, seed=seed))
            for number, (prompt, seed) in episodes.items()
        }

    def step(self, actions: Mapping[int, str]) -> dict[int, Seen]:
        return {number: self._ask(number, partial(_step, action=action)) for number, action in actions.items()}

    def close(self) -> None:
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
            # Through JSON text, as from a process, so that whatever JSON cannot represent fails here too.
            reply = json.loads(json.dumps(answer_with(call(self._world(number)))))
        except CancelledError:
            raise  # a signal came while the environment ran
        except (Exception, SystemExit) as error:
            return self._fail(number, "full" if isinstance(error, NoPlaceError) else "raised", explain(error))
        try:
            return Observation.from_dict(reply["observation"], longest=self.settings.text_characters)
        except DataError as error:
            return self._fail(number, "invalid", str(error))

    def _fail(self, number: int, kind: Failure, reason: str) -> EpisodeError:
        self.failures[kind] += 1
        world = self._worlds.pop(number, None)
        if world is not None:
            self._end(world)
        return EpisodeError.of(kind, reason)

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
