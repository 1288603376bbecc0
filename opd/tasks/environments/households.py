"""Small households with a task, in the language of ALFWorld's text engine, and a path that does the task.

A household is one room: receptacles (a fridge, three drawers), objects in them, the player in the middle. It is drawn
from random numbers alone; the engine is not needed for it.
"""

from collections import Counter
from dataclasses import dataclass
from random import Random

from opd.tasks.environments.household_pddl import LAMP, House, Thing, write_problem
from opd.tasks.environments.household_rooms import (
    APPLIANCES,
    LAMP_STANDS,
    LIGHT,
    LIT,
    OPENABLE,
    ROOMS,
    SENTENCES,
    TREATED,
    TREATMENTS,
    TWO,
    Room,
)


@dataclass(frozen=True)
class Household:
    """A problem.

    Attributes:
        kind: of the task, one of `KINDS`.
        task: what the player is told to do.
        problem: the household and its goal in PDDL, for ALFWorld's domain.
        path: commands that do the task.
    """

    kind: str
    task: str
    problem: str
    path: tuple[str, ...]


def make_household(random: Random, kind: str, *, receptacles: int, objects: int, search: bool) -> Household:
    """Draw a household.

    Args:
        random: decides everything; equal states give equal households.
        kind: of the task.
        receptacles: how many; 4 to 20.
        objects: how many things lie in them, a lamp aside; at least 2.
        search: the path looks into one receptacle after the other until it has found what it needs; else it knows.
    """
    room, wanted, target = random.choice(_possible(kind))
    house = _furnish(random, room, kind, wanted, target, receptacles)
    _fill(random, house, wanted, target, 2 if kind == TWO else 1, objects)
    words = {"obj": wanted.lower(), "recep": target.lower(), "toggle": "desklamp"}
    task = random.choice(SENTENCES[kind]).format(**words)
    # The path is walked last, because walking moves the objects.
    return Household(kind, task, write_problem(house, kind, wanted, target), _path(house, kind, wanted, target, search))


def _possible(kind: str) -> list[tuple[Room, str, str]]:
    """Every room, object and type of receptacle that a task of this kind can be about; no receptacle for `LIGHT`."""
    if kind == LIGHT:
        return [(ROOMS[name], thing, "") for name in LIT for thing in ROOMS[name].places]
    treatment = TREATMENTS.get(kind, "")
    appliance = APPLIANCES.get(treatment, "")
    return [
        (room, thing, target)
        for room in ROOMS.values()
        if not treatment or appliance in room.receptacles
        for thing, places in room.places.items()
        if len(places) > 1 and (not treatment or thing in TREATED[treatment])
        for target in places
        if target != appliance
    ]


def _furnish(random: Random, room: Room, kind: str, wanted: str, target: str, receptacles: int) -> House:
    """An empty room with all that the task needs, with a lamp where it needs one."""
    stand = random.choice(LAMP_STANDS) if kind == LIGHT else ""
    begin = random.choice([place for place in room.places[wanted] if place != target])
    needed = {begin, target, stand, APPLIANCES.get(TREATMENTS.get(kind, ""), "")} - {""}
    left = Counter(room.receptacles) - Counter(needed)
    types = Counter(needed) + Counter(random.sample(sorted(left.elements()), receptacles - len(needed)))
    found = [Thing(name, number) for name, most in types.items() for number in range(1, most + 1)]
    # In the order in which the engine names them, which is how a player who searches would go through them.
    found.sort(key=lambda place: (place.type.lower(), -place.number))
    return House(room, found, {LAMP: Thing(stand, 1)} if stand else {})


def _fill(random: Random, house: House, wanted: str, target: str, least: int, objects: int) -> None:
    """Lay objects into the receptacles, `least` of those that the task needs, none of these where they shall go."""
    places = {
        name: [place for place in house.receptacles if place.type in fits and (name != wanted or place.type != target)]
        for name, fits in house.room.places.items()
    }
    lying = [name for name, fits in places.items() if fits]
    counts: Counter[str] = Counter()
    for name in [wanted] * least + random.choices(lying, k=objects - least):
        counts[name] += 1
        house.inside[Thing(name, counts[name])] = random.choice(places[name])


def _path(house: House, kind: str, wanted: str, target: str, search: bool) -> tuple[str, ...]:
    """Commands that do the task; the objects are moved."""
    walk = _Walk(house, search)
    if kind == LIGHT:
        stand = house.inside[LAMP]
        walk.take(wanted, target)
        walk.visit(stand)
        walk.commands.append(f"use {LAMP}")
        return tuple(walk.commands)
    treatment = TREATMENTS.get(kind, "")
    for _ in range(2 if kind == TWO else 1):
        thing = walk.take(wanted, target)
        if treatment:
            appliance = Thing(APPLIANCES[treatment], 1)
            walk.visit(appliance, closed=True)
            walk.commands.append(f"{treatment} {thing} with {appliance}")
        walk.put(thing, Thing(target, 1))
    return tuple(walk.commands)


class _Walk:
    """A player who does the task and writes down how."""

    def __init__(self, house: House, search: bool) -> None:
        self.house = house
        self.search = search
        self.here: Thing | None = None
        self.seen: set[Thing] = set()
        self.commands: list[str] = []

    def visit(self, place: Thing, *, closed: bool = False) -> None:
        """Stand at a receptacle and, unless it may be closed, see what is in it."""
        if self.here != place:
            self.commands.append(f"go to {place}")
            self.here = place
        if closed or place in self.seen:
            return
        self.seen.add(place)
        if place.type in OPENABLE:
            self.commands.append(f"open {place}")

    def take(self, wanted: str, target: str) -> Thing:
        """Take an object of a type that does not yet lie where it shall go."""
        inside, places = self.house.inside, self.house.receptacles
        found = [thing for thing, place in inside.items() if thing.type == wanted and place.type != target]
        thing = min(found, key=lambda thing: places.index(inside[thing])) if self.search else found[0]
        place = inside.pop(thing)
        for other in places[: places.index(place)] if self.search and place not in self.seen else ():
            if other not in self.seen:
                self.visit(other)
        self.visit(place)
        self.commands.append(f"take {thing} from {place}")
        return thing

    def put(self, thing: Thing, place: Thing) -> None:
        """Put what is carried into a receptacle."""
        self.visit(place)
        self.commands.append(f"move {thing} to {place}")
        self.house.inside[thing] = place
