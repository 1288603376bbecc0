"""Runs against a real server: learning, resuming bit for bit, stopping, saving."""

import json
import os
import signal
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
import yaml
from ports import held_port
from run_records import metrics_of
from slow_cases import slow
from transformers import AutoModelForCausalLM, AutoTokenizer
from waiting import wait_until

from opd.errors import CancelledError, CheckpointError, RunFolderError
from student.job.loop import Loop
from student.job.session import train
from student.report.telemetry import Telemetry
from student.run.checkpoint import latest_checkpoint
from student.run.reading import read_steps
from student.settings.recipe import Recipe

OPD = [sys.executable, "-m", "opd.cli"]


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    make_recipe: Callable[..., Recipe], tmp_path: Path, hashes: Callable[[Path], dict[str, str]]
) -> None:
    evaluated = {"eval": {"prompts": 8}}
    calm = train(make_recipe(run=str(tmp_path / "calm"), **evaluated))
    train(make_recipe(run=str(tmp_path / "cut"), train={"steps": 2}, **evaluated))
    resumed = train(make_recipe(run=str(tmp_path / "cut"), **evaluated), resume=True)
    one, two = hashes(Path(calm["checkpoint"])), hashes(Path(resumed["checkpoint"]))
    assert one == two and len(one) == 4
    lines = read_steps(tmp_path / "cut", [])
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert lines[0]["eval/accuracy"] == resumed["before"]["accuracy"], "the evaluation before the first step"


def test_a_run_stopped_before_its_first_step_evaluates_once_and_keeps_no_folder_if_that_fails(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, step = make_recipe(train={"steps": 1}, eval={"prompts": 2}), Loop.step

    def begin(error: BaseException) -> None:
        def fail(*_: Any) -> None:
            raise error

        monkeypatch.setattr(Loop, "step", fail)
        with pytest.raises(type(error)):
            train(recipe)

    begin(RuntimeError("not this one"))
    assert not recipe.run.exists(), "an evaluation alone is not worth a folder"
    begin(CancelledError("stopped by a signal"))
    assert [line["step"] for line in read_steps(recipe.run, [])] == [0]
    monkeypatch.setattr(Loop, "step", step)
    train(recipe, resume=True)
    assert [line["step"] for line in read_steps(recipe.run, [])] == [0, 1]


def test_a_killed_run_resumes_to_the_same_weights(
    make_recipe: Callable[..., Recipe], tmp_path: Path, hashes: Callable[[Path], dict[str, str]]
) -> None:
    common: dict[str, Any] = {"checkpoint_every": 3, "keep_checkpoints": 2}
    recipe = make_recipe(run=str(tmp_path / "killed"), train={**common, "steps": 100_000})
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    process = forked.Program([*OPD, "train", str(path)])
    wait_until(lambda: list(recipe.run.glob("checkpoints/step-*")) or process.poll() is not None, 600)
    assert process.poll() is None
    process.kill()
    process.wait()
    assert not (tmp_path / "killed" / "summary.json").exists()
    checkpoint = latest_checkpoint(recipe.run / "checkpoints")
    assert checkpoint is not None
    steps = {**common, "steps": int(checkpoint.name[5:]) + 2}  # the learning rate does not look at them
    calm = train(make_recipe(run=str(tmp_path / "calm"), train=steps))
    resumed = train(make_recipe(run=str(tmp_path / "killed"), train=steps), resume=True)
    assert hashes(Path(resumed["checkpoint"])) == hashes(Path(calm["checkpoint"]))


def test_a_run_on_prompts_without_answers_resumes_and_writes_no_nan(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i + 10}+{i}="}) + "\n" for i in range(60)))
    changes = {"prompts": {"file": str(file), "heldout": 0.2}, "eval": {"prompts": 8, "every": 1}}
    train(make_recipe(**changes, train={"steps": 2}))
    summary = train(make_recipe(**changes), resume=True)
    assert summary["before"]["accuracy"] is None and summary["before"]["reverse_kl"] > 0
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "eval/reverse_kl" in text and "NaN" not in text and "eval/accuracy" not in text


def test_ctrl_c_saves_and_stops_with_130(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = make_recipe(train={"steps": 100_000, "checkpoint_every": 0})
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    process = forked.Program([*OPD, "train", str(path)])
    written = recipe.run / "metrics.jsonl"
    wait_until(lambda: (written.exists() and metrics_of(recipe.run)) or process.poll() is not None, 600)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "--resume" in err and "Traceback" not in err and "error:" not in err
    assert len(list((recipe.run / "checkpoints").glob("step-*"))) == 1


@pytest.mark.slow  # every run has test_reproduce.py
def test_two_runs_of_one_recipe_give_the_same_weights(
    make_recipe: Callable[..., Recipe], tmp_path: Path, hashes: Callable[[Path], dict[str, str]]
) -> None:
    runs = [train(make_recipe(run=str(tmp_path / name), train={"steps": 2})) for name in "ab"]
    assert hashes(Path(runs[0]["checkpoint"])) == hashes(Path(runs[1]["checkpoint"]))
    other = train(make_recipe(run=str(tmp_path / "c"), seed=1, train={"steps": 2}))
    assert hashes(Path(other["checkpoint"])) != hashes(Path(runs[0]["checkpoint"]))


@pytest.mark.parametrize("payload", ["hidden", *slow("topk", "sampled")])
def test_every_payload_trains(make_recipe: Callable[..., Recipe], payload: str) -> None:
    term = {"name": "opd", "payload": payload} | ({"k": 8} if payload == "topk" else {})
    summary = train(make_recipe(objective=[term], train={"steps": 2}, eval={"prompts": 2}))
    assert summary["steps"] == 2 and summary["after"]["reverse_kl"] > 0


@pytest.mark.parametrize(
    "changes", [{"train": {"steps": 2, "mixed_precision": "bf16"}}, *slow({"model": {"dtype": "bfloat16"}})]
)
def test_training_in_bf16_gives_a_finite_student(make_recipe: Callable[..., Recipe], changes: dict[str, Any]) -> None:
    summary = train(make_recipe(**{"train": {"steps": 2}, "eval": {"prompts": 2}, **changes}))
    assert np.isfinite(summary["after"]["reverse_kl"]) and summary["steps"] == 2


def test_the_saved_student_loads_with_plain_transformers(make_recipe: Callable[..., Recipe]) -> None:
    summary = train(make_recipe(train={"steps": 1}))
    folder = Path(summary["checkpoint"]) / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert all(type(one).__module__.startswith("transformers.") for one in (model, tokenizer))
    assert model.generate(**tokenizer("1+1=", return_tensors="pt"), max_new_tokens=3).shape[1] > 4


def test_the_run_folder_says_what_was_run_and_against_which_teacher(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe(train={"steps": 1})
    train(recipe)
    saved = yaml.safe_load((recipe.run / "recipe.yaml").read_text())
    assert Recipe.model_validate(saved) == recipe
    provenance = json.loads((recipe.run / "provenance.json").read_text())
    assert len(provenance["fleet"]["teacher"]["weights_hash"]) == 64
    assert provenance["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    line = metrics_of(recipe.run)[0]
    for name in ("reverse_kl", "student_entropy", "response_length", "truncation_rate", "payload_bytes_per_token"):
        assert np.isfinite(line[name]), name
    assert {"rollout", "wait_teacher", "learn"} <= set(line["seconds"])


def test_the_run_folder_says_which_recipe_was_followed_until_when(make_recipe: Callable[..., Recipe]) -> None:
    first = make_recipe(train={"steps": 2}, eval={"prompts": 0})
    second = make_recipe(train={"steps": 3, "learning_rate": 1e-4}, eval={"prompts": 0})
    train(first)
    for _ in range(2):
        train(second, resume=True)
    folder = first.run
    assert sorted(path.name for path in folder.glob("recipe*")) == ["recipe-until-000002.yaml", "recipe.yaml"]
    assert Recipe.model_validate(yaml.safe_load((folder / "recipe.yaml").read_text())) == second
    assert Recipe.model_validate(yaml.safe_load((folder / "recipe-until-000002.yaml").read_text())) == first


def test_metrics_are_served_to_prometheus_while_the_run_lasts(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, pages, step = held_port(), [], Telemetry.step

    def scraped(telemetry: Telemetry, *arguments: Any, **options: Any) -> None:
        step(telemetry, *arguments, **options)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as page:
            pages.append(page.read().decode())

    monkeypatch.setattr(Telemetry, "step", scraped)
    train(make_recipe(metrics_port=port, train={"steps": 2}))
    for done, page in enumerate(pages, 1):
        assert f"opd_student_steps_total {done}.0" in page and "opd_student_reverse_kl_nats " in page
    assert len(pages) == 2
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120)


def test_an_existing_run_folder_is_refused_and_left_alone(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe()
    recipe.run.mkdir()
    (recipe.run / "precious").write_text("x")
    with pytest.raises(RunFolderError, match="--resume"):
        train(recipe)
    assert os.listdir(recipe.run) == ["precious"]


def test_a_damaged_checkpoint_falls_back_and_a_missing_run_is_named(
    make_recipe: Callable[..., Recipe], tmp_path: Path, hashes: Callable[[Path], dict[str, str]]
) -> None:
    with pytest.raises(CheckpointError, match="no run"):
        train(make_recipe(run=str(tmp_path / "never")), resume=True)
    recipe = make_recipe()
    first = train(recipe)
    want = hashes(Path(first["checkpoint"]))
    weights = Path(first["checkpoint"]) / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    again = train(recipe, resume=True)
    assert hashes(Path(again["checkpoint"])) == want


def test_resuming_with_other_plugins_gives_none_what_another_remembers(
    make_recipe: Callable[..., Recipe], caplog: pytest.LogCaptureFixture
) -> None:
    rewards = [{"name": "overlong", "buffer": 4}, {"name": "hapo"}]
    rl = {"objective": [{"name": "grpo"}], "rollout": {"samples_per_prompt": 2}}
    train(make_recipe(**rl, train={"steps": 2}, rewards=rewards))
    state = {step: make_recipe(**rl).run / f"checkpoints/step-{step:06d}/trainer/loop.json" for step in (2, 3, 4)}
    remembered = json.loads(state[2].read_text())["rewards"]["hapo"]
    assert remembered
    train(make_recipe(**rl, train={"steps": 3}, rewards=rewards[::-1]), resume=True)
    assert json.loads(state[3].read_text())["rewards"]["hapo"].items() >= remembered.items()
    assert not caplog.records
    # A method that is new begins as in a new run; what is left out is named.
    added = [{"name": "mopps"}]
    train(make_recipe(**rl, train={"steps": 4}, rewards=rewards[:1], methods=added), resume=True)
    assert "the recipe no longer lists rewards.hapo; its state in the checkpoint is discarded" in caplog.text
    assert "the checkpoint has no state of methods.mopps, which starts afresh" in caplog.text
    saved = json.loads(state[4].read_text())
    assert list(saved["rewards"]) == ["overlong"] and list(saved["methods"]) == ["mopps"]
