"""Games of TextWorld, made here: played to their end, many at once, and learnt from under a served teacher."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from run_records import metrics_of

from opd.config import parse_settings
from opd.errors import DataError
from opd.tasks.environments import Observation
from opd.tasks.environments.pool import EnvironmentPool, PoolSettings
from opd.tasks.prompt import Prompt
from opd_zoo.environments.textworld import TextWorld, TextWorldOptions
from student.commands.episodes_cli import gold
from student.settings.recipe import Recipe

pytest.importorskip("textworld", reason="TextWorld is not installed; run by `make envs`")

NAMES = ("1", "2", "3", "8")
"""Of the games; what a prompt says of the last one puts it among the held-out problems."""


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small games, each from a seed of its own."""
    folder = tmp_path_factory.mktemp("games")
    make = [str(Path(sys.executable).with_name("tw-make")), "custom", "--world-size", "2", "--nb-objects", "3"]
    for name in NAMES:
        output = ["--seed", name, "--output", str(folder / f"{name}.z8")]
        subprocess.run([*make, "--quest-length", "3", *output], check=True, capture_output=True)
    return folder


def opened(games: Path, **options: Any) -> TextWorld:
    return TextWorld(parse_settings(TextWorldOptions, {"games": games, **options}))


def prompts_of(world: TextWorld) -> list[Prompt]:
    """One prompt of each game."""
    found = {prompt.uid: prompt for prompt in (world.draw(Random(seed)) for seed in range(100))}
    assert len(found) == len(NAMES)
    return list(found.values())


def play(world: TextWorld, prompt: Prompt) -> list[Observation]:
    return [world.reset(prompt, 0), *map(world.step, prompt.extra["path"])]


def test_the_known_path_wins_every_game_and_shows_the_same_twice(games: Path) -> None:
    world = opened(games)
    for prompt in prompts_of(world):
        first, *seen = play(world, prompt)
        assert first.text.count("-= ") == 1 and first.reward == 0.0
        assert [found.done for found in seen] == [False] * (len(seen) - 1) + [True]
        assert seen[-1].success and sum(found.reward or 0.0 for found in seen) == 1.0
        assert not any(">" in found.text or "  " in found.text for found in seen[:-1])  # no status line
        assert play(world, prompt) == [first, *seen]
    world.close()


def test_commands_can_be_listed(games: Path) -> None:
    world = opened(games, commands=True)
    for prompt in prompts_of(world):
        seen = play(world, prompt)
        for found, action in zip(seen, prompt.extra["path"], strict=False):
            assert action in found.text.rpartition("Commands: ")[2].rstrip(".\n").split(", ")
    world.close()


@pytest.mark.parametrize("action", ["", "xyzzy", "\x00", "\x1b[A\u2603", "x" * 5000, "go\nnowhere", "\\x", "\\\\quit?"])
def test_a_command_without_sense_is_answered_and_changes_nothing(games: Path, action: str) -> None:
    world = opened(games)
    prompt = prompts_of(world)[0]
    world.reset(prompt, 0)
    said = world.step(action)
    assert said.text.strip() and not said.done and said.reward == 0.0
    assert [world.step(step) for step in prompt.extra["path"]][-1].success
    world.close()


@pytest.mark.parametrize("action", ["save", "Script", "quit", "restart", "look. transcript", "restore"])
def test_the_interpreter_is_not_spoken_to_and_writes_no_file(
    games: Path, action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    world = opened(games)
    prompt = prompts_of(world)[0]
    world.reset(prompt, 0)
    said = world.step(action)
    assert said.text == "That is not a part of the game.\n" and not said.done
    assert [world.step(step) for step in prompt.extra["path"]][-1].success
    world.close()
    assert not list(tmp_path.iterdir())


def test_a_folder_without_games_is_refused_with_what_makes_them(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no TextWorld game .* tw-make"):
        opened(tmp_path).draw(Random(0))


def test_a_hundred_games_at_once_are_each_won(games: Path) -> None:
    prompts = prompts_of(opened(games))
    many = [prompts[number % len(prompts)] for number in range(100)]
    patience = PoolSettings(reset_seconds=3000, step_seconds=3000)
    with EnvironmentPool({"name": "textworld", "options": {"games": str(games)}}, patience) as pool:
        began = time.monotonic()
        pool.reset({number: (prompt, 0) for number, prompt in enumerate(many)})
        reset = time.monotonic() - began
        children = psutil.Process(pool._host._process.pid).children()
        private = sum(child.memory_full_info().uss for child in children) / len(children) / 2**20
        ended: dict[int, Any] = {}
        steps, began = 0, time.monotonic()
        for turn in range(max(len(prompt.extra["path"]) for prompt in many)):
            due = {n: p.extra["path"][turn] for n, p in enumerate(many) if turn < len(p.extra["path"])}
            steps += len(due)
            ended |= pool.step(due)
        spent = time.monotonic() - began
    assert len(children) == 100 and not pool.failures
    assert all(isinstance(seen, Observation) and seen.success for seen in ended.values())
    print(f"100 games at once: reset {reset / 100:.4f} s, step {spent / steps:.4f} s, {private:.0f} MiB each")


def test_seconds_of_a_reset_and_a_step(games: Path) -> None:
    """Prints them; nothing is asserted of a clock."""
    world = opened(games)
    prompt = prompts_of(world)[0]
    play(world, prompt)
    began = time.process_time()
    for _ in range(20):
        world.reset(prompt, 0)
    reset = (time.process_time() - began) / 20
    began = time.process_time()
    seen = [world.step("look") for _ in range(100)]
    print(f"one game: reset {reset:.4f} CPU s, step {(time.process_time() - began) / 100:.4f} CPU s")
    assert len({found.text for found in seen}) == 1
    world.close()


def test_known_paths_are_recorded_as_they_were_played(games: Path) -> None:
    lines = list(gold("textworld", [f"games={games}"], 6, 0))
    assert len(lines) == 6 and {line["prompt"] for line in lines} <= {
        f"Game {name}. Reply with one command.\n" for name in NAMES[:-1]
    }


def test_games_are_played_scored_and_learnt_from_and_a_killed_run_resumes_to_the_same_weights(
    games: Path,
    game_training: Callable[..., dict[str, Any]],
    killed_and_resumed: Callable[..., Recipe],
) -> None:
    changes = game_training(prompts=4, steps=3, tokens=1500, turns=3, isolation="none")
    changes["methods"] = [{"name": "tcod", "order": "b2f", "every": 1, "turns": 3}]
    calm = killed_and_resumed("DeadlyGame", {"games": str(games)}, **changes)
    lines = metrics_of(calm.run)
    assert [line["turn_depth"] for line in lines] == [1, 2, 3]
    assert all(line["episodes_broken"] == 0 and line["reverse_kl"] > 0 and line["grad_norm"] > 0 for line in lines)
    # The path is replayed but for its end: what is scored lies where only a played game leads.
    assert "kl_by_turn/3" in lines[0] and "kl_by_turn/1" not in lines[0]
