"""Rooms, keys and locked doors: a text world with a known shortest path of any length from 1 to 30.

The way to the lamp is a chain of rooms; some doors on it are locked, and their keys lie in the room before them, beside
keys that open nothing and doors that lead to empty rooms. Commands: go DIRECTION, take THING, open DIRECTION, look.
A command that makes no sense changes nothing but costs a turn.
"""

from copy import deepcopy
from random import Random
from typing import Any, ClassVar

from pydantic import Field

from opd.config import Settings
from opd.tasks.environments.base import EnvironmentTask, Observation
from opd.tasks.prompt import Prompt

DIRECTIONS = ("north", "east", "south", "west")
BACK = {"north": "south", "south": "north", "east": "west", "west": "east"}
COLOURS = ("red", "blue", "green", "white", "black", "brass")
HELP = "Find the lamp and take it. Commands: go DIRECTION, take THING, open DIRECTION, look."
Room = dict[str, Any]


class RoomsOptions(Settings):
    """Size of the house."""

    depth: int = Field(10, ge=1, le=30, description="Actions of the shortest path to the lamp.")
    turns: int = Field(30, ge=1, le=200, description="Commands before the episode ends.")
    locked: float = Field(0.5, ge=0, le=1, description="Share of the doors on the way that are locked.")
    distractions: float = Field(0.5, ge=0, le=1, description="Share of rooms with a useless key or a side room.")


class Rooms(EnvironmentTask):
    """The house; see the module."""

    Options: ClassVar[type[Settings]] = RoomsOptions
    name = "rooms"

    def draw(self, random: Random) -> Prompt:
        """A house whose shortest path has `depth` actions."""
        house: list[Room] = [_room()]
        path: list[str] = []
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
            path.append(f"go {door}")
            self._distract(random, house, here)
            here, left = there, left - (3 if locked else 1)
        house[here]["things"].append("lamp")
        # The number tells houses apart: identity, groups and the held-out split go by what a prompt says.
        number = random.randrange(1_000_000)
        return self.make_prompt(f"House {number}. {HELP}\n", [*path, "take lamp"], house=house)

    def _distract(self, random: Random, house: list[Room], here: int) -> None:
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

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Stand in the first room."""
        self._house: list[Room] = deepcopy(prompt.extra["house"])
        self._here = self._turn = 0
        self._carried: list[str] = []
        self._won = False
        return self._show("")

    def step(self, action: str) -> Observation:
        """One command."""
        self._turn += 1
        verb, _, rest = " ".join(action.lower().split()).partition(" ")
        room = self._house[self._here]
        door = room["doors"].get(rest)
        said = "Nothing happens."
        # Whatever matches nothing below falls through: nothing happens, and the turn is spent.
        if verb == "go" and door is not None:
            if door[1]:
                said = f"The {door[1]} door is locked."
            else:
                self._here, said = door[0], ""
        elif verb == "open" and door is not None and door[1] and f"{door[1]} key" in self._carried:
            said = f"You open the {door[1]} door."
            door[1] = ""
        elif verb == "take" and rest in room["things"]:
            room["things"].remove(rest)
            self._carried.append(rest)
            said = f"You take the {rest}."
            self._won = rest == "lamp"
        elif verb == "look":
            said = ""
        return self._show(said)

    def snapshot(self) -> dict[str, Any]:
        """The state, for `restore`."""
        return deepcopy(vars(self))

    def restore(self, state: dict[str, Any]) -> Observation:
        """Go back to a snapshot and look around."""
        vars(self).update(deepcopy(state))
        return self._show("")

    def _show(self, said: str) -> Observation:
        room = self._house[self._here]
        doors = ", ".join(f"{d} ({c} lock)" if c else d for d, (_, c) in sorted(room["doors"].items()))
        parts = [said, f"Doors: {doors or 'none'}.", f"Here: {', '.join(room['things']) or 'nothing'}."]
        parts.append(f"You carry: {', '.join(self._carried) or 'nothing'}.")
        done = self._won or self._turn >= self.options.turns
        return Observation(
            text=" ".join(part for part in parts if part) + "\n",
            reward=float(self._won) if done else None,
            done=done,
            success=self._won if done else None,
            info={"room": self._here},
        )


def _room() -> Room:
    return {"doors": {}, "things": []}
