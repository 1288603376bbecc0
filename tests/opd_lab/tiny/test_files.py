"""World files: what they say is built, what they get wrong is named."""

from pathlib import Path

import pytest

from opd.errors import ConfigError
from opd.tasks import build_prompts
from opd_lab.tiny.files import read_world
from opd_lab.tiny.plans import ReinforcePlan, SftPlan
from opd_lab.tiny.presets import world_plan

WORLDS = Path(__file__).parents[3] / "opd_lab" / "worlds"

SMALL = """
max_new_tokens: 8
measured: 8
tasks:
  sorting: {task: sorting, options: {letters: 2}, mark: "S"}
  sums: {task: addition, options: {digits: 1}}
models:
  base: {shape: {hidden: 32, layers: 1, heads: 2}, stages: [{tasks: [sorting], sft: {steps: 2, batch: 4}}]}
  teacher: {parent: base, stages: [{reinforce: {steps: 1, prompts: 2, samples: 2, max_new_tokens: 8}}]}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "own.yaml"
    path.write_text(text)
    return path


def test_a_file_says_tasks_models_and_stages(tmp_path: Path) -> None:
    plan = read_world(written(tmp_path, SMALL))
    base, teacher = plan.models["base"], plan.models["teacher"]
    assert base.stages[0].tasks == ("sorting",) and teacher.stages[0].tasks == ("sorting", "sums")
    assert isinstance(base.stages[0].plan, SftPlan) and base.stages[0].plan.steps == 2
    assert isinstance(teacher.stages[0].plan, ReinforcePlan) and teacher.shape == base.shape
    assert plan.tasks["sorting"].mark == "S"


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("sft: {steps", "sft: {stepps", "'steps'"),
        ("parent: base", "parent: nobody", "nobody"),
        ("tasks: [sorting]", "tasks: [other]", "other"),
        ("{parent: base, ", "{", "exactly one of the keys shape, parent and merge"),
        ("parent: base", "merge: [base]", "needs at least two models"),
        ("parent: base", "merge: [base, nobody]", "starts from 'nobody'"),
        ("reinforce: {steps: 1", "sft: {steps: 1}, reinforce: {steps: 1", "exactly one of the keys sft and reinforce"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, old: str, new: str, named: str) -> None:
    assert old in SMALL
    with pytest.raises(ConfigError, match=named):
        read_world(written(tmp_path, SMALL.replace(old, new)))


@pytest.mark.parametrize("path", sorted(WORLDS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_worlds_that_ship_are_sound(path: Path) -> None:
    assert len(world_plan(str(path)).models) > 1  # its students are looked for in tests/opd_lab/test_experiments.py


def test_tasks_that_share_prompts_carry_marks() -> None:
    # In these the shared prompts are the point: a habit that hides a skill, marks that say only a little, paths with
    # and without slips or searching, students that answer at once or write their work.
    for path in set(WORLDS.glob("*.yaml")) - {
        WORLDS / f"{name}.yaml" for name in ("latent", "lock", "rooms", "modes", "hints")
    }:
        prompts: dict[str, str] = {}
        for name, settings in world_plan(str(path)).tasks.items():
            for prompt in build_prompts(settings, seed=0).prompts("train", 200):
                assert prompts.setdefault(str(prompt.text), name) == name, f"{path.stem}: {prompt.text}"
