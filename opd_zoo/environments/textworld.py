"""TextWorld games: text adventures that `tw-make` makes offline, each with a known path that wins it.

    tw-make custom --world-size 3 --nb-objects 5 --quest-length 4 --seed 1 --output games/1.z8
    prompts: {task: textworld, options: {games: games}}

A game is two files: NAME.z8, which is played, and NAME.json beside it, which holds the path. Games are deterministic.
The game answers an unknown command without changing anything; a game that is neither won nor lost ends after `turns`
of the episode's settings. Commands to the interpreter (save, quit, script ...) are not passed on, because they write
files and ask questions. The project does not install the package: `scripts/envs.sh VENV PYTHON` makes a virtual
environment that has it.
"""

import json
import re
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from pydantic import Field

from opd.config import Settings
from opd.errors import ConfigError, DataError
from opd.tasks.environments.base import EnvironmentTask, Observation
from opd.tasks.prompt import Prompt

HELP = "Reply with one command."
_LONGEST = 190
"""Longest command in characters; the rest of a longer one is cut off."""
_MENU = frozenset(
    """die noscript q quit record recording replay restart restore save script transcript undo unscript""".split()  # noqa: SIM905
)
"""Commands to the interpreter instead of the game; none of these words is the name of a thing in a game."""


class TextWorldOptions(Settings):
    """Which games, and what is shown of them."""

    games: Path = Field(description="Folder with TextWorld games: NAME.z8 files, each with its NAME.json beside it.")
    commands: bool = Field(False, description="List in every observation the commands that make sense there.")


class TextWorld(EnvironmentTask):
    """Games of TextWorld, made by tw-make.

    Raises:
        ConfigError: if TextWorld is not installed.
    """

    Options: ClassVar[type[Settings]] = TextWorldOptions
    name = "textworld"

    def __init__(self, options: TextWorldOptions) -> None:
        super().__init__(options)
        try:
            self._library: Any = import_module("textworld")
        except ImportError as error:
            raise ConfigError(
                f"environment textworld needs TextWorld ({error}); run where `make envs` has installed it."
            ) from error
        self._game: Any = None
        self._score = 0
        self._paths: dict[Path, list[str]] = {}

    def draw(self, random: Random) -> Prompt:
        """Draw one of the games, with the path that wins it."""
        game = random.choice(self._games())
        return self.make_prompt(f"Game {game.stem}. {HELP}\n", self._path(game), game=str(game))

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Begin the game; shows its objective and where the player is. The seed is unused."""
        self.close()
        wanted = self._library.EnvInfos(
            objective=True, description=True, won=True, lost=True, admissible_commands=self.options.commands
        )
        self._game = self._library.start(str(prompt.extra["game"]), wanted)
        self._score = 0
        state = self._game.reset()
        return self._show(f"{state.objective}\n\n{state.description}", state, 0, done=False)

    def step(self, action: str) -> Observation:
        """Carry out one command, of which only letters, digits, spaces and common punctuation reach the game.

        The interpreter hangs on a NUL, and takes a backslash as the start of a command to itself.
        """
        command = " ".join(re.sub(r"[^A-Za-z0-9 .,;:!?'\"-]", " ", action).split())[:_LONGEST]
        if not _MENU.isdisjoint(re.findall(r"[a-z]+", command.lower())):
            return Observation("That is not a part of the game.\n", reward=0.0, info={"score": self._score})
        state, score, done = self._game.step(command)
        return self._show(state.feedback, state, score, done=done)

    def close(self) -> None:
        """Stop the game's interpreter."""
        if self._game is not None:
            self._game.close()
            self._game = None

    def _games(self) -> list[Path]:
        found = sorted(path for path in self.options.games.glob("*.z8") if path.with_suffix(".json").is_file())
        if not found:
            raise DataError(
                f"{self.options.games} holds no TextWorld game (NAME.z8 with NAME.json beside it); make some with "
                "tw-make."
            )
        return found

    def _path(self, game: Path) -> list[str]:
        if game not in self._paths:
            data = json.loads(game.with_suffix(".json").read_text(encoding="utf-8"))
            self._paths[game] = [str(command) for command in data["metadata"].get("walkthrough") or ()]
        return self._paths[game]

    def _show(self, said: str, state: Any, score: int, *, done: bool) -> Observation:
        gained, self._score = score - self._score, score
        text = said.rpartition("\n>")[0].strip() or said.strip()  # without the next prompt and the status line
        if self.options.commands and not done:
            text += f"\n\nCommands: {', '.join(state.admissible_commands)}."
        return Observation(
            text=f"{text}\n",
            reward=float(gained),
            done=bool(done),
            success=bool(state.won) if done else None,
            info={"score": score},
        )
