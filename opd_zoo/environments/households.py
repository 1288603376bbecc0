"""Small households with a task for ALFWorld's text engine, each with a sequence of commands that completes the task.

A household is one room with receptacles (a fridge, three drawers), objects in them, and the player in the middle. It is
drawn at random, without the engine.
"""

from collections import Counter
from dataclasses import dataclass
from random import Random

from opd_zoo.environments.household_pddl import LAMP, House, Thing, write_problem
from opd_zoo.environments.household_rooms import (
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
    """A problem: a household and a task.

    Attributes:
        kind: kind of task, one of `KINDS`.
        task: what the player is told to do.
        problem: the household and its goal in PDDL, for ALFWorld's domain.
        path: commands that complete the task.
    """

    kind: str
    task: str
    problem: str
    path: tuple[str, ...]


def make_household(random: Random, kind: str, *, receptacles: int, objects: int, search: bool) -> Household:
    """Draw a household.

    Args:
        random: the source of all choices; equal states give equal households.
        kind: kind of task.
        receptacles: number of receptacles, 4 to 20.
        objects: number of objects in them, not counting a lamp; at least 2.
        search: whether the path looks into one receptacle after another until it finds what it needs; otherwise it
            goes there directly.
    """
    room, wanted, target = random.choice(_possible(kind))
    house = _furnish(random, room, kind, wanted, target, receptacles)
    _fill(random, house, wanted, target, 2 if kind == TWO else 1, objects)
    words = {"obj": wanted.lower(), "recep": target.lower(), "toggle": "desklamp"}
    task = random.choice(SENTENCES[kind]).format(**words)
    # The path is computed last, because doing so moves the objects.
    return Household(kind, task, write_problem(house, kind, wanted, target), _path(house, kind, wanted, target, search))


def _possible(kind: str) -> list[tuple[Room, str, str]]:
    """All (room, object, receptacle type) triples possible for this kind of task; the last is "" for `LIGHT`."""
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
    """An empty room with the receptacles that the task needs, and a lamp if it needs one."""
    stand = random.choice(LAMP_STANDS) if kind == LIGHT else ""
    begin = random.choice([place for place in room.places[wanted] if place != target])
    needed = {begin, target, stand, APPLIANCES.get(TREATMENTS.get(kind, ""), "")} - {""}
    left = Counter(room.receptacles) - Counter(needed)
    types = Counter(needed) + Counter(random.sample(sorted(left.elements()), receptacles - len(needed)))
    found = [Thing(name, number) for name, most in types.items() for number in range(1, most + 1)]
    # In the order in which the engine lists them, because a searching player would try them in that order.
    found.sort(key=lambda place: (place.type.lower(), -place.number))
    return House(room, found, {LAMP: Thing(stand, 1)} if stand else {})


def _fill(random: Random, house: House, wanted: str, target: str, least: int, objects: int) -> None:
    """Place objects in the receptacles, at least `least` of type `wanted`, none of these in a `target` receptacle."""
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
    """Commands that complete the task; moves the objects of `house`."""
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
    """A player who does the task and records the commands."""

    def __init__(self, house: House, search: bool) -> None:
        self.house = house
        self.search = search
        self.here: Thing | None = None
        self.seen: set[Thing] = set()
        self.commands: list[str] = []

    def visit(self, place: Thing, *, closed: bool = False) -> None:
        """Go to a receptacle and, unless it may stay closed, look inside."""
        if self.here != place:
            self.commands.append(f"go to {place}")
            self.here = place
        if closed or place in self.seen:
            return
        self.seen.add(place)
        if place.type in OPENABLE:
            self.commands.append(f"open {place}")

    def take(self, wanted: str, target: str) -> Thing:
        """Take an object of type `wanted` that is not in a `target` receptacle yet."""
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
        """Put the carried object into a receptacle."""
        self.visit(place)
        self.commands.append(f"move {thing} to {place}")
        self.house.inside[thing] = place
