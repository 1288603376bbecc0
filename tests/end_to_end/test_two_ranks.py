"""`opd train` on two ranks (torchrun, gloo): the same run as on one, up to rounding."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from run_records import metrics_of
from safetensors.torch import load_file
from waiting import wait_until

from student.job.session import train
from student.settings.recipe import Recipe


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:06d}" / "model" / "model.safetensors")


@pytest.mark.parametrize(
    ("payload", "model"),
    [
        ("gather", "teacher"),
        pytest.param("hidden", "teacher", marks=pytest.mark.slow),
        pytest.param("hidden", "ema", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_train_like_one(
    make_recipe: Callable[..., Recipe], tmp_path: Path, two_ranks: Callable[[Recipe], None], payload: str, model: str
) -> None:
    # Three prompts of two samples: one rank gets more rows and so more micro-batches than the other.
    changes = {
        "rollout": {"prompts_per_step": 3, "samples_per_prompt": 2},
        "objective": [{"name": "opd", "payload": payload} | ({"k": 8} if payload == "gather" else {})],
        "train": {"steps": 3, "micro_batch_tokens": 64},
        "teachers": {"default": model, "ema": {"decay": 0.5}},
    }
    if model == "ema":  # which teaches only what it reads more
        changes["contexts"] = {"teacher": {"prompt": "Carry! {{ prompt }}"}}
    train(make_recipe(run=str(tmp_path / "one"), **changes))
    two = make_recipe(run=str(tmp_path / "two"), **changes)
    two_ranks(two)
    for mine, theirs in zip(metrics_of(tmp_path / "one"), metrics_of(two.run), strict=True):
        for name in ("loss/opd", "reverse_kl", "student_entropy", "grad_norm", "response_tokens", "truncation_rate"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-5), name
    one, other = weights(tmp_path / "one", 3), weights(two.run, 3)
    assert set(one) == set(other)
    for name, tensor in one.items():
        torch.testing.assert_close(
            other[name], tensor, atol=2e-4, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.slow
def test_an_evaluation_is_shared_by_the_ranks_and_gives_the_report_of_one(
    make_recipe: Callable[..., Recipe], tmp_path: Path, two_ranks: Callable[[Recipe], None]
) -> None:
    changes = {
        # Five prompts of two answers: one rank has more of them. At another temperature the divergence has its own.
        "eval": {"prompts": 5, "samples": 2, "temperature": 0.7},
        "train": {"steps": 1, "learning_rate": 1e-9},
        "samples": {"every": 0, "count": 7},
    }
    summaries, shown = [], []
    for name, run in (("one", train), ("two", two_ranks)):
        recipe = make_recipe(run=str(tmp_path / name), **changes)
        run(recipe)
        summaries.append(json.loads((recipe.run / "summary.json").read_text()))
        shown.append([json.loads(line) for line in (recipe.run / "samples.jsonl").read_text().splitlines()])
    one, two = (summary["before"] for summary in summaries)
    assert two.pop("reverse_kl") == pytest.approx(one.pop("reverse_kl"), rel=1e-6)
    assert two == one and one["tokens"] > 0 and one["pass_at"]
    assert len(shown[0]) == len(shown[1]) == 14
    for mine, theirs in zip(*shown, strict=True):
        assert theirs["kl"] == pytest.approx(mine["kl"], rel=1e-5)
        assert [mine[key] for key in ("uid", "answer", "step")] == [theirs[key] for key in ("uid", "answer", "step")]


@pytest.mark.slow
def test_a_window_is_chosen_from_the_rows_of_all_ranks_also_after_a_resume(
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    two_ranks: Callable[..., None],
    hashes: Callable[[Path], dict[str, str]],
) -> None:
    changes = {
        "rollout": {"prompts_per_step": 3, "samples_per_prompt": 2, "max_new_tokens": 12},
        "objective": [{"name": "opd", "payload": "topk", "k": 8, "aggregation": "constant"}],
        "methods": [
            {"name": "prune_opd", "k": 8, "threshold": 0.6, "smoothing": 2, "shortest": 2, "quantile": 0.5},
        ],
        "train": {"steps": 4, "micro_batch_tokens": 64},
        "eval": {"prompts": 0},
    }
    train(make_recipe(run=str(tmp_path / "one"), **changes))
    two = make_recipe(run=str(tmp_path / "two"), **changes)
    two_ranks(two)
    windows = [record["window"] for record in metrics_of(tmp_path / "one")]
    assert [record["window"] for record in metrics_of(two.run)] == windows and len(set(windows)) > 1
    for name in ("overlap", "pruned_tokens", "response_tokens"):
        for mine, theirs in zip(metrics_of(tmp_path / "one"), metrics_of(two.run), strict=True):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-6), name
    last = two.run / "checkpoints" / "step-000004"
    calm = hashes(last)
    for step in (3, 4):
        shutil.rmtree(two.run / "checkpoints" / f"step-{step:06d}")
    (two.run / "summary.json").unlink()
    two_ranks(two, "--resume")
    assert hashes(last) == calm
    assert [record["window"] for record in metrics_of(two.run)] == windows


@pytest.mark.slow
def test_ranks_drop_out_other_units_and_go_on_with_their_own_random_states(
    make_recipe: Callable[..., Recipe],
    recipe_data: dict[str, Any],
    tmp_path: Path,
    two_ranks: Callable[..., None],
    hashes: Callable[[Path], dict[str, str]],
) -> None:
    model = tmp_path / "dropping"
    shutil.copytree(recipe_data["model"]["path"], model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.2}))
    student = {"path": str(model), "dropout": True}
    common: dict[str, Any] = {"model": student, "rollout": {"prompts_per_step": 2}, "eval": {"prompts": 0}}
    calm, *cut = (
        make_recipe(run=str(tmp_path / name), **common, train={"steps": steps})
        for name, steps in (("calm", 2), ("cut", 1), ("cut", 2))
    )
    two_ranks(calm, *cut)
    first, last = (hashes(calm.run / "checkpoints" / f"step-00000{step}") for step in (1, 2))
    states = [f"trainer/random-0000{rank}.safetensors" for rank in range(2)]
    assert first[states[0]] != first[states[1]]
    assert all(first[state] != last[state] for state in states)  # both drew
    assert hashes(cut[1].run / "checkpoints" / "step-000002") == last


@pytest.mark.slow
def test_two_ranks_resume_and_stop_on_a_signal(
    make_recipe: Callable[..., Recipe], launch: Callable[..., forked.Program]
) -> None:
    recipe = make_recipe(train={"steps": 100_000, "checkpoint_every": 0}, rollout={"prompts_per_step": 2})
    process = launch(recipe)
    written = recipe.run / "metrics.jsonl"
    wait_until(lambda: (written.exists() and metrics_of(recipe.run)) or process.poll() is not None, 600)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=240)
    assert process.returncode != 0
    assert list((recipe.run / "checkpoints").glob("step-*"))
