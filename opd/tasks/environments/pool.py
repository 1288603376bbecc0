"""Plays many episodes at once, each in its own process, with a time limit for every call.

    with EnvironmentPool({"name": "lock"}, PoolSettings()) as pool:
        seen = pool.reset({0: (prompt, 7), 1: (other, 8)})      # {0: Observation, 1: Observation}
        seen = pool.step({0: "4", 1: "b"})

An environment that raises, hangs, dies or gives an invalid answer costs only its own episode: its answer is an
`EpisodeError`, and its slot gets a fresh process for the next episode. Nothing is retried.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import Field

from opd.config import Settings
from opd.errors import ConfigError, DataError, one_line
from opd.procs.children import Answer, Child, ChildFailed, Host, ask
from opd.tasks.environments.base import Observation
from opd.tasks.prompt import Prompt

Failure = Literal["raised", "hung", "died", "invalid", "diverged", "full"]
_MOST_REASON = 500


class PoolSettings(Settings):
    """Limits of episodes."""

    step_seconds: float = Field(
        30.0,
        gt=0,
        description="Seconds that one action of an episode may take; after that its environment counts as hung.",
    )
    reset_seconds: float = Field(
        120.0, gt=0, description="Seconds that importing an environment, or starting an episode, may take."
    )
    text_characters: int = Field(
        32_768, ge=1, description="Maximum characters of an observation; a longer one ends the episode with an error."
    )
    memory_mib: int = Field(0, ge=0, description="Memory limit of one environment's process in MiB; 0 means no limit.")


@dataclass(frozen=True, slots=True)
class EpisodeError:
    """Why an episode broke.

    Attributes:
        kind: raised (the environment raised an exception), hung (over the time limit), died (its process ended),
            invalid (its answer is not an observation), diverged (a repeated action got a different answer) or full
            (the episode did not begin, because all places of the environment are taken).
        reason: one clause for people to read, on one line.
    """

    kind: Failure
    reason: str

    @classmethod
    def of(cls, kind: Failure, reason: str) -> "EpisodeError":
        """An error whose reason comes from elsewhere, and is shortened."""
        return cls(kind, one_line(reason, _MOST_REASON))


class EnvironmentPool:
    """Processes that play episodes of one environment.

    Args:
        spec: {"name": registered name or dotted path, "options": its settings}.
        settings: the limits.

    Attributes:
        failures: number of broken episodes, by kind.

    Raises:
        ConfigError: if the environment cannot be made; the message includes the reason.
    """

    def __init__(self, spec: Mapping[str, Any], settings: PoolSettings | None = None) -> None:
        self.settings = settings or PoolSettings()
        self.failures: Counter[str] = Counter()
        self._slots: dict[int, Child] = {}
        self._host = Host(
            "opd.tasks.environments.service:Episodes",
            json.dumps(dict(spec)),
            memory_mib=self.settings.memory_mib,
            seconds=self.settings.reset_seconds,
        )
        try:
            self._host.start()
        except ChildFailed as error:
            more = "; raise limits.reset_seconds" if error.kind == "hung" else ""
            reason = f"{str(error).rstrip('.')}{more}"
            raise ConfigError(f"environment {spec.get('name')!r} cannot be made: {reason}.") from error

    def __enter__(self) -> "EnvironmentPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reset(self, episodes: Mapping[int, tuple[Prompt, int]]) -> dict[int, "Observation | EpisodeError"]:
        """Begin episodes, from the prompt and seed of each; the keys are numbers chosen by the caller."""
        broken: dict[int, Observation | EpisodeError] = {}
        for number in episodes:
            if number not in self._slots:
                try:
                    self._slots[number] = self._host.connect()
                except ChildFailed as error:
                    broken[number] = self._fail(number, error.kind, str(error))
        requests = {
            number: {"call": "reset", "prompt": asdict(prompt), "seed": seed}
            for number, (prompt, seed) in episodes.items()
            if number not in broken
        }
        answers = broken | self._ask(requests, self.settings.reset_seconds)
        return {number: answers[number] for number in episodes}

    def step(self, actions: Mapping[int, str]) -> dict[int, "Observation | EpisodeError"]:
        """Carry out an action in each of the given episodes, which must have begun and neither ended nor broken."""
        return self._ask(
            {number: {"call": "step", "action": action} for number, action in actions.items()},
            self.settings.step_seconds,
        )

    def close(self) -> None:
        """Stop all processes."""
        for slot in self._slots.values():
            slot.connection.close()
        self._slots.clear()
        self._host.close()

    def _ask(self, requests: Mapping[int, dict[str, Any]], seconds: float) -> dict[int, "Observation | EpisodeError"]:
        answers = ask({number: (self._slots[number], request) for number, request in requests.items()}, seconds)
        return {number: self._read(number, answer) for number, answer in answers.items()}

    def _read(self, number: int, answer: Answer | ChildFailed) -> "Observation | EpisodeError":
        if isinstance(answer, ChildFailed):
            return self._fail(number, answer.kind, str(answer))
        if "full" in answer:
            return self._fail(number, "full", str(answer["full"]))
        try:
            return Observation.from_dict(answer["observation"], longest=self.settings.text_characters)
        except DataError as error:
            return self._fail(number, "invalid", str(error))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return self._fail(number, "invalid", f"its answer is not understood ({error})")

    def _fail(self, number: int, kind: Failure, reason: str) -> EpisodeError:
        self.failures[kind] += 1
        slot = self._slots.pop(number, None)
        if slot is not None:
            slot.kill()
        return EpisodeError.of(kind, reason)
