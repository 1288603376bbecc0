"""Rooms, keys and locked doors: a text world with a known shortest path of any length from 1 to 30.

The way to the lamp is a chain of rooms. Some doors on it are locked; the key to a locked door lies in the room before
it, among keys that open nothing and doors that lead to empty rooms. A key stays in the lock that it opens. The commands
are go DIRECTION, take THING, open DIRECTION and look. A command that makes no sense changes nothing but costs a turn.

With `words: terse` observations and commands are letters, a ninth of the text, for models whose tokens are characters.
`enR,GR,B:` is a room with an open door east and a red lock north, a green and a red key in it, and a blue key carried;
`tR`, `on`, `gn`, `t*` take the red key, open north, go north, and take the lamp.

The shortest path needs knowledge of the house. With `search: true` a problem's path looks into side rooms, as a player
without that knowledge must: where nothing tells a side room from the way, it picks a door at random, and returns if it
was the wrong one.
"""

from collections import Counter
from copy import deepcopy
from random import Random
from typing import Any, ClassVar, Literal

from pydantic import Field

from opd.config import Settings
from opd.tasks.environments.base import EnvironmentTask, Observation, Standing
from opd.tasks.prompt import Prompt

DIRECTIONS = ("north", "east", "south", "west")
BACK = {"north": "south", "south": "north", "east": "west", "west": "east"}
KEYS = {"red": "R", "blue": "B", "green": "G", "white": "W", "black": "K", "brass": "Y"}
COLOURS = tuple(KEYS)
HELP = "Find the lamp and take it. Commands: go DIRECTION, take THING, open DIRECTION, look."
VERBS = {"go": "g", "take": "t", "open": "o", "look": "l"}
THINGS = {f"{colour} key": letter for colour, letter in KEYS.items()} | {"lamp": "*"}
SHORT = THINGS | {direction: direction[0] for direction in DIRECTIONS}
"""The terse letter of each thing and direction."""
_VERB_OF, _THING_OF = ({short: word for word, short in table.items()} for table in (VERBS, SHORT))
Room = dict[str, Any]


class RoomsOptions(Settings):
    """Size of the house."""

    depth: int = Field(10, ge=1, le=30, description="Number of actions on the shortest path to the lamp.")
    turns: int = Field(30, ge=1, le=200, description="Maximum number of commands; after that the episode ends.")
    locked: float = Field(0.5, ge=0, le=1, description="Probability that a door on the way is locked.")
    distractions: float = Field(
        0.5, ge=0, le=1, description="Probability that a room has a side room, and likewise that it has a useless key."
    )
    words: Literal["plain", "terse"] = Field(
        "plain",
        description="Language of observations and commands: plain sentences, or terse letters for models whose tokens "
        "are characters.",
    )
    search: bool = Field(
        False,
        description="Let the known path pick a door at random where a side room looks like the way, and come back from "
        "it, as far as turns allow, instead of being the shortest path, which knows the house.",
    )


class Rooms(EnvironmentTask):
    """Rooms, keys and locked doors, with a known gold path."""

    Options: ClassVar[type[Settings]] = RoomsOptions
    name = "rooms"

    def draw(self, random: Random) -> Prompt:
        """Draw a house whose shortest path has `depth` actions."""
        house: list[Room] = [_room()]
        path: list[str] = []
        sides: list[tuple[int, str]] = []  # where a side room looks like the way: index into path, door
        here = 0
        left = self.options.depth - 1  # the last action takes the lamp
        while left:
            door = random.choice([d for d in DIRECTIONS if d not in house[here]["doors"]])
            locked = left >= 3 and random.random() < self.options.locked
            house.append(_room())
            there = len(house) - 1
            colour = random.choice(COLOURS) if locked else ""
            house[here]["doors"][door] = [there, colour]
            house[there]["doors"][BACK[door]] = [here, ""]
            if locked:
                house[here]["things"].append(f"{colour} key")
                path += [f"take {colour} key", f"open {door}"]
            side = self._distract(random, house, here)
            if side and not locked:  # a lock tells the way
                sides.append((len(path), side))
            path.append(f"go {door}")
            here, left = there, left - (3 if locked else 1)
        house[here]["things"].append("lamp")
        # The number makes houses distinct, because identity, groups and the held-out split depend on the prompt's text.
        number = random.randrange(1_000_000)
        path.append("take lamp")
        if self.options.search:
            path = self._searched(random, path, sides)
        if self.options.words == "terse":
            return self.make_prompt(f"{number}:", [_short(command) for command in path], house=house)
        return self.make_prompt(f"House {number}. {HELP}\n", path, house=house)

    def _searched(self, random: Random, path: list[str], sides: list[tuple[int, str]]) -> list[str]:
        """The path with looks into about half of the side rooms, as far as turns allow."""
        spare = max(0, self.options.turns - len(path)) // 2
        chosen = dict([side for side in sides if random.random() < 0.5][:spare])
        looks = {at: [f"go {door}", f"go {BACK[door]}"] for at, door in chosen.items()}
        return [step for at, command in enumerate(path) for step in (*looks.get(at, ()), command)]

    def _distract(self, random: Random, house: list[Room], here: int) -> str:
        """Add a side room and a useless key by chance; returns the door to the side room, or "" if there is none."""
        door = ""
        free = [d for d in DIRECTIONS if d not in house[here]["doors"]]
        if free and random.random() < self.options.distractions:
            door = random.choice(free)
            house.append(_room())
            house[here]["doors"][door] = [len(house) - 1, ""]
            house[-1]["doors"][BACK[door]] = [here, ""]
        useless = [c for c in COLOURS if f"{c} key" not in house[here]["things"]]
        if random.random() < self.options.distractions:
            house[here]["things"].append(f"{random.choice(useless)} key")
            house[here]["things"].sort()
        return door

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Begin an episode in the first room."""
        self._house: list[Room] = deepcopy(prompt.extra["house"])
        self._here = self._turn = 0
        self._carried: list[str] = []
        self._won = False
        return self._show("")

    def step(self, action: str) -> Observation:
        """Carry out one command."""
        self._turn += 1
        verb, rest = self._understand(action)
        room = self._house[self._here]
        door = room["doors"].get(rest)
        said = "Nothing happens."
        # A command that matches none of these falls through: nothing happens, and the turn is spent.
        if verb == "go" and door is not None:
            if door[1]:
                said = f"The {door[1]} door is locked."
            else:
                self._here, said = door[0], ""
        elif verb == "open" and door is not None and door[1] and f"{door[1]} key" in self._carried:
            said = f"You open the {door[1]} door."
            self._carried.remove(f"{door[1]} key")  # else it could open the next door of its colour too
            door[1] = ""
        elif verb == "take" and rest in room["things"]:
            room["things"].remove(rest)
            self._carried.append(rest)
            said = f"You take the {rest}."
            self._won = rest == "lamp"
        elif verb == "look":
            said = ""
        return self._show(said)

    def standing(self) -> Standing:
        """Count doors to walk through and to unlock, keys to take, and the lamp; a player in a side room is lost."""
        if self._won:
            return Standing(0, False)
        way = self._way(self._here)
        locks = Counter(lock for _, lock in way if lock)
        keys = Counter(thing.removesuffix(" key") for thing in self._carried)
        on_the_way = {0, *(room for room, _ in self._way(0))}
        return Standing(len(way) + locks.total() + (locks - keys).total() + 1, self._here not in on_the_way)

    def _way(self, start: int) -> list[tuple[int, str]]:
        """Rooms after `start` on the way to the lamp, with the lock of the door into each; houses have no cycles."""
        ways: dict[int, list[tuple[int, str]]] = {start: []}
        for here in (queue := [start]):
            if "lamp" in self._house[here]["things"]:
                return ways[here]
            for there, lock in self._house[here]["doors"].values():
                if there not in ways:
                    ways[there] = [*ways[here], (there, lock)]
                    queue.append(there)
        raise AssertionError("a house has a lamp")

    def _understand(self, action: str) -> tuple[str, str]:
        """The verb and object of a command."""
        if self.options.words == "terse":
            action = action.strip()
            return _VERB_OF.get(action[:1], ""), _THING_OF.get(action[1:], "")
        verb, _, rest = " ".join(action.lower().split()).partition(" ")
        return verb, rest

    def _show(self, said: str) -> Observation:
        done = self._won or self._turn >= self.options.turns
        return Observation(
            text=self._describe(said) if self.options.words == "plain" else self._sketch(),
            reward=float(self._won) if done else None,
            done=done,
            success=self._won if done else None,
            info={"room": self._here},
        )

    def _sketch(self) -> str:
        """The room in letters: doors with their locks, things in the room, things carried."""
        room = self._house[self._here]
        doors = "".join(d[0] + KEYS.get(c, "") for d, (_, c) in sorted(room["doors"].items()))
        return f"{doors},{''.join(THINGS[t] for t in room['things'])},{''.join(THINGS[t] for t in self._carried)}:"

    def _describe(self, said: str) -> str:
        room = self._house[self._here]
        doors = ", ".join(f"{d} ({c} lock)" if c else d for d, (_, c) in sorted(room["doors"].items()))
        parts = [said, f"Doors: {doors or 'none'}.", f"Here: {', '.join(room['things']) or 'nothing'}."]
        parts.append(f"You carry: {', '.join(self._carried) or 'nothing'}.")
        return " ".join(part for part in parts if part) + "\n"


def _short(command: str) -> str:
    """A command in terse letters."""
    verb, _, rest = command.partition(" ")
    return VERBS[verb] + SHORT[rest]


def _room() -> Room:
    return {"doors": {}, "things": []}
