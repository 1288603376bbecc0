"""The stages of ORBIT with real processes: a whole run, a run that is killed, and what is refused before it begins."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

from opd.config import parse_settings
from opd.errors import ConfigError, RunFolderError, StageError
from opd.wire.fingerprint import weights_hash
from student.lab.tiny.summary import read_summary
from student.orbit.driver import run_orbit
from student.orbit.recipe import OrbitRecipe, fusion_recipe, rl_recipe
from student.run.local_server import CPU, served

OPD = [sys.executable, "-m", "opd.cli"]
Data = dict[str, Any]


@pytest.fixture
def data(world: Path, tmp_path: Path) -> Data:
    summary = read_summary(world)
    assert summary is not None
    return {
        "run": str(tmp_path / "orbit"),
        "model": {"path": str(summary.models["student"].path)},
        "teachers": {"flags": ["--threads", "1", "--device", "cpu", "--deterministic"]},
        "prompts": {"task": "addition", "options": {"digits": 1}},
        "modes": {"long": {"budget": 8, "prefix": "L"}, "short": {"budget": 4, "prefix": "S"}},
        "rl": {
            "objective": [{"name": "rloo"}],
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2},
            "train": {"steps": 2, "learning_rate": 1e-3, "checkpoint_every": 1},
            "eval": {"prompts": 8},
        },
        "stages": {"short": {"train": {"steps": 3}}},
        "fusion": {
            "objective": [{"name": "opd", "payload": "gather", "k": 8}],
            "rollout": {"prompts_per_step": 8, "max_prompt_tokens": 64},
            "train": {"steps": 2, "learning_rate": 1e-3},
            "eval": {"prompts": 8},
        },
    }


@pytest.fixture
def make(data: Data) -> Callable[..., OrbitRecipe]:
    return lambda **changes: parse_settings(OrbitRecipe, data | changes)


def weights(folder: str) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in load_file(Path(folder) / "model.safetensors").items()}


@pytest.mark.slow
def test_all_stages_run_and_a_killed_run_goes_on_to_the_same_student(
    make: Callable[..., OrbitRecipe], data: Data, tmp_path: Path
) -> None:
    said: list[str] = []
    calm = run_orbit(make(), resume=False, say=said.append)
    assert list(calm.checkpoints) == ["long", "short", "merge", "fusion"] and calm.running == ""
    assert "serving the teachers long, short" in " ".join(said)
    stages = Path(data["run"]) / "stages"
    fused = yaml.safe_load((stages / "fusion" / "recipe.yaml").read_text())
    assert fused["model"]["path"] == calm.checkpoints["merge"] and list(fused["modes"]) == ["long", "short"]
    assert json.loads((stages / "short" / "summary.json").read_text())["steps"] == 3
    lines = (stages / "fusion" / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line)["reverse_kl"] >= 0 for line in lines)

    recipe = tmp_path / "orbit.yaml"
    killed = data | {"run": str(tmp_path / "killed")}
    recipe.write_text(yaml.safe_dump(killed))
    process = subprocess.Popen(
        [*OPD, "orbit", str(recipe)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 250
    while not list((tmp_path / "killed" / "stages" / "short").glob("checkpoints/step-*")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = subprocess.run([*OPD, "orbit", str(recipe), "--resume"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    state = json.loads((tmp_path / "killed" / "state.json").read_text())
    assert weights(state["checkpoints"]["fusion"]) == weights(calm.checkpoints["fusion"])


@pytest.mark.slow
def test_weights_are_pushed_to_servers_that_run_already(
    make: Callable[..., OrbitRecipe], data: Data, tmp_path: Path
) -> None:
    start = data["model"]["path"]
    said: list[str] = []
    token, tokens = tmp_path / "token", tmp_path / "tokens.yaml"
    token.write_text("a-secret-of-the-operator")
    tokens.write_text(yaml.safe_dump([{"name": "me", "token": token.read_text(), "scopes": ["score", "admin"]}]))
    flags = (*CPU, "--tokens", str(tokens))
    with served({"long": start, "short": start}, tmp_path / "server", flags) as address:
        endpoints = {"long": [address], "short": [address]}
        orbit = make(teachers={"endpoints": endpoints, "security": {"token_file": str(token)}})
        state = run_orbit(orbit, resume=False, say=said.append)
    assert state.teachers == {mode: state.checkpoints[mode] for mode in ("long", "short")}
    assert not state.warnings.keys() & {"teacher long", "teacher short"}
    pushed = [text for text in said if text.startswith("pushed")]
    assert len(pushed) == 2 and all("1 replica serves weights" in text for text in pushed)
    provenance = (tmp_path / "orbit" / "stages" / "fusion" / "provenance.json").read_text()
    assert all(weights_hash(Path(state.checkpoints[mode])) in provenance for mode in ("long", "short"))


@pytest.mark.slow
def test_a_stage_that_fails_is_named_and_what_is_done_is_kept(make: Callable[..., OrbitRecipe], tmp_path: Path) -> None:
    broken = make(stages={"short": {"model": {"attention": "flash_attention_2"}}})
    with pytest.raises(StageError, match="stage short ended with exit code"):
        run_orbit(broken, resume=False, say=lambda text: None)
    state = json.loads((tmp_path / "orbit" / "state.json").read_text())
    assert list(state["checkpoints"]) == ["long"] and state["running"] == "short"
    with pytest.raises(RunFolderError, match="follow another recipe"):
        run_orbit(make(), resume=True, say=lambda text: None)
    with pytest.raises(RunFolderError, match="continue with --resume"):
        run_orbit(make(), resume=False, say=lambda text: None)


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
        ({"stages": {"medium": {}}}, "stages names medium, but modes are long, short"),
        ({"teachers": {"endpoints": {"long": ["localhost:1"]}}}, "serves no teacher of mode short"),
        ({"merge": {"weights": {"medium": 1.0}}}, "merge.weights names medium"),
    ],
)
def test_modes_that_cannot_work_are_refused_by_name(
    make: Callable[..., OrbitRecipe], changes: Data, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**changes)


def test_a_dry_run_shows_every_stage_and_refuses_marks_that_look_alike(data: Data, tmp_path: Path) -> None:
    recipe = tmp_path / "orbit.yaml"
    recipe.write_text(yaml.safe_dump(data))
    done = subprocess.run([*OPD, "orbit", str(recipe), "--dry-run"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("# stage")] == [
        "# stage long",
        "# stage short",
        "# stage fusion",
    ]
    assert not Path(data["run"]).exists()
    recipe.write_text(
        yaml.safe_dump(data | {"modes": {n: {"budget": b, "prefix": "L"} for n, b in (("long", 8), ("short", 4))}})
    )
    done = subprocess.run([*OPD, "orbit", str(recipe), "--dry-run"], capture_output=True, text=True, check=False)
    assert done.returncode == ConfigError.exit_code and "cannot tell them apart" in done.stderr
