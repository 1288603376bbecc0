"""ALP: noise of a learnt size in every layer, in updates alone."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opd.errors import ConfigError
from opd_zoo.losses.layer_noise import LayerNoise
from student.data.batch import collate
from student.data.hooks import decoder_layers
from student.job.plugins import build_plugins
from student.model.model import Student
from student.model.recompute import recompute
from student.settings.recipe import Recipe

ALP = {"name": "alp", "advantage": {"name": "signed", "positive": 1.0}}
CLIPPED = {**ALP, "name": "policy_gradient", "ratio": "sequence", "clip_low": 0.5, "clip_high": 3.0}


def rewarded(bench: Any) -> list[Any]:
    rows = bench.rows()
    for place, row in enumerate(rows):
        row.reward = float(place % 2)
    return rows


def noise_of(bench: Any) -> LayerNoise:
    return bench.learner.student.beside["alp"]


def joined(gradient: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.flatten() for part in gradient.values()])


def hidden_of(bench: Any, rows: list[Any]) -> torch.Tensor:
    micro = collate(rows, list(range(len(rows))), torch.device("cpu"))
    with torch.no_grad():
        return bench.learner.student(micro.input_ids, micro.attention_mask, micro.sequence, micro.source)


def test_noise_that_vanishes_leaves_the_clipped_loss(bench: Callable[..., Any]) -> None:
    plain = bench(CLIPPED)
    rows = rewarded(plain)
    found = bench({**ALP, "noise": 1e-9}).gradient(rows)
    torch.testing.assert_close(joined(found), joined(plain.gradient(rows)), atol=1e-6, rtol=1e-4)
    assert not torch.allclose(joined(bench({**ALP, "noise": 0.3}).gradient(rows)), joined(found), rtol=0.05)


def test_every_layers_input_gets_noise_of_its_size_and_padding_none(bench: Callable[..., Any]) -> None:
    made = bench({**ALP, "noise": 0.5})
    rows = rewarded(made)
    micro = collate(rows, list(range(len(rows))), torch.device("cpu"))
    layers = decoder_layers(made.learner.student.lm)
    seen: list[torch.Tensor] = []
    handle = layers[0].register_forward_pre_hook(lambda layer, args: seen.append(args[0]))
    student: Student = made.learner.student
    with torch.no_grad():
        student(micro.input_ids, micro.attention_mask, micro.sequence, micro.source)
        with noise_of(made).on(micro.reading(0), 0):
            student(micro.input_ids, micro.attention_mask, micro.sequence, micro.source)
    handle.remove()
    added = seen[1] - seen[0]
    inside = micro.attention_mask.bool()
    assert len(layers) == len(noise_of(made).log_sizes) > 1
    assert added[inside].std().item() == pytest.approx(0.5, rel=0.05) and not added[~inside].any()
    first, second = added[0][inside[0]], added[1][inside[1]]
    shared = min(len(first), len(second))
    assert abs(np.corrcoef(first[:shared].flatten(), second[:shared].flatten())[0, 1]) < 0.1


def test_passes_without_a_gradient_have_none(bench: Callable[..., Any]) -> None:
    made = bench({**ALP, "noise": 1.0})
    rows = rewarded(made)
    before = hidden_of(made, rows)
    made.gradient(rows)
    assert torch.equal(hidden_of(made, rows), before)


def test_noise_is_the_same_in_any_micro_batch_and_when_taken_again_and_another_in_the_next_update(
    bench: Callable[..., Any],
) -> None:
    made = bench({**ALP, "noise": 0.2})
    rows = rewarded(made)
    found, again = made.gradient(rows), made.gradient(rows)
    assert torch.equal(joined(found), joined(again))
    small = bench({**ALP, "noise": 0.2}, micro_batch_tokens=64)
    torch.testing.assert_close(joined(small.gradient(rows)), joined(found), atol=1e-5, rtol=1e-3)
    made.learner.updates += 1
    assert not torch.allclose(joined(made.gradient(rows)), joined(found), rtol=0.01)


def test_a_checkpointed_layer_is_run_again_under_the_same_noise(bench: Callable[..., Any]) -> None:
    made = bench({**ALP, "noise": 0.2})
    rows = rewarded(made)
    expected, sizes = made.gradient(rows), noise_of(made).log_sizes.grad
    recompute(made.learner.student.lm)
    torch.testing.assert_close(joined(made.gradient(rows)), joined(expected), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(noise_of(made).log_sizes.grad, sizes, atol=1e-6, rtol=1e-4)


def test_sizes_follow_the_slope_of_the_loss(bench: Callable[..., Any]) -> None:
    made = bench({**ALP, "noise": 0.2})
    rows = rewarded(made)
    sizes = noise_of(made).log_sizes
    made.gradient(rows)
    slope = have(sizes.grad).clone()

    def loss(change: float) -> float:
        with torch.no_grad():
            sizes[0] += change
        sums = made.learner.accumulate(rows)
        with torch.no_grad():
            sizes[0] -= change
        return sums["loss/alp"][0]

    assert (loss(0.02) - loss(-0.02)) / 0.04 == pytest.approx(slope[0].item(), rel=0.05, abs=1e-4)


def have(value: torch.Tensor | None) -> torch.Tensor:
    assert value is not None
    return value


def test_sizes_move_at_their_own_rate_and_come_back_with_their_moments(bench: Callable[..., Any]) -> None:
    made = bench({**ALP, "noise": 0.1, "noise_rate": 0.01}, warmup_steps=0, schedule="constant")
    rows = rewarded(made)
    before = noise_of(made).log_sizes.detach().clone()
    metrics = made.step(rows, 0)
    moved = noise_of(made).log_sizes.detach() - before
    # AdamW's first step is the learning rate, whatever the slope.
    torch.testing.assert_close(moved.abs(), torch.full_like(moved, 0.01), rtol=1e-2, atol=0.0)
    assert metrics["noise_size"] == pytest.approx(0.1) and metrics["ratio"] != pytest.approx(1.0, abs=1e-4)
    state = copy.deepcopy(made.learner.state_dict())
    made.step(rows, 1)
    other = bench({**ALP, "noise": 0.1, "noise_rate": 0.01}, warmup_steps=0, schedule="constant")
    other.learner.load_state_dict(state)
    torch.testing.assert_close(noise_of(other).log_sizes.detach(), before + moved)
    kept = other.learner.optimizer.state[noise_of(other).log_sizes]
    assert torch.equal(kept["exp_avg"], state["moments"]["beside.alp.log_sizes"]["exp_avg"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"objective": [ALP, ALP]}, "twice"),
        ({"objective": [{**ALP, "ratio_to": "old"}]}, "remove ratio"),
        ({"train": {"sharding": "fsdp"}}, "train.sharding: none"),
    ],
)
def test_what_would_not_be_alp_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    recipe = {
        "run": tmp_path,
        "model": {"path": "m"},
        "prompts": {"task": "addition"},
        "objective": [ALP],
        "rollout": {"samples_per_prompt": 2},
    }
    with pytest.raises(ConfigError, match=said):
        build_plugins(Recipe.model_validate({**recipe, **changes}))


def test_others_are_told_that_they_read_the_student_under_noise(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(
        {
            "run": tmp_path,
            "model": {"path": "m"},
            "prompts": {"task": "addition"},
            "objective": [ALP, {"name": "entropy_bonus"}],
            "rollout": {"samples_per_prompt": 2},
        }
    )
    remarks = build_plugins(recipe).remarks
    assert any("under the noise" in remark for remark in remarks)
    assert not any("never act" in remark for remark in remarks)
