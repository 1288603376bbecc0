"""The stages of ORBIT with real processes: a whole run, a run that is stopped, and what is refused before it begins."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_records import metrics_of
from waiting import wait_until

import opd.cli
from opd.config import load_settings, parse_settings
from opd.errors import ConfigError, RunFolderError, StageError
from opd.wire.fingerprint import weights_hash
from opd_lab.tiny.summary import read_summary
from student.job.session import train
from student.orbit.driver import run_orbit
from student.orbit.process import StageProcesses
from student.orbit.recipe import OrbitRecipe, fusion_recipe, rl_recipe, stage_hashes
from student.orbit.state import State
from student.run.local_server import CPU, served
from student.settings.recipe import Recipe

OPD = [sys.executable, "-m", "opd.cli"]
Data = dict[str, Any]


@pytest.fixture
def data(world: Path, tmp_path: Path) -> Data:
    return recipe_data(world, tmp_path / "orbit")


def recipe_data(world: Path, run: Path) -> Data:
    summary = read_summary(world)
    assert summary is not None
    return {
        "run": str(run),
        "model": {"path": str(summary.models["student"].path)},
        "teachers": {"flags": ["--threads", "1", "--device", "cpu", "--deterministic"]},
        "prompts": {"task": "addition", "options": {"digits": 1}},
        "modes": {
            "long": {"budget": 8, "prefix": "L"},
            "between": {"budget": 6, "prefix": "M", "weight": 0, "teacher": "short"},
            "short": {"budget": 4, "prefix": "S"},
        },
        "rl": {
            "objective": [{"name": "rloo"}],
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2},
            "train": {"steps": 2, "learning_rate": 1e-3, "checkpoint_every": 1},
            "eval": {"prompts": 8},
        },
        "stages": {"short": {"train": {"steps": 3}}},
        "fusion": {
            "objective": [{"name": "opd", "payload": "gather", "k": 8}],
            "methods": [{"name": "modes"}],
            "rollout": {"prompts_per_step": 8, "max_prompt_tokens": 64},
            "train": {"steps": 4, "learning_rate": 1e-3, "checkpoint_every": 1},
            "eval": {"prompts": 9, "every": 2, "mode_slack": 1.5},
        },
    }


@pytest.fixture
def make(data: Data) -> Callable[..., OrbitRecipe]:
    return lambda **changes: parse_settings(OrbitRecipe, data | changes)


def summary_of(stage: Path) -> Data:
    found: Data = json.loads((stage / "summary.json").read_text())
    return found


def begun(orbit: OrbitRecipe, checkpoints: dict[str, str]) -> State:
    """A run whose first stages are done, with the given models."""
    state = State(orbit.run / "state.json", stage_hashes(orbit), checkpoints)
    state.save()
    return state


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """StageProcesses run in this process: what they do is the same, and torch is not imported three times more."""

    def run(_: StageProcesses, command: Sequence[str]) -> int:
        assert list(command[:4]) == [*OPD, "train"]
        train(load_settings(Recipe, Path(command[4])), resume="--resume" in command)
        return 0

    monkeypatch.setattr(StageProcesses, "run", run)


@pytest.mark.slow
@pytest.mark.usefixtures("here", "forked_servers")
def test_all_stages_run_one_after_the_other_from_the_step_where_the_first_was_stopped(
    data: Data, tmp_path: Path
) -> None:
    """The fusion's teachers are on a server that runs already, to which the stages' weights are pushed."""
    token, tokens = tmp_path / "token", tmp_path / "tokens.yaml"
    token.write_text("a-secret-of-the-operator")
    tokens.write_text(yaml.safe_dump([{"name": "me", "token": token.read_text(), "scopes": ["score", "admin"]}]))
    start = data["model"]["path"]
    said: list[str] = []
    with served({"long": start, "short": start}, tmp_path / "server", (*CPU, "--tokens", str(tokens))) as address:
        endpoints = {"long": [address], "short": [address]}
        security = {"token_file": str(token)}
        orbit = parse_settings(OrbitRecipe, data | {"teachers": {"endpoints": endpoints, "security": security}})
        begun(orbit, {})
        recipe = rl_recipe(orbit, "long", orbit.model.path)
        train(recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": 1})}))
        (recipe.run / "summary.json").unlink()
        calm = run_orbit(orbit, resume=True, log=said.append)
    begins = [text.split(" /")[0] for text in said if text.startswith("stage")]
    assert begins == ["stage long: continuing", "stage short: starting", "stage fusion: starting"]
    assert summary_of(recipe.run)["steps"] == 2
    assert list(calm.checkpoints) == ["long", "short", "merge", "fusion"] and calm.running == ""
    pushed = [text for text in said if text.startswith("pushed")]
    for mode, text in zip(("long", "short"), pushed, strict=True):
        assert calm.teachers[mode] == calm.checkpoints[mode]
        assert f"1 replica serves weights {weights_hash(Path(calm.checkpoints[mode]))[:12]}" in text
    stages = Path(data["run"]) / "stages"
    fused = yaml.safe_load((stages / "fusion" / "recipe.yaml").read_text())
    assert fused["model"]["path"] == calm.checkpoints["merge"] and list(fused["modes"]) == ["long", "between", "short"]
    assert fused["modes"]["short"]["teacher_accuracy"] == summary_of(stages / "short")["after"]["accuracy"]
    assert summary_of(stages / "short")["steps"] == 3
    steps = metrics_of(stages / "fusion")
    assert steps and all({"reverse_kl", "mode/share/long"} <= step.keys() for step in steps)
    figures = summary_of(stages / "fusion")["after"]["modes"]
    across = {name for name in figures if name.startswith("leakage/")}
    assert across == {f"leakage/{mode}/{teacher}" for mode in ("long", "short") for teacher in ("long", "short")}
    assert {"tokens/between", "accuracy/between"} <= figures.keys()  # a budget that no stage has trained
    assert (Path(data["run"]) / "modes.svg").stat().st_size > 0


WAITS = """
import os, signal, sys
def save(*_):
    os.write(1, b"saved\\n")  # print may be at work itself when the signal comes
    sys.exit(130)
signal.signal(signal.SIGTERM, save)
print("begun", flush=True)
signal.pause()
"""
"""A stage that waits to be told to end, so that nothing depends on how fast a real one is."""
COMMAND = """
import sys
from pathlib import Path
from opd.config import load_settings
from opd.errors import CancelledError
from student.orbit.driver import run_orbit
from student.orbit.recipe import OrbitRecipe
try:
    run_orbit(load_settings(OrbitRecipe, Path(sys.argv[1])), resume=sys.argv[2] == "resume", log=print)
except CancelledError as error:
    print(error, flush=True)
"""


@contextmanager
def command(data: Data, folder: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    """The run of a recipe in a process of its own, whose first stage has begun; it never outlives the block."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(data | {"launch": [sys.executable, "-c", WAITS]}, sort_keys=False))
    arguments = [sys.executable, "-u", "-c", COMMAND, str(recipe), how]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            while (line := process.stdout.readline()) != "begun\n":
                assert line, "the command has ended before its stage began"
            yield process
        finally:
            process.kill()


def test_a_command_that_is_stopped_names_its_stage_and_how_to_go_on(data: Data, tmp_path: Path) -> None:
    with command(data, tmp_path, "start") as process:
        process.terminate()  # this process alone, as schedulers do
        said = process.communicate()[0].splitlines()
    assert said == ["saved", "stopped in stage long; continue with --resume."]
    assert json.loads((Path(data["run"]) / "state.json").read_text())["running"] == "long"


@pytest.mark.slow
def test_a_command_that_is_killed_takes_its_stage_and_its_server_with_it(data: Data, tmp_path: Path) -> None:
    orbit = parse_settings(OrbitRecipe, data)
    begun(orbit, dict.fromkeys(("long", "short", "merge"), data["model"]["path"]))
    with command(data, tmp_path, "resume") as process:
        (address,) = json.loads((orbit.run / "state.json").read_text())["servers"]["short"]
        process.kill()
        assert process.stdout is not None and "saved" in process.stdout.read()
    with StageProcesses(orbit.run):  # the folder is no longer held
        assert json.loads((orbit.run / "state.json").read_text())["running"] == "fusion"

    def gone() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))) != 0

    wait_until(gone)


def test_a_stage_that_fails_is_named_and_what_is_done_is_kept(make: Callable[..., OrbitRecipe], data: Data) -> None:
    broken = make(launch=[sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(RunFolderError, match="a run to resume"):
        run_orbit(broken, resume=True, log=lambda text: None)
    begun(broken, {"long": data["model"]["path"]})
    with pytest.raises(StageError, match=r"stage short .*exit code 3"):
        run_orbit(broken, resume=True, log=lambda text: None)
    state = json.loads((broken.run / "state.json").read_text())
    assert list(state["checkpoints"]) == ["long"] and state["running"] == "short"
    with pytest.raises(RunFolderError, match="continue it with --resume"):
        run_orbit(broken, resume=False, log=lambda text: None)


def reordered(node: Any) -> Any:
    """The same mapping with its keys in the opposite order, at every depth."""
    if isinstance(node, dict):
        return {key: reordered(value) for key, value in reversed(node.items())}
    return node


def test_a_run_goes_on_with_what_is_left_changed_and_its_keys_in_another_order(
    make: Callable[..., OrbitRecipe], data: Data
) -> None:
    orbit = make()
    begun(orbit, {"long": "model"})
    modes = data["modes"]
    same = parse_settings(
        OrbitRecipe, reordered(data | {"modes": {}}) | {"modes": {k: reordered(modes[k]) for k in modes}}
    )
    smaller = make(fusion=data["fusion"] | {"train": {"steps": 1}}, stages={}, launch=["torchrun"])
    for recipe in (same, smaller):
        assert list(State.open(orbit.run, stage_hashes(recipe), resume=True).checkpoints) == ["long"]
    other = make(stages={"long": {"train": {"steps": 9}}})
    with pytest.raises(RunFolderError, match=r"stage long .*other settings"):
        State.open(orbit.run, stage_hashes(other), resume=True)
    (orbit.run / "state.json").write_text('{"recipe": "0123"}')
    with pytest.raises(RunFolderError, match="another version"):
        State.open(orbit.run, stage_hashes(orbit), resume=True)


def test_each_stage_has_its_own_budget_mark_and_keys(make: Callable[..., OrbitRecipe]) -> None:
    orbit = make()
    short = rl_recipe(orbit, "short", "models/long")
    assert (short.rollout.max_new_tokens, list(short.modes), short.train.steps) == (4, ["short"], 3)
    assert short.train.learning_rate == 1e-3 and short.model.path == "models/long"
    fusion = fusion_recipe(orbit, "models/merged", ["localhost:1"])
    assert fusion.rollout.max_new_tokens == 8 and fusion.teachers is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modes": {"a": {"budget": 4, "prefix": "A"}, "b": {"budget": 4, "prefix": "B"}}}, "budgets must fall"),
        ({"modes": {"a": {"budget": 4, "prefix": "A"}}}, "modes"),
        (
            {"modes": {"a": {"budget": 4, "prefix": "A"}, "b": {"budget": 3, "prefix": "B", "weight": 0}}},
            "fewer than two modes have a weight",
        ),
        (
            {
                "modes": {
                    "a": {"budget": 4, "prefix": "A"},
                    "b": {"budget": 3, "prefix": "B", "weight": 0},
                    "c": {"budget": 2, "prefix": "C"},
                }
            },
            "mode b has weight 0, so no stage trains its teacher b",
        ),
        ({"stages": {"medium": {}}}, "stages names medium, but the trained modes are long, short"),
        ({"teachers": {"endpoints": {"long": ["localhost:1"]}}}, "endpoints lacks mode short"),
        ({"merge": {"weights": {"medium": 1.0}}}, "merge.weights names medium"),
    ],
)
def test_modes_that_cannot_work_are_refused_by_name(
    make: Callable[..., OrbitRecipe], changes: Data, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**changes)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["opd", "orbit", *arguments])
    with pytest.raises(SystemExit) as caught:
        opd.cli.main()
    return int(caught.value.code or 0)


def test_a_dry_run_shows_every_stage_and_refuses_marks_that_look_alike(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "orbit.yaml"
    recipe.write_text(yaml.safe_dump(data, sort_keys=False))
    assert call(monkeypatch, str(recipe), "--dry-run") == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("# ")]
    assert shown == ["# stage long", "# stage short", "# merge", "# stage fusion"]
    assert not Path(data["run"]).exists()
    alike = {name: {"budget": budget, "prefix": "L"} for name, budget in (("long", 8), ("short", 4))}
    recipe.write_text(yaml.safe_dump(data | {"modes": alike}, sort_keys=False))
    assert call(monkeypatch, str(recipe), "--dry-run") == ConfigError.exit_code
    assert "cannot tell them apart" in capsys.readouterr().err


def test_rollouts_longer_than_the_teachers_take_are_refused_before_the_first_stage(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "orbit.yaml"
    data["fusion"]["rollout"]["max_prompt_tokens"] = 505  # and 8 of the largest budget
    recipe.write_text(yaml.safe_dump(data, sort_keys=False))
    assert call(monkeypatch, str(recipe)) == ConfigError.exit_code
    assert "may have 513 tokens" in (error := capsys.readouterr().err) and "512 positions" in error
    assert not Path(data["run"]).exists()
    assert call(monkeypatch, str(recipe), "--dry-run", "fusion.rollout.max_prompt_tokens=504") == 0


def test_a_folder_of_something_else_is_neither_begun_in_nor_resumed(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").touch()
    with pytest.raises(RunFolderError, match=r"not empty .*no ORBIT run"):
        State.open(tmp_path, {}, resume=False)
    with pytest.raises(RunFolderError, match="a run to resume"):
        State.open(tmp_path, {}, resume=True)
    State(tmp_path / "state.json").save()
    with pytest.raises(RunFolderError, match=r"holds a run already.* --resume"):
        State.open(tmp_path, {}, resume=False)


def test_the_recipe_that_ships_passes_a_dry_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = Path(__file__).parents[3] / "examples" / "recipes" / "orbit.yaml"
    assert call(monkeypatch, str(shipped), "--dry-run", "--offline") == 0
    stages = [text for text in capsys.readouterr().out.split("# stage ") if text]
    assert [text.split()[0] for text in stages] == ["extreme", "high", "medium", "low", "fusion"]
    budgets = [yaml.safe_load(text.partition("\n")[2])["rollout"]["max_new_tokens"] for text in stages]
    assert budgets == [16384, 8192, 4096, 2048, 16384]
