"""Our own environments: gold paths solve them, mistakes lead where they should, and everything is deterministic."""

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


def make(name: str, **options: Any) -> Any:
    cls = ENVIRONMENTS.load(name)
    return cls(parse_settings(cls.Options, options))


def play(world: Environment, prompt: Any, actions: list[str]) -> list[Observation]:
    return [world.reset(prompt, 0), *(world.step(action) for action in actions)]


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
    with pytest.raises(ConfigError, match=r"turns is 3, .*4 digits"):
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
