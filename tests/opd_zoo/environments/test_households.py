"""Households: their path does their task, by a small engine of this test; ALFWorld's own plays them in `make envs`."""

import re
import sys
from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.config import parse_settings
from opd.errors import ConfigError
from opd_zoo.environments.alfworld import ALFWorld, ALFWorldOptions
from opd_zoo.environments.household_pddl import shown_names
from opd_zoo.environments.household_rooms import KINDS, LIGHT, OPENABLE, ROOMS, TREATED, TREATMENTS, TWO
from opd_zoo.environments.households import Household, make_household

DRAWN = st.builds(
    lambda seed, kind, receptacles, objects, search: make_household(
        Random(seed), kind, receptacles=receptacles, objects=objects, search=search
    ),
    st.integers(0, 10**6),
    st.sampled_from(KINDS),
    st.integers(4, 20),
    st.integers(2, 40),
    st.booleans(),
)


class Play:
    """What the domain says of the commands that paths are made of."""

    def __init__(self, household: Household) -> None:
        init = household.problem.partition("(:init")[2].partition("(:goal")[0]
        self.facts = {tuple(fact.split()) for fact in re.findall(r"\(([^()]+)\)", init)}
        ids = {word for fact in self.facts for word in fact[1:] if "_bar_" in word}
        self.ids = {name: id for id, name in shown_names(ids).items()}
        self.spot = "loc_bar_00"
        self.held = ""

    def of(self, predicate: str, first: str) -> str:
        return next(fact[2] for fact in self.facts if fact[:2] == (predicate, first))

    def reach(self, place: str, *, closed: bool = False) -> None:
        """Assert that the player stands at a receptacle, which is open."""
        assert self.of("receptacleAtLocation", place) == self.spot
        assert closed or ("openable", place) not in self.facts or ("opened", place) in self.facts

    def do(self, command: str) -> None:
        verb, _, rest = command.partition(" ")
        names = re.split(" from | to | with ", rest.removeprefix("to "))
        thing, place = self.ids[names[0]], self.ids[names[-1]]
        if verb == "go":
            self.spot = self.of("receptacleAtLocation", place)
        elif verb == "open":
            self.reach(place, closed=True)
            assert ("openable", place) in self.facts and ("opened", place) not in self.facts
            self.facts.add(("opened", place))
        elif verb == "take":
            self.reach(place)
            assert not self.held and ("pickupable", thing) in self.facts
            self.facts.remove(("inReceptacle", thing, place))
            self.held = thing
        elif verb == "move":
            self.reach(place)
            assert self.held == thing
            types = self.of("receptacleType", place), self.of("objectType", thing)
            assert ("canContain", *types) in self.facts
            self.facts.add(("inReceptacle", thing, place))
            self.held = ""
        elif verb == "use":
            self.reach(self.of("inReceptacle", thing))
            assert ("toggleable", thing) in self.facts
            self.facts.add(("used", thing))
        else:
            self.reach(place, closed=True)
            able, appliance = {
                "clean": ("cleanable", "SinkBasinType"),
                "heat": ("heatable", "MicrowaveType"),
                "cool": ("coolable", "FridgeType"),
            }[verb]
            assert self.held == thing and (able, thing) in self.facts
            assert self.of("receptacleType", place) == appliance
            self.facts.add((verb, thing))

    def goal(self, household: Household) -> bool:
        asked = re.findall(r"(?:object|receptacle)Type \?(\w+) (\w+)Type", household.problem.partition("(:goal")[2])
        types = dict(asked)
        if household.kind == LIGHT:
            return bool(self.held) and self.of("objectType", self.held) == f"{types['o']}Type" and self.lit()
        lying = Counter(
            fact[2]
            for fact in self.facts
            if fact[0] == "inReceptacle"
            and self.of("objectType", fact[1]) == f"{types['o']}Type"
            and self.of("receptacleType", fact[2]) == f"{types['r']}Type"
            and (household.kind not in TREATMENTS or (TREATMENTS[household.kind], fact[1]) in self.facts)
        )
        return max(lying.values(), default=0) >= (2 if household.kind == TWO else 1)

    def lit(self) -> bool:
        used = [fact[1] for fact in self.facts if fact[0] == "used"]
        return any(self.of("receptacleAtLocation", self.of("inReceptacle", lamp)) == self.spot for lamp in used)


@settings(max_examples=60)
@given(household=DRAWN)
def test_the_path_does_the_task_with_its_last_command_and_not_before(household: Household) -> None:
    play = Play(household)
    won = [play.goal(household)]
    for command in household.path:
        play.do(command)
        won.append(play.goal(household))
    assert won == [False] * len(household.path) + [True]


@settings(max_examples=30)
@given(household=DRAWN)
def test_a_searching_path_never_opens_or_looks_twice_and_takes_what_it_has_seen(household: Household) -> None:
    assert len({c for c in household.path if c.startswith("open ")}) == sum(
        c.startswith("open ") for c in household.path
    )
    standing = ""
    for command in household.path:
        if command.startswith("take "):
            assert standing == command.partition(" from ")[2]
        standing = command.removeprefix("go to ") if command.startswith("go to ") else standing


@given(
    seed=st.integers(0, 10**6), kind=st.sampled_from(KINDS), receptacles=st.integers(4, 20), objects=st.integers(2, 40)
)
@settings(max_examples=30)
def test_a_household_has_the_size_asked_for(seed: int, kind: Any, receptacles: int, objects: int) -> None:
    drawn = make_household(Random(seed), kind, receptacles=receptacles, objects=objects, search=False)
    listed = drawn.problem.partition("(:objects")[2].partition("(:init")[0]
    lines = {
        line.rpartition(" - ")[2]: line.rpartition(" - ")[0].split() for line in listed.split("\n") if " - " in line
    }
    assert len(lines["receptacle"]) == receptacles == len(lines["location"]) - 1
    assert len(lines["object"]) == objects + (kind == LIGHT)
    assert drawn.problem.count("(") == drawn.problem.count(")")
    assert drawn == make_household(Random(seed), kind, receptacles=receptacles, objects=objects, search=False)


def test_searching_and_knowing_paths_are_of_the_same_household() -> None:
    for kind in KINDS:
        knows, searches = (
            make_household(Random(3), kind, receptacles=12, objects=20, search=search) for search in (False, True)
        )
        assert knows.problem == searches.problem and len(knows.path) <= len(searches.path)
        assert len(knows.path) >= 4


def test_identifiers_are_numbered_backwards_in_alphabetical_order() -> None:
    ids = ["apple_bar_01", "apple_bar_02", "sink_bar_01_bar_sinkbasin", "agent1", "appletype"]
    assert shown_names(ids) == {
        "apple_bar_01": "apple 2",
        "apple_bar_02": "apple 1",
        "sink_bar_01_bar_sinkbasin": "sinkbasin 1",
        "agent1": "agent1",
        "appletype": "appletype",
    }


def test_every_room_is_large_enough_and_every_object_in_it_has_a_place() -> None:
    for room in ROOMS.values():
        assert sum(room.receptacles.values()) >= 20
        assert all(places and set(places) <= room.receptacles.keys() for places in room.places.values())
    assert {thing for things in TREATED.values() for thing in things} <= {t for r in ROOMS.values() for t in r.places}
    assert all(any(place in room.receptacles for room in ROOMS.values()) for place in OPENABLE)


@pytest.mark.parametrize("missing", ["textworld", "fast_downward", "alfworld"])
def test_without_its_packages_the_environment_says_what_to_install(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=r"alfworld, .*fast_downward_textworld .*make envs"):
        ALFWorld(parse_settings(ALFWorldOptions, {}))


@pytest.mark.parametrize("options", [{"kinds": ["fly"]}, {"kinds": []}, {"receptacles": 3}, {"objects": 1}])
def test_settings_out_of_range_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        parse_settings(ALFWorldOptions, options)
