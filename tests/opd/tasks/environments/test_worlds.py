"""Our own environments: gold paths solve them, mistakes lead where they should, and everything is deterministic."""

from copy import deepcopy
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.config import parse_settings
from opd.errors import ConfigError, DataError
from opd.tasks import TaskSettings, build_prompts
from opd.tasks.environments import ENVIRONMENTS, Environment, Observation
from opd.tasks.environments.lock import LETTERS, Lock
from opd.tasks.environments.rooms import Rooms


def make(name: str, **options: Any) -> Any:
    cls = ENVIRONMENTS.load(name)
    return cls(parse_settings(cls.Options, options))


def play(world: Environment, prompt: Any, actions: list[str]) -> list[Observation]:
    return [world.reset(prompt, 0), *(world.step(action) for action in actions)]


@given(seed=st.integers(0, 10_000), depth=st.integers(1, 30))
def test_the_gold_path_of_rooms_has_the_depth_asked_for_and_solves_them(seed: int, depth: int) -> None:
    rooms = make("rooms", depth=depth)
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
    rooms: Rooms = make("rooms", depth=5)
    assert not solvable_before(rooms, rooms.draw(Random(seed)), 4)


def test_two_locks_of_one_colour_take_two_keys() -> None:
    rooms: Rooms = make("rooms", depth=7, locked=1, distractions=0)
    prompt = next(p for p in map(rooms.draw, map(Random, range(100))) if p.extra["path"].count("take red key") == 2)
    assert not solvable_before(rooms, prompt, 6) and solvable_before(rooms, prompt, 7)
    _, took, opened, *_ = play(rooms, prompt, prompt.extra["path"][:2])
    assert "You carry: red key" in took.text and "You carry: nothing" in opened.text


@given(seed=st.integers(0, 10_000))
def test_terse_houses_are_the_plain_ones_in_letters(seed: int) -> None:
    plain, terse = make("rooms"), make("rooms", words="terse")
    one, other = plain.draw(Random(seed)), terse.draw(Random(seed))
    assert one.extra["house"] == other.extra["house"] and all(len(command) == 2 for command in other.extra["path"])
    long, short = (play(world, p, p.extra["path"]) for world, p in ((plain, one), (terse, other)))
    assert [seen.info for seen in long] == [seen.info for seen in short] and short[-1].success
    assert sum(map(len, (seen.text for seen in short))) < sum(map(len, (seen.text for seen in long))) / 4


def test_a_terse_room_shows_locks_keys_and_what_is_carried() -> None:
    rooms = make("rooms", depth=4, locked=1, distractions=0, words="terse")
    prompt = next(p for p in map(rooms.draw, map(Random, range(100))) if p.extra["path"] == ["tR", "on", "gn", "t*"])
    shown = [seen.text for seen in play(rooms, prompt, ["gn", "go north", "on", "tR", " on\n", "gn", "t*"])]
    assert shown == ["nR,R,:", "nR,R,:", "nR,R,:", "nR,R,:", "nR,,R:", "n,,:", "s,*,:", "s,,*:"]


@given(seed=st.integers(0, 10_000), turns=st.integers(10, 20))
def test_a_searching_path_looks_into_side_rooms_comes_back_and_wins(seed: int, turns: int) -> None:
    direct, searching = (make("rooms", turns=turns, search=search) for search in (False, True))
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
    rooms = make("rooms", depth=10, locked=0, turns=40, search=True)
    looks = [(len(rooms.draw(Random(seed)).extra["path"]) - 10) / 2 for seed in range(200)]
    assert 9 * 0.5 * 0.5 * 0.85 < sum(looks) / 200 < 9 * 0.5 * 0.5 * 1.15


@given(seed=st.integers(0, 10_000))
def test_what_is_needed_falls_by_one_with_every_action_of_the_path_and_rises_off_it(seed: int) -> None:
    rooms: Rooms = make("rooms", depth=10)
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
    rooms = make("rooms", depth=3, turns=4)
    prompt = rooms.draw(Random(1))
    first, *rest = play(rooms, prompt, ["sing", "go nowhere", "take sun", ""])
    assert all(first.text in seen.text and "Nothing happens." in seen.text for seen in rest)
    assert rest[-1].done and rest[-1].success is False and rest[-1].reward == 0.0


@given(seed=st.integers(0, 10_000))
def test_the_right_answers_open_the_lock(seed: int) -> None:
    lock = make("lock", digits=6, turns=9)
    prompt = lock.draw(Random(seed))
    seen = play(lock, prompt, prompt.extra["path"])
    assert [o.text for o in seen[1:-1]] == prompt.extra["path"][:-1]
    assert seen[-1].done and seen[-1].success and not any(o.done for o in seen[:-1])


def test_a_wrong_answer_leads_to_a_letter_that_only_b_leaves_to_the_same_place() -> None:
    lock: Lock = make("lock", digits=3, turns=9)
    prompt = lock.draw(Random(0))
    path = prompt.extra["path"]
    wrong = str((int(path[0]) + 1) % 10)
    shown = play(lock, prompt, [wrong, path[0], "b", path[0]])
    assert shown[1].text == LETTERS[int(wrong)] and shown[1].info["lost"]
    assert shown[2].text in LETTERS
    assert shown[3].text == shown[0].text
    assert shown[4].text == path[0] and shown[4].info["place"] == 1


def test_a_lock_may_show_what_comes_next_and_have_fewer_symbols() -> None:
    lock = make("lock", digits=4, turns=6, symbols=3, show="both")
    prompt = lock.draw(Random(2))
    program, path = prompt.extra["program"], prompt.extra["path"]
    assert set(program) | set(path) <= set("012")
    seen = play(lock, prompt, path)
    before = [str(prompt.extra["register"]), *path]
    assert [one.text for one in seen] == [f"{value}{digit}" for value, digit in zip(before, program, strict=False)] + [
        ""
    ]
    assert seen[-1].success
    wrong = str((int(path[0]) + 1) % 3)
    opened, lost, back = play(lock, prompt, [wrong, "b"])
    assert lost.text in LETTERS and back.text == opened.text


@pytest.mark.parametrize("name", ["lock", "rooms"])
def test_problems_of_a_world_have_identities_of_their_own_and_some_are_held_out(name: str) -> None:
    source = build_prompts(TaskSettings(task=name), seed=0)
    train, heldout = ({prompt.uid for prompt in source.prompts(split, 20)} for split in ("train", "heldout"))
    assert len(train) == len(heldout) == 20 and not train & heldout


@pytest.mark.parametrize("name", ["lock", "rooms"])
def test_a_world_is_a_source_of_prompts_that_name_it(name: str) -> None:
    source = build_prompts(TaskSettings(task=name), seed=0)
    (prompt,) = source.prompts("train", 1)
    assert prompt.extra["environment"]["name"] == name and prompt.domain == name
    assert not source.verify(prompt, "anything").known
    assert source.labels() == {(None, name)}


def test_a_lock_that_cannot_open_is_refused() -> None:
    with pytest.raises(ConfigError, match="turns is 3, fewer than the 4 digits"):
        make("lock", digits=4, turns=3)


def test_observations_from_outside_are_checked() -> None:
    assert Observation.from_dict(Observation("x", reward=1.0).to_dict(), longest=1) == Observation("x", reward=1.0)
    for data, message in (
        ({"text": b"x"}, "bytes, not text"),
        ({"text": "xx"}, "2 characters"),
        ({"text": "x", "reward": float("nan")}, "not a number from"),
        ({"text": "x", "reward": 1e308}, "not a number from"),
        ({"text": "x", "reward": -(10**400)}, "not a number from"),
    ):
        with pytest.raises(DataError, match=message):
            Observation.from_dict(data, longest=1)
