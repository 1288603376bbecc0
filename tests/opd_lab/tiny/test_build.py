import json
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, make_dataclass, replace
from pathlib import Path

import forked
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from opd.errors import ConfigError, DataError, OutputError
from opd.tasks import TaskSettings, build_prompts
from opd_lab.tiny import build_world
from opd_lab.tiny.plans import Shape
from opd_lab.tiny.presets import world_key, world_plan
from opd_lab.tiny.summary import read_summary

SMALL = """
max_new_tokens: 6
measured: 4
tasks: {sums: {task: addition, options: {digits: 1}}}
models:
  student: {shape: {hidden: 32, layers: 1, heads: 2}, stages: [{tasks: [sums], sft: {steps: 2, batch: 4}}]}
  teacher: {shape: {hidden: 32, layers: 1, heads: 2}, stages: [{tasks: [sums], sft: {steps: 5, batch: 4}}]}
"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """A world whose models take a moment; `world` is that of the preset test, which all tests read."""
    file = tmp_path_factory.mktemp("plan") / "small.yaml"
    file.write_text(SMALL)
    return str(file)


@pytest.fixture(scope="module")
def small(tmp_path_factory, plan):
    made = build_world(tmp_path_factory.mktemp("world") / "deep" / "small", plan, seed=5)
    assert made.complete and not made.cached
    return made


def weights(path):
    return AutoModelForCausalLM.from_pretrained(path).state_dict()


def test_every_model_loads_with_plain_transformers_and_generates(world):
    made = read_summary(world)
    assert set(made.models) == {"student", "teacher", "padded", "stranger"} and made.complete
    for summary in made.models.values():
        model = AutoModelForCausalLM.from_pretrained(summary.path)
        tokenizer = AutoTokenizer.from_pretrained(summary.path)
        inputs = tokenizer("12+34=", return_tensors="pt", return_token_type_ids=False)
        out = model.generate(**inputs, max_new_tokens=3, do_sample=False)
        assert out.shape[1] <= 9
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id
        assert model.config.vocab_size == summary.vocabulary
        assert model.num_parameters() == summary.parameters


def test_the_padded_teacher_has_more_rows_than_the_tokenizer_and_the_stranger_other_ids(world):
    tokenizer, stranger = (AutoTokenizer.from_pretrained(world / name) for name in ("padded", "stranger"))
    assert read_summary(world).models["padded"].vocabulary > len(tokenizer)
    assert tokenizer("1")["input_ids"] != stranger("1")["input_ids"]


def test_the_file_names_tasks_that_a_recipe_can_use(world):
    data = json.loads((world / "world.json").read_text())
    source = build_prompts(TaskSettings(**data["tasks"]["addition"]), seed=0)
    assert len(source.prompts("heldout", 3)) == 3


def test_building_again_does_nothing_and_needs_no_torch(small, plan):
    before = {path: path.stat().st_mtime_ns for path in small.folder.rglob("*") if path.name != ".lock"}
    code = (
        "import sys; from opd_lab.tiny import build_world; "
        f"world = build_world({str(small.folder)!r}, {plan!r}, seed=5); "
        "print(world.cached, sorted(world.models), 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "True ['student', 'teacher'] False"
    assert before == {path: path.stat().st_mtime_ns for path in small.folder.rglob("*") if path.name != ".lock"}


def test_a_finished_world_is_only_read(small, plan):
    (small.folder / ".lock").unlink()
    assert build_world(small.folder, plan, seed=5).cached
    assert not (small.folder / ".lock").exists()


def test_an_interrupted_build_goes_on_and_gives_the_same_weights(small, plan, tmp_path):
    class Stop(Exception):
        pass

    def stop(model, done, total):
        if model == "teacher" and done == 3:
            raise Stop

    with pytest.raises(Stop):
        build_world(tmp_path, plan, seed=5, progress=stop)
    assert not (tmp_path / "teacher").exists() and (tmp_path / "student").exists()
    steps = []
    again = build_world(tmp_path, plan, seed=5, progress=lambda model, done, total: steps.append(model))
    assert set(steps) == {"teacher"} and again.complete
    for name in ("student", "teacher"):
        old, new = weights(small.models[name].path), weights(again.models[name].path)
        assert all(torch.equal(old[key], new[key]) for key in old)


def test_a_finished_world_that_another_version_built_is_refused(small, plan, tmp_path):
    shutil.copytree(small.folder, tmp_path / "other")
    path = tmp_path / "other" / "world.json"
    path.write_text(path.read_text().replace(small.key, "0123456789abcdef"))
    with pytest.raises(DataError, match="seed 5, built by another version"):
        build_world(tmp_path / "other", plan, seed=5)


def test_a_worlds_key_outlives_renamed_classes_and_new_fields_that_are_not_used():
    plan = world_plan("demo")
    size = make_dataclass("Size", [("experts", int, 1)], bases=(Shape,), frozen=True, slots=True)

    def sized(**changes):
        models = {n: replace(m, shape=size(**asdict(m.shape), **changes)) for n, m in plan.models.items()}
        return replace(plan, models=models)

    assert world_key(sized(), 0) == world_key(plan, 0)
    assert world_key(sized(experts=2), 0) != world_key(plan, 0) != world_key(plan, 1)


def test_a_model_that_went_missing_is_built_again(small, plan, tmp_path):
    shutil.copytree(small.folder, tmp_path / "world")
    weights_file = tmp_path / "world" / "student" / "model.safetensors"
    weights_file.unlink()
    again = build_world(tmp_path / "world", plan, seed=5)
    assert not again.cached and again.models["student"].path == weights_file.parent
    assert weights_file.exists()


def test_folders_with_other_things_are_left_alone(world, tmp_path):
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(DataError, match=r"not empty \(precious.txt"):
        build_world(tmp_path, "test")
    with pytest.raises(DataError, match="is a file"):
        build_world(tmp_path / "precious.txt", "test")
    with pytest.raises(DataError, match=r"'test' with seed 0, not .*seed 6"):
        build_world(world, "test", seed=6)
    with pytest.raises(ConfigError, match="no preset 'tset'"):
        build_world(tmp_path / "new", "tset")


def test_a_build_killed_before_its_first_model_goes_on(plan, tmp_path):
    code = (
        "import os, signal; from opd_lab.tiny import build_world, builder; "
        "replace = os.replace; "
        "kill = lambda *a: (replace(*a), os.kill(os.getpid(), signal.SIGKILL)); "
        "builder.os.replace = lambda a, b: kill(a, b) if b.name == 'student' else replace(a, b); "
        f"build_world({str(tmp_path)!r}, {plan!r})"
    )
    assert forked.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert (tmp_path / "student").exists()
    assert build_world(tmp_path, plan).complete


def test_a_model_that_cannot_be_written_is_named(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", lambda self, folder: Path("/dev/full").write_text("x"))
    with pytest.raises(OutputError, match=r"'student' in .*No space left"):
        build_world(tmp_path, plan)


@pytest.mark.parametrize("seed", [-1, 2**32, 10**30])
def test_seeds_that_torch_cannot_take_are_refused(tmp_path, seed):
    with pytest.raises(ConfigError, match=f"is {seed}"):
        build_world(tmp_path / "world", "test", seed=seed)
    assert not (tmp_path / "world").exists()


def test_a_damaged_world_file_says_so(tmp_path):
    (tmp_path / "world.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        build_world(tmp_path, "test")
