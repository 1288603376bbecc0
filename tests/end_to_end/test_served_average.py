"""A served teacher that follows the student's moving average is that average, step by step and after a resume."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_records import metrics_of
from safetensors.torch import load_file, save_file

from opd.errors import ConfigError, IncompatibleTeacherError
from opd.fleet.client import TeacherFleet
from opd.wire.types import PayloadSpec, ScoreItem
from student.commands.dry_run import check
from student.job.session import train
from student.settings.recipe import Recipe

TOKEN = "operator-secret-1"
SELF = {"contexts": {"teacher": {"prompt": "Carry! {{ prompt }}"}}}
"""What a self-teacher reads more: without it an average of the student teaches next to nothing."""


@pytest.fixture
def stranger(world: Path, tmp_path: Path) -> Path:
    """A model of the student's architecture and tokenizer with other weights."""
    folder = tmp_path / "stranger"
    shutil.copytree(world / "student", folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor.roll(1, 0) for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


@pytest.fixture
def following(make_recipe: Callable[..., Recipe], stranger: Path, serve: Any, tmp_path: Path) -> Callable[..., Recipe]:
    """A recipe whose teacher is a server of its own, which begins with the weights of a stranger."""

    (tmp_path / "tokens.yaml").write_text(f"- {{name: run, token: {TOKEN}, scopes: [score, admin]}}\n")
    (tmp_path / "token").write_text(TOKEN)

    def make(name: str = "run", served: str = str(stranger), **changes: Any) -> Recipe:
        address = serve(
            "--model", f"self={served}", "--deterministic", "--tokens", str(tmp_path / "tokens.yaml")
        ).address
        ema = {"decay": 0.5, "every": 2, "served": "self", **changes.pop("ema", {})}
        fleet = {"security": {"token_file": str(tmp_path / "token")}}
        teachers = {"endpoints": [address], "default": "self", "ema": ema, "fleet": fleet}
        return make_recipe(run=str(tmp_path / name), teachers=teachers, **SELF, **changes)

    return make


def weights(recipe: Recipe, step: int = 4) -> dict[str, torch.Tensor]:
    return load_file(recipe.run / "checkpoints" / f"step-{step:06d}" / "model" / "model.safetensors")


def served_row(recipe: Recipe) -> np.ndarray:
    assert recipe.teachers is not None and isinstance(recipe.teachers.endpoints, list)
    with TeacherFleet.connect(recipe.teachers.endpoints, settings=recipe.teachers.fleet) as fleet:
        scores = fleet.score("self", [ScoreItem(np.arange(8, dtype=np.uint32), 4)], PayloadSpec.sampled())[0].sampled
    assert scores is not None
    return scores


def test_the_served_average_teaches_what_the_one_in_process_does(
    following: Callable[..., Recipe], make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe = following()
    before = served_row(recipe)
    train(recipe)
    local = make_recipe(
        run=str(tmp_path / "local"), teachers={"default": "ema", "ema": {"decay": 0.5, "every": 2}}, **SELF
    )
    train(local)
    mine, theirs = (
        metrics_of(recipe.run)[0],
        metrics_of(local.run)[0],
    )  # later steps sample other tokens: scores are rounded on the wire
    for name in ("loss/opd", "reverse_kl", "grad_norm", "ema_distance"):
        assert mine[name] == pytest.approx(theirs[name], rel=1e-3), name
    moved = [record for record in metrics_of(recipe.run) if "follow/gap" in record]
    assert len(moved) == 2  # every other step of four
    assert all(record["follow/gap"] < 1e-5 and record["follow/seconds"] > 0 for record in moved)
    assert np.abs(served_row(recipe) - before).max() > 0.01
    assert {path.name for path in (tmp_path / "run.teacher").glob("step-*")} == {"step-000002", "step-000004"}


def test_a_resumed_run_has_its_average_served_again(
    following: Callable[..., Recipe], interrupted: Callable[..., dict[str, Any]]
) -> None:
    whole, stopped = following("whole"), following("stopped")
    train(whole)
    interrupted(stopped)  # between updates too, behind which the average has moved and is not yet served
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(stopped)[name], tensor), name
    np.testing.assert_array_equal(served_row(stopped), served_row(whole))


@pytest.mark.slow
def test_an_adapter_is_served_over_its_base_and_refused_over_another(
    following: Callable[..., Recipe], make_recipe: Callable[..., Recipe], world: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="the extra lora is not installed")
    short = {"model": {"lora": {"rank": 4}}, "train": {"steps": 2}, "eval": {"prompts": 0}}
    begun = make_recipe(run=str(tmp_path / "begun"), **short)
    train(begun)
    adapter = begun.run / "checkpoints" / "step-000002" / "model"
    recipe = following("adapted", served=f"{world / 'student'}+{adapter}", **short)
    train(recipe)
    assert metrics_of(recipe.run)[-1]["follow/gap"] < 1e-5
    with pytest.raises(IncompatibleTeacherError, match=r"log-probs up to .* nats"):
        train(following("whole", **short))  # whose servers would add the adapter to what they have


@pytest.mark.slow
def test_two_ranks_have_one_average_served(
    following: Callable[..., Recipe], two_ranks: Callable[[Recipe], None]
) -> None:
    one, two = following("one"), following("two")
    train(one)
    two_ranks(two)
    for mine, theirs in zip(metrics_of(one.run), metrics_of(two.run), strict=True):
        assert theirs["loss/opd"] == pytest.approx(mine["loss/opd"], rel=1e-3, abs=1e-5)
    np.testing.assert_allclose(served_row(two), served_row(one), atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ema": {"served": "other"}}, "teachers.ema.served is 'other', but the run uses self"),
        ({"train": {"max_staleness": 1}, "objective": [{"name": "opd", "payload": "hidden"}]}, "max_staleness to 0"),
    ],
)
def test_what_cannot_follow_is_refused_in_a_dry_run(
    following: Callable[..., Recipe], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check(following(**changes), offline=False)
