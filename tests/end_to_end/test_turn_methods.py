"""Methods for episodes and second attempts in real trainings of two steps, with settings of docs/curricula.md."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_records import metrics_of

from opd.config import parse_settings
from student.job.session import train
from student.settings.recipe import Recipe

pytestmark = pytest.mark.zoo

ROOT = Path(__file__).parents[2]
BLOCKS = [
    yaml.safe_load(block)
    for block in re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "curricula.md").read_text(), flags=re.DOTALL)
]
Steps = Callable[..., list[dict[str, Any]]]


def page(words: str) -> dict[str, Any]:
    """The fragment of docs/curricula.md that says `words`."""
    (found,) = [block for block in BLOCKS if words in json.dumps(block)]
    return dict(found)


@pytest.fixture
def steps_of(world: Path, tmp_path: Path) -> Steps:
    """Train for two steps and give the lines of metrics.jsonl."""

    def run(fragment: dict[str, Any], columns: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
        table = tmp_path / "prompts.jsonl"
        rows = [{"prompt": f"{i}+{i + 1}=", "answer": str(2 * i + 1), **columns} for i in range(16)]
        table.write_text("\n".join(map(json.dumps, rows)))
        small = {"prompts_per_step": 3, "samples_per_prompt": 4, "max_new_tokens": 24, "max_prompt_tokens": 256}
        given = {key: value for key, value in fragment.get("rollout", {}).items() if key not in small}
        data = {
            "run": str(tmp_path / "run"),
            "model": {"path": str(world / "student")},
            "prompts": {"file": str(table), "verifier": "student_plugins:Even", "heldout": 0},
            "train": {"steps": 2, "learning_rate": 1e-2, "threads": 1, "checkpoint_every": 0},
            "eval": {"prompts": 0},
            **{key: value for key, value in fragment.items() if key not in ("prompts", "rollout")},
            **{key: value for key, value in changes.items() if key != "rollout"},
            "rollout": {**small, **given, **changes.get("rollout", {})},
        }
        recipe = parse_settings(Recipe, data)
        train(recipe)
        return metrics_of(recipe.run)

    return run


EPISODES = {"turns": 2, "turn_tokens": 4, "isolation": "none"}
AGAIN = {"name": "again", "options": {"verifier": "student_plugins:Even", "reward": "last", "word": "="}}


def test_the_first_stage_of_score_pays_second_attempts_and_holds_the_first_ones(steps_of: Steps) -> None:
    first, second = steps_of(
        page("reference_kl"),
        {"environment": AGAIN},
        teachers={"reference": "initial"},
        rollout={"episodes": EPISODES},
    )
    assert first["grad_norm"] > 0 and first["loss/reference_kl"] == pytest.approx(0, abs=1e-5)
    assert first["reference_kl"] == pytest.approx(0, abs=1e-5) and abs(second["reference_kl"]) > 1e-5
    assert first["advantage_magnitude"] > 0


def test_critique_grpo_learns_from_refinements_under_the_plain_prompt(steps_of: Steps) -> None:
    steps = steps_of(page("critique"), {}, rollout={"max_new_tokens": 5})
    assert all(step["critique/refined_share"] == 1 and step["hinted_share"] == 0.25 for step in steps)
    assert any(step["grad_norm"] > 0 and 0 < step["shaped_gain"] < 1 for step in steps)
    assert all(step["sampled_rows"] == 3 * (3 + 3) for step in steps)


def test_arpo_branches_episodes_and_learns_from_the_shared_beginnings(steps_of: Steps) -> None:
    steps = steps_of(
        page("arpo"),
        {},
        prompts={"task": "lock", "options": {"digits": 3, "turns": 4}},
        rollout={"episodes": {"turns": 4, "turn_tokens": 3, "isolation": "none"}},
    )
    for step in steps:
        assert step["arpo/branched_share"] > 0 and step["arpo/diverged_share"] == 0
        assert step["sampled_rows"] == 12 and step["rollout_rounds"] >= 3
        # What a branch took over was not sampled by it, and is learnt from.
        assert step["cost/train/sampled_tokens"] < step["response_tokens"]


def test_tt_opd_shows_its_hint_its_average_and_its_cut(steps_of: Steps) -> None:
    given = page("copy_every")
    given["teachers"]["ema"] |= {"every": 1, "copy_every": 2}
    given["objective"][1] |= {"first_turns": 1, "within": 2}
    first, second = steps_of(given, {"environment": AGAIN}, rollout={"episodes": EPISODES})
    assert first["tt_hinted"] == 1 and 0 < first["tt_cut"] < 1 and first["ema_moved"] == second["ema_moved"] == 1
    assert first["ema_distance"] > 0 and second["ema_distance"] == 0 and first["reverse_kl"] > 0
    assert first["cosine_length/length"] < 1


def test_tt_opd_as_executed_turns_the_sign_of_failed_episodes(steps_of: Steps) -> None:
    steps = steps_of(page("flip_failed"), {"environment": AGAIN}, rollout={"episodes": EPISODES})
    assert 0 < steps[0]["tt_flipped"] < 1 and all(step["selected_share"] < 1 for step in steps)
    assert steps[0]["grad_norm"] > 0 and steps[1]["loss/tt_opd"] != 0


def test_dr_kernel_pays_and_drops_turns_by_what_was_measured(steps_of: Steps) -> None:
    (first, second) = steps_of(
        page("prs"),
        {"environment": {"name": "tests.support.environments:Profiled"}},
        rollout={"episodes": EPISODES},
    )
    assert 0 < first["prs/dropped"] < 1 and 0 < first["prs/correct"] <= 2
    assert first["profiling/unmeasured"] == 0 and first["profiling/correct"] > 0 and second["grad_norm"] > 0
