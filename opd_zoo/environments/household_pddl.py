"""Translation for ALFWorld's text engine: a household as a PDDL problem, and the names that a player reads."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from opd_zoo.environments.household_rooms import LIGHT, OPENABLE, TREATED, TREATMENTS, TWO, Room

_STATES = {"clean": "isClean", "heat": "isHot", "cool": "isCool"}
_ABLE = {"clean": "cleanable", "heat": "heatable", "cool": "coolable"}
_NAMED = ("SinkBasinType", "MicrowaveType", "FridgeType", "KnifeType", "ButterKnifeType")
"""Types that the domain's actions mention, whether or not the household has them."""


class Thing(NamedTuple):
    """A receptacle or an object: "drawer 2" is the second Drawer."""

    type: str
    number: int

    def __str__(self) -> str:
        return f"{self.type.lower()} {self.number}"


LAMP = Thing("DeskLamp", 1)


@dataclass(frozen=True)
class House:
    """A room and its contents.

    Attributes:
        room: its kind.
        receptacles: in the order in which the engine names them.
        inside: the receptacle of every object.
    """

    room: Room
    receptacles: list[Thing]
    inside: dict[Thing, Thing]


def write_problem(house: House, kind: str, wanted: str, target: str) -> str:
    """Write the household and its goal as a PDDL problem."""
    things = [*house.receptacles, *house.inside]
    counts = Counter(thing.type for thing in things)
    ids = {thing: _identify(thing, counts[thing.type]) for thing in things}
    spots = {place: f"loc_bar_{number:02d}" for number, place in enumerate(house.receptacles, 1)}
    facts = ["(atLocation agent1 loc_bar_00)"]
    for place, spot in spots.items():
        facts.append(f"(receptacleAtLocation {ids[place]} {spot}) (receptacleType {ids[place]} {place.type}Type)")
        if place.type in OPENABLE:
            facts.append(f"(openable {ids[place]})")
    for thing, place in house.inside.items():
        facts.append(f"(inReceptacle {ids[thing]} {ids[place]}) (objectAtLocation {ids[thing]} {spots[place]})")
        facts.append(f"(objectType {ids[thing]} {thing.type}Type)")
        able = [able for treatment, able in _ABLE.items() if thing.type in TREATED[treatment]]
        able.append("toggleable" if thing == LAMP else "pickupable")
        facts.append(" ".join(f"({word} {ids[thing]})" for word in able))
    lying = sorted({thing.type for thing in house.inside} - {LAMP.type})
    held = sorted({place.type for place in house.receptacles})
    facts += [f"(canContain {p}Type {t}Type)" for t in lying for p in held if p in house.room.places[t]]
    objects = [
        "agent1 - agent",
        " ".join(["loc_bar_00", *spots.values()]) + " - location",
        " ".join(ids[place] for place in house.receptacles) + " - receptacle",
        " ".join(ids[thing] for thing in house.inside) + " - object",
        " ".join(sorted({f"{name}Type" for name in held} | set(_NAMED[:3]))) + " - rtype",
        " ".join(sorted({f"{thing.type}Type" for thing in house.inside} | set(_NAMED[3:]))) + " - otype",
    ]
    goal = _goal(kind, wanted, target)
    parts = ["(define (problem household) (:domain alfred)", "(:objects", *objects, ")", "(:init", *facts, ")"]
    return "\n".join([*parts, f"(:goal {goal}))"])


def _identify(thing: Thing, count: int) -> str:
    """The identifier that is shown as `thing` if there are `count` of its type; see `shown_names`."""
    number = f"{count - thing.number + 1:02d}"
    name = thing.type.lower()
    return f"{name[:-5]}_bar_{number}_bar_{name}" if name.endswith("basin") else f"{name}_bar_{number}"


def _goal(kind: str, wanted: str, target: str) -> str:
    if kind == LIGHT:
        lamp = f"(objectType ?ot {LAMP.type}Type) (toggleable ?ot) (isToggled ?ot)"
        here = "(receptacleAtLocation ?r ?l) (atLocation ?a ?l) (inReceptacle ?ot ?r)"
        lit = f"(exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and {lamp} {here}))"
        return f"(and {lit} (exists (?o - object ?a - agent) (and (objectType ?o {wanted}Type) (holds ?a ?o))))"
    put = f"(objectType ?o {wanted}Type) (receptacleType ?r {target}Type) (inReceptacle ?o ?r)"
    if kind == TWO:
        other = f"(not (= ?o ?o2)) (objectType ?o2 {wanted}Type) (inReceptacle ?o2 ?r)"
        put += f" (exists (?o2 - object) (and {other}))"
    elif kind in TREATMENTS:
        put += f" ({_STATES[TREATMENTS[kind]]} ?o)"
    return f"(exists (?r - receptacle) (exists (?o - object) (and {put})))"


def shown_names(ids: Iterable[str]) -> dict[str, str]:
    """The name that the player reads for each identifier of a problem, numbered as by ALFWorld's class `Demangler`.

    Identifiers with the same name, which is the part before "_bar_", are numbered backwards in alphabetical order.
    """
    names = {id: _name(id) for id in sorted(ids)}
    left = Counter(name for name, numbered in names.values() if numbered)
    shown = {}
    for id, (name, numbered) in names.items():
        shown[id] = f"{name} {left[name]}" if numbered else name
        left[name] -= 1
    return shown


def _name(id: str) -> tuple[str, bool]:
    name, numbered, _ = id.partition("_bar_")
    return (name + "basin" if numbered and "basin" in id else name), bool(numbered)
