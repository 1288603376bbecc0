"""ALFWorld's engine: households of our own and games from files, played to their end and learnt from."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import typer
from run_records import metrics_of
from typer.testing import CliRunner

from opd.config import parse_settings
from opd.errors import ConfigError, DataError
from opd.tasks.environments import Observation
from opd.tasks.environments.pool import EnvironmentPool, PoolSettings
from opd.tasks.prompt import Prompt
from opd_zoo.environments.alfworld import ALFWorld, ALFWorldOptions, _rules
from opd_zoo.environments.household_pddl import shown_names
from opd_zoo.environments.household_rooms import APPLIANCES, KINDS, OPENABLE, ROOMS, SENTENCES, TREATED
from student.commands.cli import train as train_command
from student.commands.episodes_cli import gold
from student.settings.recipe import Recipe

for package in ("textworld", "fast_downward"):
    pytest.importorskip(package, reason="ALFWorld is not installed; run by `make envs`")

SMALL = {"receptacles": 4, "objects": 4}
TREAT = ("clean ", "heat ", "cool ", "take ", "move ", "use ")


def opened(**options: Any) -> ALFWorld:
    return ALFWorld(parse_settings(ALFWorldOptions, {**SMALL, **options}))


def of_kind(kind: str, **options: Any) -> Prompt:
    """A household with a task of this kind."""
    return opened(kinds=[kind], **options).draw(Random(5))


def play(world: ALFWorld, prompt: Prompt, path: list[str] | None = None) -> list[Observation]:
    return [world.reset(prompt, 0), *map(world.step, prompt.extra["path"] if path is None else path)]


@pytest.fixture(scope="module")
def listing() -> Any:
    """A world that lists the commands."""
    made = opened(commands=True)
    yield made
    made.close()


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_known_path_wins_with_commands_that_were_offered(listing: ALFWorld, kind: str, search: bool) -> None:
    prompt = of_kind(kind, search=search, receptacles=10, objects=12)
    assert prompt.domain == kind
    first, *seen = play(listing, prompt)
    assert first.text.startswith("You are in the middle of a room.") and "Your task is to: " in first.text
    assert [found.done for found in seen] == [False] * (len(seen) - 1) + [True]
    assert seen[-1].success and [found.reward for found in seen] == [0.0] * (len(seen) - 1) + [1.0]
    for found, action in zip([first, *seen], prompt.extra["path"], strict=False):
        assert action in found.text.rpartition("Commands: ")[2].rstrip(".\n").split(", ")


@pytest.mark.parametrize("kind", KINDS)
def test_goals_are_alfworlds_own_and_no_path_wins_that_leaves_out_what_they_ask_for(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))  # importing the package makes this folder
    from alfworld.gen.goal_library import gdict

    prompt = of_kind(kind)
    assert {key for key in gdict if key in KINDS} == set(KINDS)
    assert list(SENTENCES[kind]) == gdict[kind]["templates"]
    begin, _, goal = prompt.extra["problem"].partition("(:goal")
    types = {letter: goal.partition(f"Type ?{letter} ")[2].partition("Type)")[0] for letter in ("o", "r")}
    # Its templates end the problem too, all but one, and write # for the dash of a type.
    theirs = gdict[kind]["pddl"].replace("#", "-").format(obj=types["o"], recep=types["r"], toggle="DeskLamp")
    theirs = begin + theirs + ")" * (begin.count("(") + theirs.count("(") - begin.count(")") - theirs.count(")"))
    other = Prompt.make(prompt.text or "", extra={**prompt.extra, "problem": theirs})
    path = prompt.extra["path"]
    needed = [n for n, command in enumerate(path) if command.startswith(TREAT)]
    ours, its = opened(), opened()
    for left_out in [None, *needed]:
        tried = [command for n, command in enumerate(path) if n != left_out]
        won = [found.done for found in play(ours, prompt, tried)]
        assert won == [found.done for found in play(its, other, tried)]
        assert won[-1] == (left_out is None) and not any(won[:-1])
    ours.close()
    its.close()


def test_the_tables_are_a_part_of_alfworlds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    from alfworld.agents.utils.misc import Demangler
    from alfworld.gen import constants

    for room in ROOMS.values():
        for thing, places in room.places.items():
            assert set(places) == {p for p in room.receptacles if thing in constants.VAL_RECEPTACLE_OBJECTS.get(p, ())}
        assert {p for p in room.receptacles if p in constants.OPENABLE_CLASS_LIST} == OPENABLE & room.receptacles.keys()
    things = {thing for room in ROOMS.values() for thing in room.places}
    for treatment, able in (("clean", "Cleanable"), ("heat", "Heatable"), ("cool", "Coolable")):
        assert set(TREATED[treatment]) == things & constants.VAL_ACTION_OBJECTS[able] and treatment in APPLIANCES
    ids = [f"{name}_bar__minus_0{n}_dot_5_bar__plus_01" for name in ("apple", "cabinet", "sink") for n in range(12)]
    ids += ["sink_bar_1_bar_sinkbasin", "bathtub_bar_1_bar_bathtubbasin", "agent1", "loc_bar_1", "appletype"]
    infos = {id: type("Info", (), {"id": id}) for id in ids}
    demangler = Demangler(game_infos=infos)
    assert shown_names(ids) == {id: demangler.demangle_alfred_name(id).strip() for id in ids}


def test_equal_seeds_show_the_same_whatever_strings_hash_to() -> None:
    program = (
        "from random import Random\n"
        "from opd.config import parse_settings\n"
        "from opd_zoo.environments.alfworld import ALFWorld, ALFWorldOptions\n"
        "world = ALFWorld(parse_settings(ALFWorldOptions, {'commands': True, 'objects': 12}))\n"
        "for seed in range(2):\n"
        "    prompt = world.draw(Random(seed))\n"
        "    print(prompt, world.reset(prompt, 0), [world.step(a) for a in ('look', *prompt.extra['path'])])\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": number},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for number in ("1", "2")
    ]
    assert said[0] == said[1] and said[0].count("success=True") == 2


@pytest.mark.parametrize(
    "action", ["", "xyzzy", "\x00", "\x1b[A\u2603", "x" * 5000, "go\nnowhere", "\\x", "#look#", "{1/0}"]
)
def test_a_command_without_sense_is_answered_and_changes_nothing(action: str) -> None:
    world = opened()
    prompt = of_kind(KINDS[0])
    arguments = sys.argv
    world.reset(prompt, 0)
    said = world.step(action)
    assert said.text == "Nothing happens.\n" and not said.done and said.reward == 0.0
    assert [world.step(step) for step in prompt.extra["path"]][-1].success
    assert sys.argv is arguments  # the engine's translator puts its own there
    world.close()


@pytest.mark.parametrize("task", ["{__import__('os').abort()}", "#look#", 'put a "mug" in desk', ""])
def test_a_household_from_a_table_cannot_bring_code_with_its_task(listing: ALFWorld, task: str) -> None:
    prompt = of_kind(KINDS[0])
    with pytest.raises(DataError, match="small letters and spaces"):
        listing.reset(Prompt.make("Household 1.", extra={**prompt.extra, "task": task}), 0)


def test_capitals_and_spaces_of_a_command_do_not_matter(listing: ALFWorld) -> None:
    prompt = of_kind(KINDS[0])
    assert play(listing, prompt, [f" {step.title()}\n" for step in prompt.extra["path"]])[-1].success


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Games as ALFWorld lays them out, with a game that cannot be won and another that its engine cannot play."""
    folder = tmp_path_factory.mktemp("games")
    for number, kind in enumerate((*KINDS, f"{KINDS[0]}-Unsolvable", "pick_and_place_with_movable_recep-Mug")):
        prompt = of_kind(kind if kind in KINDS else KINDS[0])
        game = folder / "train" / f"{kind}-Desk-{number}" / "trial_T2019" / "game.tw-pddl"
        game.parent.mkdir(parents=True)
        rules = {**_rules(), "pddl_problem": prompt.extra["problem"], "walkthrough": prompt.extra["path"]}
        game.write_text(json.dumps({**rules, "solvable": "Unsolvable" not in kind}))
    return folder


def test_games_from_files_are_won_by_their_walkthroughs(games: Path) -> None:
    world = opened(games=games)
    found = {prompt.uid: prompt for prompt in (world.draw(Random(seed)) for seed in range(60))}
    assert sorted(str(prompt.domain) for prompt in found.values()) == sorted(KINDS)
    for prompt in found.values():
        assert play(world, prompt)[-1].success and str(prompt.domain) not in str(prompt.text)
    world.close()


def test_games_are_chosen_by_kind_or_one_by_one(games: Path) -> None:
    lit = opened(games=games, kinds=["look_at_obj_in_light"])
    assert {lit.draw(Random(seed)).domain for seed in range(20)} == {"look_at_obj_in_light"}
    only = next(games.rglob("pick_heat*/**/*.tw-pddl"))
    one = opened(games=only)
    assert one.draw(Random(0)).extra["game"] == str(only) and one.draw(Random(1)).domain == only.parts[-3].split("-")[0]
    with pytest.raises(DataError, match=r"no solvable game .*pick_heat_then_place_in_recep.*alfworld-download"):
        opened(games=games / "train" / "look_at_obj_in_light-Desk-1", kinds=["pick_heat_then_place_in_recep"]).draw(
            Random(0)
        )


def test_a_file_that_is_no_game_is_refused_by_name(tmp_path: Path) -> None:
    game = tmp_path / "1.tw-pddl"
    game.write_text("[1")
    with pytest.raises(DataError, match=r"1\.tw-pddl cannot be read"):
        opened(games=game).draw(Random(0))
    game.write_text('{"grammar": ""}')
    with pytest.raises(DataError, match=r"1\.tw-pddl .*lacks"):
        opened(games=game).draw(Random(0))


def test_games_from_files_need_no_rules_of_the_package_and_households_do(
    games: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "alfworld", None)
    with pytest.raises(ConfigError, match="No module named 'alfworld'"):
        opened()
    world = opened(games=games)
    assert play(world, world.draw(Random(0)))[-1].success
    world.close()


def test_households_at_once_are_each_won() -> None:
    many = [of_kind(kind) for kind in KINDS] * 2
    patience = PoolSettings(reset_seconds=3000, step_seconds=3000)
    with EnvironmentPool({"name": "alfworld", "options": SMALL}, patience) as pool:
        pool.reset({number: (prompt, 0) for number, prompt in enumerate(many)})
        ended: dict[int, Any] = {}
        for turn in range(max(len(prompt.extra["path"]) for prompt in many)):
            ended |= pool.step({n: p.extra["path"][turn] for n, p in enumerate(many) if turn < len(p.extra["path"])})
    assert not pool.failures and len(ended) == len(many)
    assert all(isinstance(seen, Observation) and seen.success for seen in ended.values())


def test_seconds_of_a_reset_and_a_step() -> None:
    """Prints them; nothing is asserted of a clock."""
    for receptacles, objects in ((4, 4), (8, 10), (20, 40)):
        world = opened(receptacles=receptacles, objects=objects)
        prompt = world.draw(Random(0))
        play(world, prompt)
        began = time.process_time()
        for _ in range(2):
            world.reset(prompt, 0)
        reset = (time.process_time() - began) / 2
        began = time.process_time()
        seen = [world.step("look") for _ in range(20)]
        step = (time.process_time() - began) / 20
        print(f"{receptacles} receptacles, {objects} objects: reset {reset:.3f} CPU s, step {step:.3f} CPU s")
        assert len({found.text for found in seen}) == 1
        world.close()


def test_known_paths_are_recorded_as_they_were_played() -> None:
    lines = list(gold("alfworld", ["receptacles=4", "objects=4", "search=true"], 4, 0))
    assert len(lines) == 4 and {line["domain"] for line in lines} <= set(KINDS)


def test_its_recipe_passes_a_dry_run_as_it_is(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(train_command)
    recipe = Path(__file__).parents[2] / "examples" / "recipes" / "qwen2.5-3b-tcod-alfworld.yaml"
    result = CliRunner().invoke(app, [str(recipe), f"run={tmp_path / 'run'}", "--dry-run", "--offline"])
    assert result.exit_code == 0, result.output


def test_households_are_played_scored_and_learnt_from_and_a_killed_run_resumes_to_the_same_weights(
    game_training: Callable[..., dict[str, Any]],
    killed_and_resumed: Callable[..., Recipe],
) -> None:
    changes = game_training(prompts=4, steps=3, tokens=1500, turns=4, isolation="none")
    changes["methods"] = [{"name": "tcod", "order": "b2f", "every": 1, "turns": 3}]
    calm = killed_and_resumed("DeadlyHousehold", SMALL, **changes)
    lines = metrics_of(calm.run)
    assert [line["turn_depth"] for line in lines] == [1, 2, 3]
    assert all(line["episodes_broken"] == 0 and line["reverse_kl"] > 0 and line["grad_norm"] > 0 for line in lines)
    # The path is replayed but for its end: what is scored lies where only a played path leads.
    scored = [[int(key.removeprefix("kl_by_turn/")) for key in line if key.startswith("kl_by_turn/")] for line in lines]
    assert [min(turns) >= 4 - depth for depth, turns in enumerate(scored)] == [True] * 3
