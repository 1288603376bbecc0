"""Episodes in processes: what breaks costs its own episode, and nothing is left behind."""

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import forked
import psutil
import pytest
from waiting import PATIENCE, wait_until

from opd.errors import ConfigError
from opd.tasks.environments import Observation
from opd.tasks.environments.lock import Lock, LockOptions
from opd.tasks.environments.pool import EnvironmentPool, EpisodeError, PoolSettings
from opd.tasks.prompt import Prompt

NAUGHTY = "tests.support.environments:Naughty"


SETTINGS = PoolSettings(step_seconds=PATIENCE, text_characters=1000)
HANGING = 5.0
"""Seconds after which an episode counts as hung in the test of it; elsewhere none does."""


@pytest.fixture
def naughty() -> Iterator[EnvironmentPool]:
    with EnvironmentPool({"name": NAUGHTY}, SETTINGS) as pool:
        yield pool


@pytest.fixture(scope="module")
def going_on() -> Iterator[EnvironmentPool]:
    """A pool for many tests: what an episode does to it is what they are about."""
    with EnvironmentPool({"name": NAUGHTY}, SETTINGS) as pool:
        yield pool


def test_many_episodes_play_as_one_does_alone() -> None:
    lock = Lock(LockOptions(digits=4, turns=6))
    prompts = [lock.draw(Random(seed)) for seed in range(20)]
    with EnvironmentPool({"name": "lock", "options": {"digits": 4, "turns": 6}}) as pool:
        seen = pool.reset({i: (prompt, 0) for i, prompt in enumerate(prompts)})
        for turn in range(4):
            seen = pool.step({i: prompt.extra["path"][turn] for i, prompt in enumerate(prompts)})
    for i, prompt in enumerate(prompts):
        alone = [lock.reset(prompt, 0), *(lock.step(action) for action in prompt.extra["path"])]
        assert seen[i] == alone[-1]
    assert not pool.failures


def test_an_environment_may_print_as_much_as_it_likes() -> None:
    with EnvironmentPool({"name": "tests.support.environments:Chatty"}) as pool:
        pool.reset({0: (Prompt.make("hello"), 0)})
        seen = [pool.step({0: action})[0] for action in ("a", "b")]
    assert seen == [Observation("you said a, 1"), Observation("you said b, 2")]


def test_a_host_finds_the_modules_that_its_caller_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_the_script.py").write_text("from tests.support.environments import Chatty\n")
    monkeypatch.syspath_prepend(tmp_path)  # as Python does with the folder of a script
    with EnvironmentPool({"name": "beside_the_script:Chatty"}) as pool:
        pool.reset({0: (Prompt.make("hello"), 0)})
        assert pool.step({0: "a"})[0] == Observation("you said a, 1")


@pytest.mark.parametrize(
    ("action", "kind", "reason"),
    [
        ("raise", "raised", "ValueError: as asked (environments.py:"),
        ("hang", "hung", f"no answer within {HANGING:g} s"),
        ("exit", "died", "its process ended"),
        ("number", "raised", "returned int instead of an Observation"),
        ("megabytes", "invalid", "over the limit of 1000"),
        ("endless", "invalid", "its answer is longer than"),
        ("bytes", "raised", "not JSON serializable"),
        ("surrogate", "invalid", "not Unicode text"),
        ("tools", "raised", "ValueError"),
        ("calls", "invalid", "info.bad_calls is not a number"),
    ],
)
def test_an_episode_that_breaks_is_told_apart_and_leaves_the_others_alone(
    going_on: EnvironmentPool, monkeypatch: pytest.MonkeyPatch, action: str, kind: str, reason: str
) -> None:
    if action == "hang":
        monkeypatch.setattr(going_on, "settings", SETTINGS.model_copy(update={"step_seconds": HANGING}))
    going_on.failures.clear()
    prompt = Prompt.make("hello")
    going_on.reset(dict.fromkeys(range(3), (prompt, 0)))
    seen = going_on.step({0: "fine", 1: action, 2: "fine"})
    broken = seen[1]
    assert isinstance(broken, EpisodeError) and broken.kind == kind and reason in broken.reason
    assert seen[0] == seen[2] == Observation("you said fine, 1")
    assert going_on.failures == {kind: 1}
    after = going_on.step({0: "again", 2: "again"})
    assert after[0] == Observation("you said again, 2")
    assert going_on.reset({1: (prompt, 0)})[1] == Observation("hello")


def test_a_process_that_is_killed_costs_its_episode(naughty: EnvironmentPool) -> None:
    naughty.reset(dict.fromkeys(range(2), (Prompt.make("hello"), 0)))
    pid = naughty.step({0: "pid", 1: "fine"})[0]
    assert isinstance(pid, Observation)
    os.kill(int(pid.text), signal.SIGKILL)
    seen = naughty.step({0: "fine", 1: "fine"})
    assert isinstance(seen[0], EpisodeError) and seen[0].kind == "died"
    assert isinstance(seen[1], Observation)


def test_an_episode_whose_process_cannot_be_forked_breaks_and_the_others_play(
    naughty: EnvironmentPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello = (Prompt.make("hello"), 0)
    naughty.reset({0: hello})
    with monkeypatch.context() as patch:
        patch.setattr(socket, "send_fds", lambda *_: None)  # so that the host never gets the connection
        seen = naughty.reset({0: hello, 1: hello})
    assert seen[0] == Observation("hello")
    assert isinstance(seen[1], EpisodeError) and seen[1].kind == "died"
    assert naughty.reset({1: hello})[1] == Observation("hello")


def test_an_environment_that_hangs_before_it_reads_a_long_prompt_is_cut_off() -> None:
    prompt = Prompt.make("hello", extra={"solution": "x" * 2**21})
    with EnvironmentPool({"name": "tests.support.environments:Dawdling"}, PoolSettings(reset_seconds=HANGING)) as pool:
        seen = pool.reset({0: (prompt, 0)})[0]
    assert seen == EpisodeError("hung", f"it read nothing within {HANGING:g} s")


def test_a_host_that_is_killed_costs_no_later_episode(naughty: EnvironmentPool) -> None:
    hello = (Prompt.make("hello"), 0)
    naughty.reset({0: hello})
    process = naughty._host._process
    assert process is not None
    process.kill()
    process.wait()
    assert naughty.step({0: "fine"})[0] == Observation("you said fine, 1")
    assert naughty.reset({0: hello, 1: hello}) == dict.fromkeys(range(2), Observation("hello"))
    assert not naughty.failures


def test_memory_is_limited_where_it_is_asked_for() -> None:
    with EnvironmentPool({"name": NAUGHTY}, PoolSettings(memory_mib=512)) as pool:
        pool.reset({0: (Prompt.make("hello"), 0)})
        seen = pool.step({0: "gigabytes"})[0]
    assert isinstance(seen, EpisodeError) and "MemoryError" in seen.reason


def _gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)


def test_nothing_is_left_behind() -> None:
    me = psutil.Process()
    before = {p.pid for p in me.children(recursive=True)}
    pool = EnvironmentPool({"name": NAUGHTY})
    pool.reset(dict.fromkeys(range(4), (Prompt.make("hello"), 0)))
    mine = [p.pid for p in me.children(recursive=True) if p.pid not in before]
    assert len(mine) == 5
    host = pool._host._process
    pool.close()
    assert host is not None and host.returncode == 0, "the host ends by itself and need not be killed"
    assert _gone(mine)


OWNER = """
import os, psutil, signal
from opd.tasks.environments.pool import EnvironmentPool
from opd.tasks.prompt import Prompt
pool = EnvironmentPool({"name": "tests.support.environments:Naughty"})
pool.reset(dict.fromkeys(range(2), (Prompt.make("hello"), 0)))
print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_behind_by_a_process_that_is_killed() -> None:
    owner = forked.run([sys.executable, "-c", OWNER])
    pids = [int(pid) for pid in owner.stdout.split()]
    assert owner.returncode == -signal.SIGKILL and len(pids) == 3, owner.stderr
    wait_until(lambda: _gone(pids))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "locke"}, "locke"),
        ({"name": "lock", "options": {"digits": 0}}, "digits"),
        ({"name": "tests.support.environments:Stillborn"}, "no licence"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_with_its_own_sentence(
    spec: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        EnvironmentPool(spec)


def test_an_environment_whose_import_never_ends_is_refused_after_its_time() -> None:
    with pytest.raises(ConfigError, match=r"within 0\.5 s; raise limits.reset_seconds"):
        EnvironmentPool({"name": "tests.support.environments:Unending"}, PoolSettings(reset_seconds=0.5))
