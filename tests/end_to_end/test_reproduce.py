"""`opd reproduce`: the same recipe gives the same run, and another one is found out."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from opd.errors import RunFolderError
from student.commands.reproduce import changed_versions, first_difference, reproduce
from student.job.session import train
from student.settings.recipe import Recipe


def test_a_run_is_reproduced_to_the_bit_and_another_seed_is_found_out(
    make_recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(train={"steps": 2}, eval={"prompts": 0})
    train(recipe)
    reproduce(recipe.run)
    assert "reproduced: in 2 steps every metric is equal to the bit" in capsys.readouterr().out
    with pytest.raises(RunFolderError, match=r"-again exists already.* --out"):
        reproduce(recipe.run)
    with pytest.raises(typer.Exit):
        reproduce(recipe.run, ["seed=1"], recipe.run.with_name("other"))
    assert "differs from step 1 on" in capsys.readouterr().out


def test_the_first_difference_is_named() -> None:
    one = [{"step": 1, "kl": 0.5, "seconds": 1.0}, {"step": 2, "kl": 0.4}]
    assert first_difference(one, [{"step": 1, "kl": 0.5, "seconds": 2.0}, {"step": 2, "kl": 0.4}]) is None
    assert first_difference(one, [{"step": 1, "kl": 0.5}, {"step": 2, "kl": 0.3}]) == (2, "kl", 0.4, 0.3)
    assert first_difference(one, one[:1]) == (2, "step", 2, None)
    assert first_difference(one[:1], one) is None, "a run that was killed is compared as far as it went"
    timed = [{"step": 1, "engine/sync_seconds": 0.1, "checkpoint/write_seconds": 2.0, "follow/seconds": 1.0}]
    assert first_difference(timed, [{"step": 1, "engine/sync_seconds": 0.2}]) is None, "whichever part has taken it"
    unknown = [{"step": 1, "eval/reverse_kl": float("nan")}]
    assert first_difference(unknown, [{"step": 1, "eval/reverse_kl": float("nan")}]) is None


def test_what_has_changed_since_is_named(tmp_path: Path) -> None:
    for name, torch in (("one", "2.12"), ("two", "2.13")):
        (tmp_path / name).mkdir()
        held = {"python": "3.11", "packages": {"torch": torch}, "fleet": {}, "git_revision": "abc"}
        (tmp_path / name / "provenance.json").write_text(json.dumps(held))
    assert changed_versions(tmp_path / "one", tmp_path / "two") == ['packages.torch: "2.12" then, "2.13" now']


def test_a_run_without_a_step_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("run: x\n")
    with pytest.raises(RunFolderError, match="has not finished a step"):
        reproduce(tmp_path)


def test_a_run_of_two_recipes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("run: x\n")
    (tmp_path / "recipe-until-000003.yaml").write_text("run: x\n")
    with pytest.raises(RunFolderError, match="resumed with another recipe"):
        reproduce(tmp_path)
