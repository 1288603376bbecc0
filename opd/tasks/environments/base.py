"""What an environment is: reset, step, close. Any class of this shape is one; nothing has to be inherited.

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
from opd.errors import DataError
from opd.tasks.prompt import Prompt
from opd.tasks.verdict import Verdict

ENVIRONMENT, PATH = "environment", "path"
"""Keys of `Prompt.extra`: the environment, and a list of actions that solves it (a gold or recorded path)."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the student is shown after a reset or an action.

    Attributes:
        text: what it reads.
        results: of the tool calls in the action, in order; the student reads them before `text`, in the tool role of
            its chat template.
        tools: JSON schemas of the tools it may call; the same in a whole episode.
        reward: of the action; None where there is none yet.
        done: whether the episode has ended.
        success: whether the task was solved; None before the end, and where the environment cannot tell.
        info: anything else, for metrics and recordings; JSON values. "state" says where the environment stands, where
            its text does not tell (for credit among equal states), "agent" who acts next, where there are several,
            and "measures" what was measured of the action, numbers by name.
    """

    text: str
    tools: tuple[Mapping[str, Any], ...] = ()
    reward: float | None = None
    done: bool = False
    success: bool | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    results: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
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
        """What `to_dict` gave, checked.

        Raises:
            DataError: for text that is not a string, not Unicode, or longer than `longest` characters, a reward that is
                not finite, or tools and info that are not what they should be.
        """
        text, reward = data.get("text"), data.get("reward")
        if not isinstance(text, str):
            raise DataError(f"the observation is {type(text).__name__}, not text")
        # Environments are the users' code: what they answer is checked here, whether it came from a process or not.
        tools, info, results = data.get("tools") or (), data.get("info") or {}, data.get("results") or ()
        if not (isinstance(results, (list, tuple)) and all(isinstance(result, str) for result in results)):
            raise DataError("a tool's result is not text")
        if not (isinstance(tools, (list, tuple)) and all(isinstance(tool, Mapping) for tool in tools)):
            raise DataError("its tools are not a list of JSON schemas")
        if not (isinstance(info, Mapping) and isinstance(info.get("bad_calls", 0), (int, float))):
            raise DataError("its info is not a mapping, or info.bad_calls is not a number")
        # Half of a surrogate pair is a str in Python, but no tokenizer takes it.
        try:
            "".join([text, *results]).encode()
        except UnicodeEncodeError as error:
            raise DataError(f"the observation is not Unicode text ({error.reason})") from error
        length = len(text) + sum(map(len, results))
        if length > longest:
            raise DataError(f"the observation has {length} characters, over the limit of {longest}")
        if reward is not None and not (isinstance(reward, (int, float)) and math.isfinite(reward)):
            raise DataError(f"the reward {reward!r} is not a finite number")
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
    """How an episode stands, from environments that know the shortest way to their end (method `standing`).

    Attributes:
        needed: actions that perfect play still needs.
        lost: whether the next of them only undoes a mistake.
    """

    needed: int
    lost: bool


def measures_of(seen: Observation) -> dict[str, float]:
    """The finite numbers of an observation's "measures"; anything else there is left out."""
    found = seen.info.get("measures")
    items = found.items() if isinstance(found, Mapping) else ()
    return {str(k): float(v) for k, v in items if isinstance(v, (int, float)) and math.isfinite(v)}


@runtime_checkable
class Environment(Protocol):
    """One episode at a time; `reset` begins the next one."""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Begin an episode; equal prompts and seeds, as the samples of a prompt have, begin it equally."""
        ...

    def step(self, action: str) -> Observation:
        """Act. An action that makes no sense is answered by an observation, not by an error."""
        ...

    def close(self) -> None:
        """Release what the environment holds."""
        ...


class EnvironmentTask:
    """Base of our own environments, which are procedural tasks too: they draw the prompts that they play."""

    Options: ClassVar[type[Settings]]
    name: ClassVar[str]

    def __init__(self, options: Any) -> None:
        self.options = options

    def make_prompt(self, text: str, path: list[str] | None, *, domain: str | None = None, **extra: Any) -> Prompt:
        """A prompt that names this environment and carries the path that solves it, where that is known.

        Its domain is the task's name, unless another is given.
        """
        place = {"name": self.name, "options": self.options.model_dump(mode="json")}
        known = {} if path is None else {PATH: path}
        return Prompt.make(text, domain=domain or self.name, extra={ENVIRONMENT: place, **known, **extra})

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """Text alone cannot be judged: the episode is."""
        return Verdict.unknown("an episode is judged by its environment, not by its text")

    def labels(self) -> frozenset[tuple[str | None, str | None]]:
        """See `opd.tasks.source.PromptSource.labels`."""
        return frozenset({(None, self.name)})

    def close(self) -> None:
        """Nothing to release."""
