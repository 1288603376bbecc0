"""Rooms and keys: gold paths solve them, no shorter one does, and everything is deterministic."""

from copy import deepcopy
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from opd.config import parse_settings
from opd.tasks.environments import Environment, Observation
from opd_zoo.environments.rooms import Rooms


def make(**options: Any) -> Rooms:
    return Rooms(parse_settings(Rooms.Options, options))


def play(world: Environment, prompt: Any, actions: list[str]) -> list[Observation]:
    return [world.reset(prompt, 0), *(world.step(action) for action in actions)]


@given(seed=st.integers(0, 10_000), depth=st.integers(1, 30))
def test_the_gold_path_of_rooms_has_the_depth_asked_for_and_solves_them(seed: int, depth: int) -> None:
    rooms = make(depth=depth)
    prompt = rooms.draw(Random(seed))
    assert len(prompt.extra["path"]) == depth
    last = play(rooms, prompt, prompt.extra["path"])[-1]
    assert last.done and last.success and last.reward == 1.0


def solvable_before(rooms: Rooms, prompt: Any, turns: int) -> bool:
    """Whether any `turns` commands take the lamp."""
    rooms.reset(prompt, 0)
    frontier, seen = [rooms], set()
    for _ in range(turns):
        following = []
        for before in frontier:
            room = before._house[before._here]
            commands = [f"{verb} {door}" for door in room["doors"] for verb in ("go", "open")]
            for command in [*commands, *(f"take {thing}" for thing in room["things"])]:
                after = deepcopy(before)
                if after.step(command).success:
                    return True
                key = repr({k: v for k, v in vars(after).items() if k != "_turn"})
                if key not in seen:
                    seen.add(key)
                    following.append(after)
        frontier = following
    return False


@given(seed=st.integers(0, 10_000))
def test_no_path_through_rooms_is_shorter_than_the_gold_path(seed: int) -> None:
    rooms = make(depth=5)
    assert not solvable_before(rooms, rooms.draw(Random(seed)), 4)


def test_two_locks_of_one_colour_take_two_keys() -> None:
    rooms = make(depth=7, locked=1, distractions=0)
    prompt = next(p for p in map(rooms.draw, map(Random, range(100))) if p.extra["path"].count("take red key") == 2)
    assert not solvable_before(rooms, prompt, 6) and solvable_before(rooms, prompt, 7)
    _, took, opened, *_ = play(rooms, prompt, prompt.extra["path"][:2])
    assert "You carry: red key" in took.text and "You carry: nothing" in opened.text


@given(seed=st.integers(0, 10_000))
def test_terse_houses_are_the_plain_ones_in_letters(seed: int) -> None:
    plain, terse = make(), make(words="terse")
    one, other = plain.draw(Random(seed)), terse.draw(Random(seed))
    assert one.extra["house"] == other.extra["house"] and all(len(command) == 2 for command in other.extra["path"])
    long, short = (play(world, p, p.extra["path"]) for world, p in ((plain, one), (terse, other)))
    assert [seen.info for seen in long] == [seen.info for seen in short] and short[-1].success
    assert sum(map(len, (seen.text for seen in short))) < sum(map(len, (seen.text for seen in long))) / 4


def test_a_terse_room_shows_locks_keys_and_what_is_carried() -> None:
    rooms = make(depth=4, locked=1, distractions=0, words="terse")
    prompt = next(p for p in map(rooms.draw, map(Random, range(100))) if p.extra["path"] == ["tR", "on", "gn", "t*"])
    shown = [seen.text for seen in play(rooms, prompt, ["gn", "go north", "on", "tR", " on\n", "gn", "t*"])]
    assert shown == ["nR,R,:", "nR,R,:", "nR,R,:", "nR,R,:", "nR,,R:", "n,,:", "s,*,:", "s,,*:"]


@given(seed=st.integers(0, 10_000), turns=st.integers(10, 20))
def test_a_searching_path_looks_into_side_rooms_comes_back_and_wins(seed: int, turns: int) -> None:
    direct, searching = (make(turns=turns, search=search) for search in (False, True))
    short, long = direct.draw(Random(seed)), searching.draw(Random(seed))
    assert short.uid == long.uid and short.extra["house"] == long.extra["house"]
    standings = []
    searching.reset(long, 0)
    for command in long.extra["path"]:
        seen = searching.step(command)
        standings.append(searching.standing())
    lost = sum(standing.lost for standing in standings)
    assert seen.success and len(long.extra["path"]) == 10 + 2 * lost <= max(turns, 10)


def test_searching_paths_err_about_as_often_as_one_who_cannot_know() -> None:
    # A room with an open way on and a side room is a toss; the house draws side rooms for half of its rooms.
    rooms = make(depth=10, locked=0, turns=40, search=True)
    looks = [(len(rooms.draw(Random(seed)).extra["path"]) - 10) / 2 for seed in range(200)]
    assert 9 * 0.5 * 0.5 * 0.85 < sum(looks) / 200 < 9 * 0.5 * 0.5 * 1.15


@given(seed=st.integers(0, 10_000))
def test_what_is_needed_falls_by_one_with_every_action_of_the_path_and_rises_off_it(seed: int) -> None:
    rooms = make(depth=10)
    prompt = rooms.draw(Random(seed))
    rooms.reset(prompt, 0)
    for number, command in enumerate(prompt.extra["path"]):
        standing = rooms.standing()
        assert (standing.needed, standing.lost) == (10 - number, False)
        for door, (_, lock) in rooms._house[rooms._here]["doors"].items():
            if not lock and command != f"go {door}":
                strayed = deepcopy(rooms)
                strayed.step(f"go {door}")
                assert strayed.standing().needed == 11 - number
        rooms.step(command)
    assert rooms.standing().needed == 0


def test_commands_without_sense_change_nothing_and_cost_a_turn() -> None:
    rooms = make(depth=3, turns=4)
    prompt = rooms.draw(Random(1))
    first, *rest = play(rooms, prompt, ["sing", "go nowhere", "take sun", ""])
    assert all(first.text in seen.text and "Nothing happens." in seen.text for seen in rest)
    assert rest[-1].done and rest[-1].success is False and rest[-1].reward == 0.0
