"""The interface of environments: reset, step, close. Any class with these methods will do; no base class is needed.

    class Echo:
        Options = EchoOptions                       # pydantic settings

        def __init__(self, options): ...
        def reset(self, prompt, seed): return Observation("Say something.")
        def step(self, action): return Observation(f"You said {action}.", done=True, reward=1.0)
        def close(self): ...

A prompt names its environment in `Prompt.extra["environment"]`, {"name": ..., "options": {...}}.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from opd.config import Settings
from opd.errors import DataError, short
from opd.tasks.prompt import Prompt
from opd.tasks.verdict import Verdict

_MOST_REWARD = 1e9
"""Rewards are added up and squared, in single precision too, which larger ones would make infinite."""
ENVIRONMENT, PATH = "environment", "path"
"""Keys of `Prompt.extra`: the environment, and a list of actions that solve the task (a gold or recorded path)."""


class NoPlaceError(DataError):
    """An episode cannot begin, because all places of the environment are taken; once another has ended, it can."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the student is shown after a reset or an action.

    Attributes:
        text: the text that the student reads.
        results: results of the action's tool calls, in order; the student reads them before `text`, in the tool role
            of its chat template.
        tools: JSON schemas of the tools that the student may call; the same throughout an episode.
        reward: reward of the action; None if it has none yet.
        done: whether the episode has ended.
        success: whether the task was solved; None before the end, or if the environment cannot tell.
        info: anything else, for metrics and recordings, as JSON values. "state" identifies the environment's state if
            the text does not (for credit among equal states), "agent" names who acts next if there are several agents,
            and "measures" maps names to numbers measured of the action.
    """

    text: str
    tools: tuple[Mapping[str, Any], ...] = ()
    reward: float | None = None
    done: bool = False
    success: bool | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    results: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The observation as JSON values."""
        return {
            "text": self.text,
            "tools": [dict(tool) for tool in self.tools],
            "reward": self.reward,
            "done": self.done,
            "success": self.success,
            "info": dict(self.info),
            "results": list(self.results),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, longest: int) -> "Observation":
        """Read and check what `to_dict` returned.

        Raises:
            DataError: if the text is not a string or not valid Unicode, if text and results together are longer than
                `longest` characters, if the reward is not a number from -1e9 to 1e9, or if results, tools or info have
                the wrong type.
        """
        text, reward = data.get("text"), data.get("reward")
        if not isinstance(text, str):
            raise DataError(f"the observation is {type(text).__name__}, not text")
        # Environments are user code, so everything they return is checked here, whether or not it came from a process.
        tools, info, results = data.get("tools") or (), data.get("info") or {}, data.get("results") or ()
        if not (isinstance(results, (list, tuple)) and all(isinstance(result, str) for result in results)):
            raise DataError("a tool's result is not text")
        if not (isinstance(tools, (list, tuple)) and all(isinstance(tool, Mapping) for tool in tools)):
            raise DataError("its tools are not a list of JSON schemas")
        if not (isinstance(info, Mapping) and isinstance(info.get("bad_calls", 0), (int, float))):
            raise DataError("its info is not a mapping, or info.bad_calls is not a number")
        # A lone surrogate is valid in a Python str, but no tokenizer accepts it.
        try:
            "".join([text, *results]).encode()
        except UnicodeEncodeError as error:
            raise DataError(f"the observation is not Unicode text ({error.reason})") from error
        length = len(text) + sum(map(len, results))
        if length > longest:
            raise DataError(f"the observation has {length} characters, over the limit of {longest}")
        if reward is not None and not (isinstance(reward, (int, float)) and abs(reward) <= _MOST_REWARD):
            raise DataError(f"the reward {short(reward)} is not a number from -1e9 to 1e9")
        return cls(
            text=text,
            tools=tuple(tools),
            reward=None if reward is None else float(reward),
            done=bool(data.get("done")),
            success=data.get("success"),
            info=info,
            results=tuple(results),
        )


@dataclass(frozen=True, slots=True)
class Standing:
    """Progress of an episode, from environments that know the shortest way to their goal (method `standing`).

    Attributes:
        needed: how many more actions perfect play needs.
        lost: whether the next of these actions only undoes a mistake.
    """

    needed: int
    lost: bool


def measures_of(seen: Observation) -> dict[str, float]:
    """The finite numbers in an observation's "measures", by name; anything else there is ignored."""
    found = seen.info.get("measures")
    items = found.items() if isinstance(found, Mapping) else ()
    return {str(k): float(v) for k, v in items if isinstance(v, (int, float)) and math.isfinite(v)}


@runtime_checkable
class Environment(Protocol):
    """What an environment must provide. It plays one episode at a time; `reset` begins the next."""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Begin an episode. Equal prompts and seeds, as all samples of a prompt have, must begin it in the same way."""
        ...

    def step(self, action: str) -> Observation:
        """Carry out an action. An action that makes no sense must give an observation, not an error."""
        ...

    def close(self) -> None:
        """Release the environment's resources."""
        ...


class EnvironmentTask:
    """Base class of the built-in environments that are also procedural tasks: they draw the prompts that they play."""

    Options: ClassVar[type[Settings]]
    name: ClassVar[str]

    def __init__(self, options: Any) -> None:
        self.options = options

    def make_prompt(self, text: str, path: list[str] | None, *, domain: str | None = None, **extra: Any) -> Prompt:
        """A prompt that names this environment and carries the path that solves it, if one is known.

        Its domain is the environment's name unless `domain` is given.
        """
        place = {"name": self.name, "options": self.options.model_dump(mode="json")}
        known = {} if path is None else {PATH: path}
        return Prompt.make(text, domain=domain or self.name, extra={ENVIRONMENT: place, **known, **extra})

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """Always an unknown verdict, because the episode is judged, not the text."""
        return Verdict.unknown("an episode is judged by its environment, not by its text")

    def labels(self) -> frozenset[tuple[str | None, str | None]]:
        """All pairs (teacher, domain) of its prompts, as in `opd.tasks.source.PromptSource`."""
        return frozenset({(None, self.name)})

    def close(self) -> None:
        """Nothing to release."""
