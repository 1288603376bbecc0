"""Episodes of one environment, in processes (`pool`) or in this one."""

from collections.abc import Mapping
from typing import Any, Protocol

from opd.tasks.environments.base import Environment, Observation
from opd.tasks.environments.host import make_environment
from opd.tasks.environments.pool import EpisodeError
from opd.tasks.prompt import Prompt

Seen = Observation | EpisodeError


class Worlds(Protocol):
    """Episodes of one environment, each named by a number."""

    def reset(self, episodes: Mapping[int, tuple[Prompt, int]]) -> dict[int, Seen]:
        """Begin episodes, each with its prompt and seed."""

    def step(self, actions: Mapping[int, str]) -> dict[int, Seen]:
        """Act."""

    def close(self) -> None:
        """Release what they hold."""


class InProcess:
    """`Worlds` in this process."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._spec = dict(spec)
        self._worlds: dict[int, Environment] = {}

    def reset(self, episodes: Mapping[int, tuple[Prompt, int]]) -> dict[int, Seen]:
        """See `Worlds.reset`."""
        for number in episodes:
            if number not in self._worlds:
                self._worlds[number] = make_environment(self._spec)
        return {number: self._worlds[number].reset(*episode) for number, episode in episodes.items()}

    def step(self, actions: Mapping[int, str]) -> dict[int, Seen]:
        """See `Worlds.step`."""
        return {number: self._worlds[number].step(action) for number, action in actions.items()}

    def close(self) -> None:
        """See `Worlds.close`."""
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()
