"""ALFWorld's text engine: household tasks, in households of our own or in the games that ALFWorld offers to download.

    prompts: {task: alfworld, options: {kinds: [pick_and_place_simple], receptacles: 6}}
    prompts: {task: alfworld, options: {games: ~/.cache/alfworld/json_2.1.1/train}}

Our households are drawn like the problems of any other task, without files, as many as are asked for; a game is a file
(*.tw-pddl) with its own rules, grammar and, mostly, a path that wins it. Nothing in either is left to chance. A
command that makes no sense is answered with "Nothing happens."; `turns` of the episode's settings ends what is not won.
The engine evaluates what a game's grammar says as Python: play only games whose source is trusted.

The project does not install the packages: `scripts/envs.sh VENV PYTHON` makes an environment that has them.
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
from opd.tasks.environments.household_pddl import shown_names
from opd.tasks.environments.household_rooms import KINDS, Kind
from opd.tasks.environments.households import make_household
from opd.tasks.prompt import Prompt

HELP = (
    "Reply with one command: go to PLACE, open PLACE, close PLACE, take THING from PLACE, move THING to PLACE, "
    "clean THING with PLACE, heat THING with PLACE, cool THING with PLACE, use THING, examine THING, look or inventory."
)
_BANNER = "-= Welcome to TextWorld, ALFRED! =-"
_SPARE: list[Any] = []
"""Engines of this process that play nothing. Each holds a library of its own, and unloading one crashes the others."""
_RULES = {"pddl_domain": "alfred.pddl", "grammar": "alfred.twl2"}
_UNSUPPORTED = ("movable", "Sliced")
"""Words in a game's path by which ALFWorld leaves games out: its engine cannot play them."""


class ALFWorldOptions(Settings):
    """Which problems, and what is shown of them."""

    games: Path | None = Field(
        None,
        description="Folder with games (*.tw-pddl), in folders within it too, or one game; null draws households.",
    )
    kinds: tuple[Kind, ...] = Field(KINDS, min_length=1, description="Kinds of task.")
    receptacles: int = Field(8, ge=4, le=20, description="Receptacles of a household.")
    objects: int = Field(10, ge=2, le=40, description="Objects in a household, a lamp aside.")
    search: bool = Field(
        False, description="Known paths of households search for the object instead of going to where it is."
    )
    commands: bool = Field(False, description="List the commands that make sense in every observation.")


def command_of(reply: str) -> str:
    """What a reply orders: what stands between the last tags <action> and </action>, or all of it without them."""
    tagged = re.findall(r"<action>(.*?)</action>", reply, flags=re.DOTALL | re.IGNORECASE)
    return " ".join((tagged[-1] if tagged else reply).lower().split())


class ALFWorld(EnvironmentTask):
    """The households; see the module.

    Raises:
        ConfigError: when a package is not installed.
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
        """A household, or one of the games, with a path that wins it."""
        if self.options.games is not None:
            return self._draw_game(random)
        kind = random.choice(self.options.kinds)
        size = {"receptacles": self.options.receptacles, "objects": self.options.objects}
        drawn = make_household(random, kind, **size, search=self.options.search)
        # The number tells households apart: identity, groups and the held-out split go by what a prompt says.
        text = f"Household {random.randrange(10**9)}. {HELP}\n"
        return self.make_prompt(text, list(drawn.path), domain=kind, problem=drawn.problem, task=drawn.task)

    def labels(self) -> frozenset[tuple[str | None, str | None]]:
        """The kinds of task are the domains, so that metrics tell them apart."""
        others = {(None, self.name)} if self.options.games is not None else set()
        return frozenset({(None, kind) for kind in self.options.kinds} | others)

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Begin: what is in the room, and the task. There is no chance in it."""
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
        """One command; capitals and spaces do not matter."""
        state, _, _ = self._game.step(command_of(action))
        return self._show(state.feedback, state)

    def close(self) -> None:
        """Leave the engine to another episode."""
        if self._game is not None:
            _SPARE.append(self._game)
            self._game = None

    def _draw_game(self, random: Random) -> Prompt:
        games, folder = self._games()
        # All of them in an order of chance: a draw must not depend on what others have found unsolvable.
        for game in random.sample(games, len(games)):
            path = self._path(game)
            if path is not None:
                # A number in place of the name, which would say what the task is.
                number = int(sha256(str(game.relative_to(folder)).encode()).hexdigest()[:8], 16)
                return self.make_prompt(f"Household {number}. {HELP}\n", path, domain=_kind(game), game=str(game))
        raise DataError(
            f"{self.options.games} holds no solvable game (*.tw-pddl) of kind {', '.join(self.options.kinds)}; "
            "fetch some with alfworld-download, or leave option games out."
        )

    def _games(self) -> tuple[list[Path], Path]:
        """The games, and the folder that their names begin at."""
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
        """The path that wins a game, empty where it is not known; None for a game that cannot be won."""
        if game not in self._paths:
            data = _read(game)
            path = [str(command) for command in data.get("walkthrough") or ()]
            self._paths[game] = path if data.get("solvable", True) else None
        return self._paths[game]

    def _data(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """What the engine is to load for a prompt."""
        if "game" in extra:
            return _read(Path(extra["game"]))
        rules = self._rules or _rules()
        if not re.fullmatch(r"[a-z ]+", extra["task"]):  # it becomes a part of the grammar, which is evaluated
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
    """ALFWorld's domain and grammar, which its package holds; importing it would make a folder in the home."""
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
    """The kind of task that a folder on the way to a game names, as those of ALFWorld do."""
    begins = {part.partition("-")[0] for part in game.parts}
    return next((kind for kind in KINDS if kind in begins), None)


@contextmanager
def _translated_once(translator: Any) -> Iterator[None]:
    """Within this the engine, which translates a problem whenever it loads or begins it, does so once.

    Its translator overwrites the arguments of the process, too, which are put back.
    """
    arguments, translate = sys.argv, translator.pddl2sas
    translator.pddl2sas = lru_cache(translate)
    try:
        yield
    finally:
        sys.argv, translator.pddl2sas = arguments, translate
