"""What prompts lack is refused before the student is loaded, not in the step that reads it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from slow_cases import slow

from opd.config import parse_settings
from opd.errors import ConfigError, DataError
from opd.tasks.prompt import Prompt
from student.commands.dry_run import check
from student.methods.distil.expert_rows import ExpertRows
from student.methods.distil.opd import OnPolicyDistillation
from student.plugin.controllers import CONTROLLERS, Controller
from student.plugin.strategy import Single
from student.rl.advantages.group_mean import GroupMean
from student.rl.rewards.overlong import Overlong
from student.rollout.engine import TransformersRollout
from student.settings.recipe import Recipe

PLAYED = {"task": "student_plugins:TwoTries", "options": {"digits": 1}}
LOCK = {"task": "lock", "options": {"digits": 3, "turns": 5}}
CHAT = {"endpoint": "http://127.0.0.1:9/v1", "model": "judge"}
CREDIT = {"name": "policy_gradient", "ratio": "none", "advantage": {"name": "reinforce"}}
BY_TURN = {**CREDIT, "advantage": {"name": "trloo", "group": ["uid"]}}
HINTED = {**CREDIT, "rows": "all"}


def lines(folder: Path, **columns: Any) -> dict[str, Any]:
    """Prompts of a file, with further columns."""
    file = folder / "prompts.jsonl"
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), **columns} for i in range(8)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return {"file": str(file), "verifier": "numeric", "keep_columns": list(columns)}


LACKING: dict[str, tuple[dict[str, Any], str]] = {
    "prefix_replay": ({"prompts": PLAYED, "methods": [{"name": "prefix_replay"}]}, "has no recorded path"),
    "tcod": ({"prompts": PLAYED, "methods": [{"name": "tcod", "order": "b2f"}]}, "has no recorded path"),
    "expert_rows": (
        {"objective": [{"name": "sft"}], "methods": [{"name": "expert_rows", "share": 0.5}]},
        "from source solution, but none of the first 2 prompts has one",
    ),
    "igpo": ({"prompts": LOCK, "objective": [BY_TURN], "rewards": [{"name": "igpo"}]}, "no reference answer"),
    "rlpr": ({"prompts": LOCK, "rewards": [{"name": "rlpr"}]}, "no reference answer"),
    "checklist": ({"constraints": "", "rewards": [{"name": "checklist", **CHAT}]}, "no column 'constraints'"),
    "guide": ({"hint": None, "objective": [HINTED], "rollout": {"strategy": {"name": "guide"}}}, "no column 'hint'"),
}


class NoPrompts:
    """Refuses every prompt, whatever kind of plug-in it is mixed into."""

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        raise DataError(f"{type(self).__name__} refuses {len(prompts)} prompts.")


class RefusingTerm(NoPrompts, OnPolicyDistillation):
    pass


class RefusingAdvantage(NoPrompts, GroupMean):
    pass


class RefusingMethod(NoPrompts, Controller):
    pass


class RefusingStrategy(NoPrompts, Single):
    pass


class RefusingReward(NoPrompts, Overlong):
    pass


class RefusingEngine(NoPrompts, TransformersRollout):
    pass


OWN = f"{__name__}:"
REFUSING: dict[str, dict[str, Any]] = {
    "RefusingTerm": {"objective": [{"name": OWN + "RefusingTerm", "role": "ema"}]},
    "RefusingAdvantage": {"objective": [{**CREDIT, "advantage": {"name": OWN + "RefusingAdvantage"}}]},
    "RefusingMethod": {"methods": [{"name": OWN + "RefusingMethod"}]},
    "RefusingStrategy": {"rollout": {"strategy": {"name": OWN + "RefusingStrategy"}}},
    "RefusingReward": {"rewards": [{"name": OWN + "RefusingReward", "buffer": 4}]},
    "RefusingEngine": {"rollout": {"engine": {"name": OWN + "RefusingEngine"}}},
}


@pytest.mark.parametrize("name", REFUSING)
def test_a_plugin_of_any_kind_may_refuse_the_prompts(world: Path, tmp_path: Path, name: str) -> None:
    data = {
        "run": str(tmp_path / "run"),
        "model": {"path": str(world / "student")},
        "prompts": lines(tmp_path),
        "objective": [CREDIT],
        "eval": {"prompts": 0},
        **REFUSING[name],
    }
    data["rollout"] = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 8, **data.get("rollout", {})}
    with pytest.raises(DataError, match=f"{name} refuses 2 prompts"):
        check(parse_settings(Recipe, data), offline=False)


@pytest.mark.parametrize("name", LACKING)
def test_what_the_prompts_lack_is_refused_before_the_student_is_loaded(world: Path, tmp_path: Path, name: str) -> None:
    changes, said = LACKING[name]
    columns = {column: changes[column] for column in ("constraints", "hint") if column in changes}
    data = {
        "run": str(tmp_path / "run"),
        "model": {"path": str(world / "student")},
        "prompts": lines(tmp_path, **columns),
        "objective": [CREDIT],
        "eval": {"prompts": 0},
        **{key: value for key, value in changes.items() if key not in columns},
    }
    data["rollout"] = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 8, **data.get("rollout", {})}
    with pytest.raises(DataError, match=said):
        check(parse_settings(Recipe, data), offline=False)


def test_routing_replay_refuses_prompts_of_episodes_and_no_others() -> None:
    made: Controller = CONTROLLERS.make({"name": "routing_replay"}, Controller, "methods.0")
    made.check_prompts([Prompt.make("1+1=")])
    with pytest.raises(ConfigError, match="replays only single answers"):
        made.check_prompts([Prompt.make("1+1=", extra={"environment": {"name": "lock"}})])


def test_recorded_answers_may_lack_the_first_prompts_where_such_rows_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text('{"prompt": "2+2=", "answer": "4"}')
    entry = {"name": "expert_rows", "share": 0.5, "source": "file", "file": str(file)}
    dropping: ExpertRows = CONTROLLERS.make({**entry, "missing": "drop"}, Controller, "methods.0")
    dropping.check_prompts([Prompt.make("1+1=")])
    strict: ExpertRows = CONTROLLERS.make(entry, Controller, "methods.0")
    strict.check_prompts([Prompt.make("1+1="), Prompt.make("2+2=")])
    with pytest.raises(DataError, match="from source file"):
        strict.check_prompts([Prompt.make("1+1=")])


GROUPS: dict[str, tuple[dict[str, Any], str]] = {
    "no one's": ({}, "'role', which rows of the prompt in .* do not have; group by some of step, .*, rollout, or"),
    "of another column": (
        {"methods": [{"name": "random_prompts", "by": "kind"}]},
        "'role', which .* of step, .*, rollout, kind, or",
    ),
    "of an episode": ({"prompts": LOCK}, "'role', which .*, rollout, ended, or"),
}


@pytest.mark.parametrize("case", GROUPS)
def test_a_group_by_a_tag_that_rows_lack_is_refused_in_the_dry_run(world: Path, tmp_path: Path, case: str) -> None:
    changes, said = GROUPS[case]
    with pytest.raises(ConfigError, match=f"'reinforce' groups by tag {said}"):
        check(grouped("role", world, tmp_path, **changes), offline=False)


@pytest.mark.parametrize(
    ("tag", "changes"),
    [
        ("template", {"methods": [{"name": "prompt_augmentation"}]}),
        ("ended", {"prompts": LOCK}),
        *slow(("kind", {"methods": [{"name": "random_prompts", "by": "kind"}]})),
    ],
)
def test_a_group_by_a_tag_that_a_method_or_an_episode_gives_is_taken(
    world: Path, tmp_path: Path, tag: str, changes: dict[str, Any]
) -> None:
    assert "needs: " in check(grouped(tag, world, tmp_path, **changes), offline=False)


def grouped(tag: str, world: Path, folder: Path, **changes: Any) -> Recipe:
    data = {
        "run": str(folder / "run"),
        "model": {"path": str(world / "student")},
        "prompts": lines(folder, kind="sum"),
        "objective": [{**CREDIT, "advantage": {"name": "reinforce", "group": ["uid", tag]}}],
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 8},
        "eval": {"prompts": 0},
        **changes,
    }
    return parse_settings(Recipe, data)
