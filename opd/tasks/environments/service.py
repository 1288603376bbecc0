"""One environment as a service of `opd.procs`: each child plays one episode at a time.

Requests are {"call": "reset", "prompt": {...}, "seed": 0} and {"call": "step", "action": "..."}; answers are
{"observation": {...}}, or {"full": "..."} if all places of the environment are taken.
"""

import json
from typing import Any

from opd.config import parse_settings
from opd.procs.host import Service, explain
from opd.tasks.environments import ENVIRONMENTS
from opd.tasks.environments.base import Environment, NoPlaceError, Observation
from opd.tasks.prompt import Prompt


def make_environment(spec: dict[str, Any]) -> Environment:
    """An environment from {"name", "options"}.

    Raises:
        ConfigError: if the name is unknown or the options are wrong.
    """
    cls = ENVIRONMENTS.load(spec["name"])
    found: Environment = cls(
        parse_settings(cls.Options, spec.get("options") or {}, source=f"environment {spec['name']}")
    )
    return found


def answer_with(seen: object) -> dict[str, Any]:
    """The answer to send for what an environment returned.

    Raises:
        TypeError: if that is not an observation.
    """
    if not isinstance(seen, Observation):
        raise TypeError(f"it returned {type(seen).__name__} instead of an Observation")
    return {"observation": seen.to_dict()}


class Episodes(Service):
    """The service, made from the JSON text of {"name", "options"}.

    Raises:
        ConfigError: if the environment cannot be made.
    """

    def __init__(self, argument: str) -> None:
        super().__init__(argument)
        self._spec = json.loads(argument)
        make_environment(self._spec).close()  # imports everything before the first fork, and reports mistakes early
        self._environment: Environment | None = None

    def open(self) -> None:
        """Make the environment of this process."""
        self._environment = make_environment(self._spec)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one call."""
        assert self._environment is not None  # since `open`
        try:
            if request["call"] == "reset":
                seen = self._environment.reset(Prompt.restored(request["prompt"]), request["seed"])
            else:
                seen = self._environment.step(request["action"])
        except NoPlaceError as error:
            return {"full": explain(error)}
        return answer_with(seen)

    def close(self) -> None:
        """Close the environment, if it was made."""
        if self._environment is not None:
            self._environment.close()
