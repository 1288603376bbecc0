"""Simulated worlds over HTTP: an episode with tools, user and judge, and what becomes of one when a part fails."""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from judge_servers import Server, serving
from simulated_world import TOOLS, say

from opd.config import parse_settings
from opd.tasks.environments.base import Observation
from opd.tasks.environments.pool import EpisodeError, PoolSettings
from opd.tasks.environments.worlds import InProcess
from opd.tasks.prompt import Prompt
from opd_zoo.environments.simulated import LEVELS, TASK, Simulated, SimulatedOptions
from opd_zoo.environments.simulated_task import ASPECTS, bound, draw_levels

HARD = {aspect: high for aspect, (_, high) in ASPECTS.items()}


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as made:
        made.say = say
        yield made


def world(url: str, levels: dict[str, int] = HARD, **simulator: Any) -> tuple[InProcess, Prompt]:
    chat = {"endpoint": url, "model": "m", "attempts": 1, **simulator}
    options = {"simulator": chat, "tools": {"sums": TOOLS["sums"]}}
    made = Simulated(parse_settings(SimulatedOptions, options)).draw(Random(1))
    prompt = Prompt.make(made.text or "", extra={**made.extra, LEVELS: levels})
    return InProcess({"name": "simulated", "options": options}, PoolSettings()), prompt


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_an_episode_has_a_task_tools_a_user_and_a_judge(server: Server) -> None:
    worlds, prompt = world(server.url)
    seen: Any = worlds.reset({0: (prompt, 0)})[0]
    assert seen.text.startswith("Help.\nUser: ") and len(seen.tools) == 2
    seen = worlds.step({0: call("add", a=1, b=2) + call("add", a=1) + call("fly") + "<tool_call>{"})[0]
    result, missing, unknown, broken = map(json.loads, seen.results)
    assert result == {"called": "add", "sum": 3} and "needs b" in missing["error"]
    assert "no tool 'fly'" in unknown["error"] and "does not end" in broken["error"] and seen.info["bad_calls"] == 1
    assert worlds.step({0: "3"})[0].text == "User: And 2+2=\n"  # type: ignore[union-attr]
    # The rule of the judge: bytes of the last words modulo three, less one.
    last: Any = worlds.step({0: "12345"})[0]
    assert last.done and last.reward == 1.0 and last.success
    worlds.close()


def test_a_question_asked_again_is_answered_from_what_was_kept_and_counts_again(server: Server, tmp_path: Any) -> None:
    for _ in range(2):
        worlds, prompt = world(server.url, cache=str(tmp_path))
        seen: Any = worlds.reset({0: (prompt, 0)})[0]
        assert seen.info["measures"] == {"simulator_questions": 1}
        worlds.close()
    assert len(server.asked) == 1


def test_the_questions_of_an_episode_are_not_counted_in_the_next_one(server: Server) -> None:
    options = {"simulator": {"endpoint": server.url, "model": "m"}, "tools": {"sums": TOOLS["sums"]}}
    played = Simulated(parse_settings(SimulatedOptions, options))
    prompt = played.draw(Random(1))
    counts = [seen.info["measures"] for _ in range(2) for seen in (played.reset(prompt, 0), played.step("3"))]
    assert counts == [{"simulator_questions": 1}] * 4


@pytest.mark.parametrize("fault", ["down", "status", "words", "list", "slow", "megabytes", "raw"])
def test_a_part_that_fails_breaks_its_episode_and_the_next_one_is_played(server: Server, fault: str) -> None:
    said = {
        "words": {"choices": [{"message": {"content": "I would rather not."}}]},
        "list": {"choices": [{"message": {"content": '{"message": ["x"], "done": "no"}'}}]},
        "status": 500,
        "slow": None,
        "megabytes": {"choices": [{"message": {"content": "x" * 4_100_000}}]},
    }
    worlds, prompt = world(server.url, timeout=1.0 if fault == "slow" else 60.0)
    worlds.reset({0: (prompt, 0)})
    if fault == "down":
        worlds.close()
        worlds, prompt = world("http://127.0.0.1:9")
        broken: Any = worlds.reset({0: (prompt, 0)})[0]
    else:
        server.says_raw = b"not HTTP\r\n\r\n" if fault == "raw" else b""
        server.say = lambda path, body: said[fault]
        broken = worlds.step({0: "hello"})[0]
    assert isinstance(broken, EpisodeError) and broken.kind == "raised" and "simulated" in broken.reason
    assert worlds.failures == {"raised": 1}
    server.say, server.says_raw = say, b""
    if fault not in ("down", "slow"):
        assert isinstance(worlds.reset({0: (prompt, 0)})[0], Observation)
    worlds.close()


@pytest.mark.parametrize("verdict", ['{"reward": 2}', '{"reward": true}', "good", "{}"])
def test_an_episode_that_the_judge_cannot_judge_has_no_reward(server: Server, verdict: str) -> None:
    worlds, prompt = world(server.url, HARD | {"turns": 1})
    worlds.reset({0: (prompt, 0)})
    server.say = lambda path, body: {"choices": [{"message": {"content": verdict}}]}
    seen: Any = worlds.step({0: "3"})[0]
    assert seen.done and seen.reward is None and seen.success is None and seen.info["unknown"]
    worlds.close()


def test_a_task_that_could_not_be_had_breaks_every_episode_of_its_prompt_and_is_not_asked_for_again(
    server: Server,
) -> None:
    worlds, prompt = world(server.url)
    without = Prompt.make(prompt.text or "", extra={**prompt.extra, TASK: "nobody was there"})
    broken: Any = worlds.reset({0: (without, 0)})[0]
    assert isinstance(broken, EpisodeError) and "nobody was there" in broken.reason and not server.asked
    worlds.close()


def test_levels_rise_with_difficulty_and_half_of_them_are_drawn_below_their_bounds() -> None:
    assert [bound("tools", d) for d in (1, 50, 100)] == [1, 5, 10]
    assert {a: bound(a, 1) for a in ASPECTS} == {a: low for a, (low, _) in ASPECTS.items()}
    assert {a: bound(a, 100) for a in ASPECTS} == HARD == draw_levels(100, 0.0, Random(0).random)
    drawn = [draw_levels(100, 0.5, Random(seed).random) for seed in range(2000)]
    assert all(ASPECTS[a][0] <= level <= ASPECTS[a][1] for levels in drawn for a, level in levels.items())
    # Half are soft, and of those one in ten is at the bound all the same: 0.45 of the draws are below it.
    assert sum(levels["tools"] < 10 for levels in drawn) / len(drawn) == pytest.approx(0.45, abs=0.04)
