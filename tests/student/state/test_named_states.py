"""States of plug-ins by name: any order, new ones and missing ones, and names that are listed twice."""

from types import SimpleNamespace
from typing import Any

import pytest

from opd.errors import CheckpointError, ConfigError
from student.state.named_states import load_states, names_of, states_of


class Part:
    """A plug-in that remembers a number; 0 is no state."""

    def __init__(self, name: str, number: int = 0) -> None:
        self.settings = SimpleNamespace(name=name)
        self.number = number

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number} if self.number else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def test_plug_ins_of_one_name_are_told_apart() -> None:
    parts = [Part("a", 1), Part("b", 2), Part("a", 3), Part("a", 4)]
    assert names_of(parts) == ["a", "b", "a#2", "a#3"]
    fresh = [Part("a"), Part("a"), Part("b"), Part("a")]
    load_states(fresh, states_of(parts), "methods")
    assert [part.number for part in fresh] == [1, 3, 2, 4]


def test_what_is_new_starts_afresh_and_what_is_left_out_is_named(caplog: pytest.LogCaptureFixture) -> None:
    saved = states_of([Part("old", 1), Part("kept", 2)])
    fresh = [Part("new", 9), Part("kept", 9)]
    load_states(fresh, saved, "rewards")
    assert [part.number for part in fresh] == [9, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "the checkpoint has no state of rewards.new, which starts afresh",
        "the recipe no longer lists rewards.old; its state in the checkpoint is discarded",
    ]


def test_what_keeps_no_state_may_come_and_go_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    load_states([Part("new")], {"old": {}}, "rewards")
    assert not caplog.records


@pytest.mark.parametrize(("before", "now"), [("aa", "a"), ("a", "aa"), ("aab", "aaab")])
def test_a_name_listed_more_or_less_often_is_refused(before: str, now: str) -> None:
    saved = states_of([Part(name, 1) for name in before])
    with pytest.raises(CheckpointError, match=r"methods lists a (once|\d times), .* \d;"):
        load_states([Part(name) for name in now], saved, "methods")


def test_a_name_listed_twice_may_be_left_out_or_come_whole(caplog: pytest.LogCaptureFixture) -> None:
    load_states([], states_of([Part("a", 1), Part("a", 2)]), "methods")
    assert len(caplog.records) == 2
    load_states([Part("a", 1), Part("a", 2)], {}, "methods")
    assert len(caplog.records) == 4


def test_a_plug_in_that_cannot_load_its_state_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"methods\.a .*KeyError\('number'\)"):
        load_states([Part("a")], {"a": {"another": 1}}, "methods")


def test_an_error_of_a_plug_ins_own_is_left_alone() -> None:
    class Picky(Part):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ConfigError("settings and state do not fit")

    with pytest.raises(ConfigError, match="do not fit"):
        load_states([Picky("a")], {"a": {"number": 1}}, "methods")
