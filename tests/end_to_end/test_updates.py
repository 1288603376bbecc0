"""Several optimizer updates per batch of rows, through the whole loop."""

import json
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import student_plugins
import torch
from run_records import records
from safetensors.torch import load_file

from opd.errors import CancelledError, ConfigError, NonFiniteError
from opd.fleet.membership.outage import Outage
from student.data.report import StepReport
from student.job.session import train
from student.learning.learner import Learner
from student.learning.updates import Update
from student.plugin.controllers import Controller
from student.settings.recipe import Recipe

GRPO = {
    "prompts": {"task": "student_plugins:Digits", "options": {"digits": 2}},
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4},
    "objective": [{"name": "grpo", "clip_low": 0.02, "clip_high": 0.02}],
    "eval": {"prompts": 0},
}
SEVERAL = {"steps": 3, "epochs": 2, "minibatches": 4, "checkpoint_every": 0}


def test_one_update_leaves_the_ratio_at_1_and_several_move_it_until_the_clip_acts(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    once, often = (
        make_recipe(run=str(tmp_path / name), **GRPO, train=train_)
        for name, train_ in [("once", {"steps": 3}), ("often", SEVERAL)]
    )
    train(once)
    train(often)
    for line in records(once):
        assert line["updates"] == 1 and line["ratio"] == pytest.approx(1.0, abs=1e-5)
        assert line["clipped_share"] == 0
    for line in records(often):
        assert line["updates"] == 8 and line["updates_skipped"] == 0
        assert abs(line["ratio"] - 1.0) > 1e-4 and line["clipped_share"] > 0


def test_a_run_with_several_updates_resumes_to_the_same_bits(
    make_recipe: Callable[..., Recipe], tmp_path: Path, hashes: Callable[[Path], dict[str, str]]
) -> None:
    calm = make_recipe(run=str(tmp_path / "calm"), **GRPO, train=SEVERAL)
    straight = train(calm)
    cut = make_recipe(run=str(tmp_path / "cut"), **GRPO, train={**SEVERAL, "steps": 2})
    train(cut)
    longer = make_recipe(run=str(tmp_path / "cut"), **GRPO, train=SEVERAL)
    resumed = train(longer, resume=True)
    assert hashes(Path(resumed["checkpoint"])) == hashes(Path(straight["checkpoint"]))
    assert records(longer) == records(calm)


def test_a_signal_between_updates_waits_for_the_end_of_the_step(
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hashes: Callable[[Path], dict[str, str]],
) -> None:
    straight = train(make_recipe(run=str(tmp_path / "calm"), **GRPO, train=SEVERAL))
    recipe = make_recipe(run=str(tmp_path / "cut"), **GRPO, train=SEVERAL)
    original, calls = Learner.update, []

    def update(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 11:  # the third of the second step
            signal.raise_signal(signal.SIGINT)
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "update", update)
        with pytest.raises(CancelledError, match="stopped after 2 of 3 steps"):
            train(recipe)
    assert len(calls) == 16
    assert hashes(Path(train(recipe, resume=True)["checkpoint"])) == hashes(Path(straight["checkpoint"]))


class Watcher(Controller):
    """Remembers which steps it was told of."""

    seen: ClassVar[list[int]] = []

    def observe(self, report: StepReport) -> None:
        self.seen.append(report.step)


def test_a_step_whose_later_update_fails_counts_as_done(
    make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(student_plugins, "Watcher", Watcher, raising=False)
    changes = {**GRPO, "methods": [{"name": "student_plugins:Watcher"}], "train": SEVERAL}
    recipe = make_recipe(**{**changes, "objective": [{"name": "student_plugins:FailsAtThird"}]})
    with pytest.raises(NonFiniteError, match=r"not finite.* 2 of 3 steps.*step-000002"):
        train(recipe)
    assert Watcher.seen == [0, 1]  # controllers have seen the step that was cut short
    assert [line["updates"] for line in records(recipe)] == [8, 2]
    state = json.loads((recipe.run / "checkpoints/step-000002/trainer/learner.json").read_text())
    assert state["updates"] == 10
    train(make_recipe(**{**changes, "run": str(recipe.run)}), resume=True)
    assert [line["step"] for line in records(recipe)] == [1, 2, 3]


class Recompute(Controller):
    """Has the old policy read again before every update."""

    def updates(self, updates: Iterable[Update], services: Any) -> Iterator[Update]:
        for update in updates:
            yield Update(update.rows, recompute=True)


def test_old_log_probs_read_again_are_those_of_the_weights_an_update_starts_from(
    make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(student_plugins, "Recompute", Recompute, raising=False)
    changes = {**GRPO, "objective": [{"name": "grpo", "ratio_to": "old"}], "train": {**SEVERAL, "steps": 2}}
    once = make_recipe(run=str(tmp_path / "once"), **changes)
    again = make_recipe(run=str(tmp_path / "again"), **changes, methods=[{"name": "student_plugins:Recompute"}])
    train(once)
    train(again)
    for kept, reread in zip(records(once), records(again), strict=True):
        assert abs(kept["ratio"] - 1.0) > 1e-4
        assert reread["ratio"] == pytest.approx(1.0, abs=1e-5)
    # The rows of the first step are the same: read when they are scored, and again in each of two passes over them.
    spent = [records(recipe)[0]["cost/train/local_positions"] for recipe in (once, again)]
    assert spent[1] == 3 * spent[0]


class Reads(Controller):
    """Waits for a teacher that is away between the updates of a step."""

    saved: ClassVar[list[list[str]]] = []

    def updates(self, updates: Iterable[Update], services: Any) -> Iterator[Update]:
        for update in updates:
            yield update
            services._bench.scorer.hooks.emergency(Outage("t", 60.0, 1, "gone", 600.0))
            checkpoints = services._evaluator._recipe.run / "checkpoints"
            self.saved.append(sorted(path.name for path in checkpoints.glob("step-*")))


def test_an_outage_between_updates_saves_no_half_step(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(student_plugins, "Reads", Reads, raising=False)
    train(make_recipe(**GRPO, methods=[{"name": "student_plugins:Reads"}], train={**SEVERAL, "steps": 1}))
    assert Reads.saved == [[]] * 8


def test_a_step_without_rows_is_skipped_and_counted(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = make_recipe(
        methods=[{"name": "student_plugins:DropStep"}], train={"steps": 3, "checkpoint_every": 1}, eval={"prompts": 0}
    )
    train(recipe)
    assert [line["updates_skipped"] for line in records(recipe)] == [0, 1, 0]
    assert [line["updates"] for line in records(recipe)] == [1, 0, 1]
    first, second, third = (
        (recipe.run / f"checkpoints/step-00000{step}/model/model.safetensors").read_bytes() for step in (1, 2, 3)
    )
    assert first == second != third


def test_more_minibatches_than_groups_are_refused(make_recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(ConfigError, match=r"train\.minibatches \(5\) is over rollout\.prompts_per_step \(4\)"):
        make_recipe(**GRPO, train={"minibatches": 5})


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"train": {"steps": 3, "epochs": 2, "minibatches": 3}}, id="minibatches of which a rank has none"),
        pytest.param(
            {"methods": [{"name": "student_plugins:DropFirstRank"}], "train": {"steps": 2}}, id="a rank without rows"
        ),
    ],
)
def test_two_ranks_update_like_one(
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    two_ranks: Callable[[Recipe], None],
    changes: dict[str, Any],
) -> None:
    base = {**GRPO, "rollout": {"prompts_per_step": 3, "samples_per_prompt": 4}, **changes}
    two = make_recipe(run=str(tmp_path / "two"), **base)
    two_ranks(two)
    lines = records(two)
    assert [line["updates"] for line in lines] == [6, 6, 6] if "methods" not in changes else [1, 1]
    if "methods" in changes:
        return
    one = make_recipe(run=str(tmp_path / "one"), **base)
    train(one)
    for mine, theirs in zip(records(one), lines, strict=True):
        for name in ("ratio", "clipped_share", "grad_norm", "reward", "response_tokens", "updates"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-5), name
    last = "checkpoints/step-000003/model/model.safetensors"
    theirs, mine = load_file(two.run / last), load_file(one.run / last)
    for name, tensor in mine.items():
        torch.testing.assert_close(theirs[name], tensor, atol=2e-4, rtol=1e-3)


def test_credit_of_a_group_loss_is_computed_anew_before_every_further_update(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    lines = {}
    for recompute in (True, False):
        objective = [{"name": "rloo", "advantage": {"name": "lpo", "recompute": recompute}}]
        run = {**GRPO, "objective": objective, "train": {"steps": 2, "epochs": 3}}
        made = make_recipe(run=str(tmp_path / str(recompute)), **run)
        train(made)
        lines[recompute] = records(made)
    for fresh, kept in zip(lines[True], lines[False], strict=True):
        assert fresh["lpo/effective"] < 4.0 and kept["lpo/effective"] == pytest.approx(4.0)
        assert fresh["cost/train/local_positions"] > 0 and "cost/train/local_positions" not in kept
    assert lines[True][0]["grad_norm"] != lines[False][0]["grad_norm"]
