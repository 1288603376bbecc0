"""Household tasks in ALFWorld's text engine, in households drawn here or in games that ALFWorld offers for download.

    prompts: {task: alfworld, options: {kinds: [pick_and_place_simple], receptacles: 6}}
    prompts: {task: alfworld, options: {games: ~/.cache/alfworld/json_2.1.1/train}}

Households are drawn like the problems of any procedural task, without files and without a limit on their number. A game
is a file (*.tw-pddl) with its own rules, grammar and usually a path that wins it. Both are deterministic. A command
that makes no sense is answered with "Nothing happens."; an episode that is not won ends after `turns` of the episode's
settings. The engine evaluates parts of a game's grammar as Python, so play only games from a trusted source.

The project does not install the packages: `scripts/envs.sh VENV PYTHON` makes a virtual environment that has them.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from pydantic import Field

from opd.config import Settings
from opd.errors import ConfigError, DataError
from opd.tasks.environments.base import EnvironmentTask, Observation
from opd.tasks.prompt import Prompt
from opd_zoo.environments.household_pddl import shown_names
from opd_zoo.environments.household_rooms import KINDS, Kind
from opd_zoo.environments.households import make_household

HELP = (
    "Reply with one command: go to PLACE, open PLACE, close PLACE, take THING from PLACE, move THING to PLACE, "
    "clean THING with PLACE, heat THING with PLACE, cool THING with PLACE, use THING, examine THING, look or inventory."
)
_BANNER = "-= Welcome to TextWorld, ALFRED! =-"
_SPARE: list[Any] = []
"""Idle engines of this process, kept because each loads its own library, and unloading one crashes the others."""
_RULES = {"pddl_domain": "alfred.pddl", "grammar": "alfred.twl2"}
_UNSUPPORTED = ("movable", "Sliced")
"""Words in the path of games that ALFWorld's engine cannot play, by which ALFWorld excludes them too."""


class ALFWorldOptions(Settings):
    """Which problems, and what is shown of them."""

    games: Path | None = Field(
        None,
        description="A game (*.tw-pddl), or a folder that holds games at any depth; null draws households at random.",
    )
    kinds: tuple[Kind, ...] = Field(KINDS, min_length=1, description="Kinds of tasks to draw, by ALFWorld's names.")
    receptacles: int = Field(8, ge=4, le=20, description="Number of receptacles in a drawn household.")
    objects: int = Field(10, ge=2, le=40, description="Number of objects in a drawn household, not counting a lamp.")
    search: bool = Field(
        False,
        description="Let the known path of a drawn household search for the object instead of going straight to it.",
    )
    commands: bool = Field(False, description="List in every observation the commands that make sense there.")


def command_of(reply: str) -> str:
    """The command in a reply: the text between the last <action> and </action>, or the whole reply without tags."""
    tagged = re.findall(r"<action>(.*?)</action>", reply, flags=re.DOTALL | re.IGNORECASE)
    return " ".join((tagged[-1] if tagged else reply).lower().split())


class ALFWorld(EnvironmentTask):
    """Household tasks in ALFWorld's text engine.

    Raises:
        ConfigError: if a package is not installed.
    """

    Options: ClassVar[type[Settings]] = ALFWorldOptions
    name = "alfworld"

    def __init__(self, options: ALFWorldOptions) -> None:
        super().__init__(options)
        try:
            self._translator: Any = import_module("fast_downward")
            self._library: Any = import_module("textworld")
            self._engine: Any = import_module("textworld.envs.pddl")
            self._rules = {} if options.games else _rules()
        except ImportError as error:
            raise ConfigError(
                f"environment alfworld needs alfworld, TextWorld and fast_downward_textworld ({error}); "
                "pip install alfworld, or run where `make envs` has installed it."
            ) from error
        self._game: Any = None
        self._found: list[Path] = []
        self._paths: dict[Path, list[str] | None] = {}

    def draw(self, random: Random) -> Prompt:
        """Draw a household or one of the games, with a path that wins it if one is known."""
        if self.options.games is not None:
            return self._draw_game(random)
        kind = random.choice(self.options.kinds)
        size = {"receptacles": self.options.receptacles, "objects": self.options.objects}
        drawn = make_household(random, kind, **size, search=self.options.search)
        # The number makes households distinct: identity, groups and the held-out split depend on the prompt's text.
        text = f"Household {random.randrange(10**9)}. {HELP}\n"
        return self.make_prompt(text, list(drawn.path), domain=kind, problem=drawn.problem, task=drawn.task)

    def labels(self) -> frozenset[tuple[str | None, str | None]]:
        """The domains are the kinds of task, so that metrics report each kind separately."""
        others = {(None, self.name)} if self.options.games is not None else set()
        return frozenset({(None, kind) for kind in self.options.kinds} | others)

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Begin an episode; shows the room and the task. The seed is unused, because nothing is random."""
        if self._game is None:
            wanted = self._library.EnvInfos(won=True, admissible_commands=True)
            self._game = _SPARE.pop() if _SPARE else self._engine.PddlEnv(wanted)
        with _translated_once(self._translator):
            self._game.load(self._data(prompt.extra))
            infos = self._game._entity_infos
            for id, name in shown_names(info.id for info in infos.values()).items():
                infos[id].name = name
            state = self._game.reset()
        return self._show(state.feedback.removeprefix(_BANNER), state)

    def step(self, action: str) -> Observation:
        """Carry out one command, regardless of case and extra spaces."""
        state, _, _ = self._game.step(command_of(action))
        return self._show(state.feedback, state)

    def close(self) -> None:
        """Keep the engine for another episode."""
        if self._game is not None:
            _SPARE.append(self._game)
            self._game = None

    def _draw_game(self, random: Random) -> Prompt:
        games, folder = self._games()
        # All games, in random order, because a draw must not depend on what earlier draws found unsolvable.
        for game in random.sample(games, len(games)):
            path = self._path(game)
            if path is not None:
                # A number instead of the name, which would give the task away.
                number = int(sha256(str(game.relative_to(folder)).encode()).hexdigest()[:8], 16)
                return self.make_prompt(f"Household {number}. {HELP}\n", path, domain=_kind(game), game=str(game))
        raise DataError(
            f"{self.options.games} holds no solvable game (*.tw-pddl) of kind {', '.join(self.options.kinds)}; "
            "fetch some with alfworld-download, or leave option games out."
        )

    def _games(self) -> tuple[list[Path], Path]:
        """The games, and the folder to which their names are relative."""
        chosen = self.options.games.expanduser()
        folder = chosen if chosen.is_dir() else chosen.parent
        if not self._found:
            every = sorted(chosen.rglob("*.tw-pddl")) if chosen.is_dir() else [chosen]
            self._found = [game for game in every if self._is_wanted(game, folder)]
        return self._found, folder

    def _is_wanted(self, game: Path, folder: Path) -> bool:
        name = str(game.relative_to(folder))
        kind = _kind(game)
        return not any(word in name for word in _UNSUPPORTED) and (kind is None or kind in self.options.kinds)

    def _path(self, game: Path) -> list[str] | None:
        """The path that wins a game, empty if it is not known; None if the game cannot be won."""
        if game not in self._paths:
            data = _read(game)
            path = [str(command) for command in data.get("walkthrough") or ()]
            self._paths[game] = path if data.get("solvable", True) else None
        return self._paths[game]

    def _data(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """The game that the engine loads for a prompt."""
        if "game" in extra:
            return _read(Path(extra["game"]))
        rules = self._rules or _rules()
        if not re.fullmatch(r"[a-z ]+", extra["task"]):  # it becomes part of the grammar, which is evaluated
            raise DataError(f"task {extra['task']!r} of a household may have small letters and spaces alone.")
        grammar = rules["grammar"].replace("UNKNOWN GOAL", extra["task"])
        return {**rules, "grammar": grammar, "pddl_problem": extra["problem"]}

    def _show(self, said: str, state: Any) -> Observation:
        won = bool(state["won"])
        text = said.strip()
        if self.options.commands and not won:
            text += f"\n\nCommands: {', '.join(state['admissible_commands'])}."
        return Observation(text=f"{text}\n", reward=float(won), done=won, success=True if won else None)


def _rules() -> dict[str, str]:
    """ALFWorld's domain and grammar, read from its package, whose import would create a folder in the home folder."""
    package = find_spec("alfworld")
    if package is None or package.origin is None:
        raise ImportError("No module named 'alfworld'")
    data = Path(package.origin).parent / "data"
    return {key: (data / name).read_text("utf-8") for key, name in _RULES.items()}


def _read(game: Path) -> dict[str, Any]:
    try:
        data = json.loads(game.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{game} cannot be read as a game of ALFWorld: {error}.") from error
    if not (isinstance(data, dict) and {"pddl_domain", "grammar", "pddl_problem"} <= data.keys()):
        raise DataError(f"{game} is not a game of ALFWorld: it lacks pddl_domain, grammar or pddl_problem.")
    return data


def _kind(game: Path) -> str | None:
    """The kind of task named by a folder in the game's path, as in ALFWorld's data; None if none names one."""
    begins = {part.partition("-")[0] for part in game.parts}
    return next((kind for kind in KINDS if kind in begins), None)


@contextmanager
def _translated_once(translator: Any) -> Iterator[None]:
    """Make the engine translate a problem only once, although it does so both when it loads and when it begins it.

    The translator also overwrites sys.argv, which is restored.
    """
    arguments, translate = sys.argv, translator.pddl2sas
    translator.pddl2sas = lru_cache(translate)
    try:
        yield
    finally:
        sys.argv, translator.pddl2sas = arguments, translate
