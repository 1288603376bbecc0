"""Episodes in this process: an error or an invalid answer costs its own episode, as it does in a process."""

import logging

import pytest

from opd.errors import CancelledError, ConfigError
from opd.tasks.environments import Observation
from opd.tasks.environments.pool import EnvironmentPool, EpisodeError, PoolSettings
from opd.tasks.environments.worlds import InProcess, Seen, Worlds
from opd.tasks.prompt import Prompt
from tests.support.environments import Naughty, Unruly

NAUGHTY = "tests.support.environments:Naughty"
HELLO = (Prompt.make("hello"), 0)
ACTIONS = ["raise", "number", "bytes", "megabytes", "surrogate", "tools", "calls", "fine"]


def outcomes(worlds: Worlds) -> dict[str, Seen]:
    """Of every action at once, then of another turn of what goes on, and of a reset that raises."""
    worlds.reset(dict.fromkeys(range(len(ACTIONS)), HELLO))
    seen = worlds.step(dict(enumerate(ACTIONS)))
    found = {action: seen[number] for number, action in enumerate(ACTIONS)}
    found["again"] = worlds.step({ACTIONS.index("fine"): "again"})[ACTIONS.index("fine")]
    found["begun"] = worlds.reset({0: HELLO})[0]
    found["reset"] = worlds.reset({1: (Prompt.make("raise"), 0)})[1]
    return found


def test_what_breaks_an_episode_breaks_it_alike_in_this_process_and_in_its_own() -> None:
    settings = PoolSettings(text_characters=1000)
    here = InProcess({"name": NAUGHTY}, settings)
    with EnvironmentPool({"name": NAUGHTY}, settings) as there:
        found = outcomes(here)
        assert found == outcomes(there)
        assert here.failures == there.failures
    kinds = {action: seen.kind for action, seen in found.items() if isinstance(seen, EpisodeError)}
    raised = dict.fromkeys(("raise", "number", "bytes", "tools", "reset"), "raised")
    assert kinds == raised | dict.fromkeys(("megabytes", "surrogate", "calls"), "invalid")
    assert found["again"] == Observation("you said again, 2") and found["begun"] == Observation("hello")


def test_an_environment_that_leaves_the_interpreter_costs_its_episode() -> None:
    worlds = InProcess({"name": NAUGHTY})
    worlds.reset(dict.fromkeys(range(2), HELLO))
    seen = worlds.step({0: "leave", 1: "stay"})
    assert isinstance(seen[0], EpisodeError) and seen[0].reason.startswith("SystemExit: as asked")
    assert seen[1] == Observation("you said stay, 1")


def test_what_cannot_be_closed_is_named_and_keeps_nothing_else_open(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds = InProcess({"name": f"{Unruly.__module__}:Unruly", "options": {"digits": 1, "turns": 1}})
    prompt = Prompt.make("5", extra={"program": "5", "register": 0})
    worlds.reset(dict.fromkeys(range(3), (prompt, 0)))
    original, closed = Unruly.close, []

    def close(self: Unruly) -> None:
        closed.append(self)
        original(self)

    monkeypatch.setattr(Unruly, "close", close)
    with caplog.at_level(logging.WARNING):
        worlds.close()
    (record,) = caplog.records  # once, and not for every episode of a run
    assert len(closed) == len(set(map(id, closed))) == 3
    assert "did not close: OSError: as asked (environments.py:" in record.getMessage()


def test_a_signal_that_comes_while_an_environment_runs_is_not_its_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Naughty, action: str) -> None:
        raise CancelledError("stopped by a signal")

    worlds = InProcess({"name": NAUGHTY})
    worlds.reset({0: HELLO})
    monkeypatch.setattr(Naughty, "step", interrupted)
    with pytest.raises(CancelledError):
        worlds.step({0: "hi"})
    assert not worlds.failures


def test_an_environment_that_cannot_be_made_is_refused_with_its_own_sentence() -> None:
    with pytest.raises(ConfigError, match=r"cannot be made: RuntimeError: .*\.$"):
        InProcess({"name": "tests.support.environments:Stillborn"})
