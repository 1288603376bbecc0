"""Tasks from reasoning-gym, by the name of a dataset, with the dataset's own verifier.

With `again`, for example {"dataset": "countdown", "again": {"attempts": 4, "reward": "ufo"}}, a problem becomes an
episode of several attempts.

Some of its verifiers evaluate expressions or solve puzzles and may take long, so they run in a worker process, which
recreates the problem from its number.
"""

import json
import warnings
from collections.abc import Mapping
from functools import lru_cache
from random import Random
from typing import Any, ClassVar

from pydantic import Field

from opd.config import Settings, parse_settings
from opd.errors import ConfigError
from opd.procs.children import ChildFailed
from opd.procs.host import Service
from opd.procs.workers import Workers
from opd.tasks.environments.again import AgainOptions
from opd.tasks.environments.base import ENVIRONMENT
from opd.tasks.prompt import Prompt
from opd.tasks.source import Labels
from opd.tasks.verdict import Verdict, Verifier

_SIZE = 2**30
"""Problems have numbers below this; the number determines the problem."""


class ReasoningGymOptions(Settings):
    """Which dataset, and how hard its problems are."""

    dataset: str = Field(description="Name of a reasoning-gym dataset, for example leg_counting.")
    config: dict[str, Any] = Field(
        default_factory=dict, description="Settings of the dataset itself, except size and seed, which the run sets."
    )
    timeout: float = Field(
        default=10.0,
        gt=0,
        description="Seconds that the check of one answer may take; after that its verdict is unknown.",
    )
    system: str | None = Field(
        default=None, description="System message; with one, prompts are chat messages instead of plain text."
    )
    again: dict[str, Any] | None = Field(
        default=None,
        description="Settings of environment again, which gives several attempts at each problem; the dataset's own "
        "check judges them. Default: a single attempt.",
    )


class ReasoningGym:
    """Any dataset of reasoning-gym with its own verifier.

    Problems of one dataset; `Prompt.extra` identifies them for the verifier.
    """

    Options: ClassVar[type[Settings]] = ReasoningGymOptions

    def __init__(self, options: ReasoningGymOptions) -> None:
        self.options = options
        self._data = open_dataset(options.dataset, options.config)
        self._verifier = GymVerifier(options.timeout)
        self._played: dict[str, Any] = {}
        if options.again is not None:
            again = {"verifier_timeout": options.timeout, **options.again, "verifier": "reasoning_gym"}
            parse_settings(AgainOptions, again, source=f"again of dataset {options.dataset}")
            self._played = {ENVIRONMENT: {"name": "again", "options": again}}

    def draw(self, random: Random) -> Prompt:
        """Draw a problem."""
        number = random.randrange(_SIZE)
        entry = self._data[number]
        question, answer = str(entry["question"]), entry["answer"]
        system = self.options.system
        return Prompt.make(
            question
            if system is None
            else [{"role": "system", "content": system}, {"role": "user", "content": question}],
            answer=None if answer is None else str(answer),
            domain=self.options.dataset,
            extra={"dataset": self.options.dataset, "config": self.options.config, "number": number, **self._played},
        )

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """Score a completion with the dataset's `score_answer`."""
        return self._verifier.verify(prompt, completion)

    def labels(self) -> Labels:
        """All problems have the domain of the dataset and no teacher."""
        return frozenset({(None, self.options.dataset)})

    def close(self) -> None:
        """Stop the worker processes."""
        self._verifier.close()


class GymVerifier(Verifier):
    """The check of the reasoning-gym dataset that the problem comes from.

    Judges by the dataset that a prompt's columns `dataset`, `config` and `number` name.

    A completion may wrap its answer in `<answer>...</answer>`; otherwise all of it is the answer. Partial scores of the
    dataset become the verdict's value.

    Args:
        timeout: seconds after which a check counts as unknown.
    """

    def __init__(self, timeout: float = 10.0) -> None:
        self._workers = Workers("opd.tasks.gym:Scorer", timeout)

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """Score a completion with the dataset's `score_answer`."""
        if not {"dataset", "number"} <= prompt.extra.keys():
            return Verdict.unknown(
                "the prompt has no columns 'dataset' and 'number'; name them in prompts.keep_columns"
            )
        request = {
            "dataset": prompt.extra["dataset"],
            "config": prompt.extra.get("config", {}),
            "number": prompt.extra["number"],
            "completion": completion,
        }
        try:
            return Verdict.score(self._workers.ask(request)["score"])
        except ChildFailed as error:
            return Verdict.unknown(str(error))

    def close(self) -> None:
        """Stop the worker processes."""
        self._workers.close()


def open_dataset(name: str, config: Mapping[str, Any]) -> Any:
    """A reasoning-gym dataset, whose problems depend only on their number.

    Raises:
        ConfigError: if reasoning-gym is not installed, or has no such dataset or setting.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # from a dependency, on the first import
            from reasoning_gym import create_dataset
    except ImportError as error:
        raise ConfigError(
            f"task reasoning_gym needs the package reasoning-gym ({error}); install opd[envs]."
        ) from error
    for key in ("size", "seed"):
        if key in config:
            raise ConfigError(f"the run sets reasoning-gym's {key!r} itself; remove it from config.")
    try:
        return create_dataset(name, size=_SIZE, seed=0, **config)
    except (ValueError, TypeError, AssertionError, KeyError) as error:
        raise ConfigError(f"reasoning-gym dataset {name!r} with config {dict(config)!r}: {error}.") from error


class Scorer(Service):
    """The service: scores completions with the datasets' own checks."""

    def __init__(self, argument: str) -> None:
        super().__init__(argument)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # from a dependency, on the first import
            import reasoning_gym  # noqa: F401

    def answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Score request["completion"]."""
        from reasoning_gym.utils import extract_answer

        data = _cached(request["dataset"], json.dumps(request["config"]))
        answer = extract_answer(request["completion"])
        text = request["completion"].strip() if answer is None else answer
        return {"score": float(data.score_answer(text, data[request["number"]]))}


@lru_cache(maxsize=64)
def _cached(name: str, config: str) -> Any:
    return open_dataset(name, json.loads(config))
