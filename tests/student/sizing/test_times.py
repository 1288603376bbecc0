"""The plan's seconds and bytes against sums done by hand, for a model and a device of round numbers."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from opd.config import parse_settings
from opd.wire.types import PayloadSpec
from student.job.plugins import build_plugins
from student.settings.recipe import Recipe
from student.sizing.hardware import Hardware
from student.sizing.memory import memory_of
from student.sizing.teachers import Ask, seconds_of
from student.sizing.times import Times, times_of

DEVICE = Hardware("a GPU", 1e12, flops=1000.0, bandwidth=100.0, overhead=0.5, reserve=0.0, reached=0.5)
MODEL: Any = SimpleNamespace(
    total=100, active=100, trained=90, outside=40, layer=30, layers=2, vocabulary=10, hidden=8, width=4,
    weight_bytes=1000, trained_bytes=900, cache_bytes=3, state_bytes=0, head_bytes=0, widened=0, cast_bytes=0,
    activation_bytes=lambda rows, width: rows * width,
)  # fmt: skip


def recipe(**changes: Any) -> Recipe:
    """16 rows of at most 40 tokens after at most 20, of which a rank decodes 6 together, in micro-batches of 100."""
    rollout = {"prompts_per_step": 8, "samples_per_prompt": 2, "max_prompt_tokens": 20, "max_new_tokens": 40}
    data: dict[str, Any] = {
        "run": "run",
        "model": {"path": "student"},
        "prompts": {"task": "addition"},
        "objective": [{"name": "sft", "rows": "all"}],
        "rollout": {**rollout, "batch_rows": 6},
        "train": {"micro_batch_tokens": 100},
    }
    for group, value in changes.items():
        data[group] = {**data.get(group, {}), **value} if isinstance(value, dict) else value
    return parse_settings(Recipe, data)


def times(made: Recipe, device: Hardware = DEVICE, *, early: bool = False) -> Times:
    """Of two ranks, for answers of 30 tokens: 8 rows of 10 + 30 tokens on each."""
    return times_of(made, MODEL, build_plugins(made).needs, device, mean=30.0, ranks=2, early=early)


def test_a_rollout_takes_its_forwards_and_the_prompts_read_once_for_all_samples() -> None:
    # 8 x 30 tokens in 6 slots and a tail of 10: 50 forwards. Each reads 1,000 bytes of weights, 6 x 48 x 10 for logits
    # and 6 x 25 x 3 of cache: 4,330 bytes in 43.3 s. It computes 2 x 100 x 6 operations in 2.4 s and launches 2 layers
    # in 1 s. Four prompts of 10 tokens take 2 x 100 x 40 operations: 16 s.
    found = times(recipe())
    assert found.stages["rollout"] == pytest.approx(50 * 43.3 + 16)
    assert found.bound == {"rollout": "memory", "learn": "arithmetic"} and found.tokens == 16 * 30
    in_turn = times(recipe(), replace(DEVICE, overlaps=False))
    assert in_turn.stages["rollout"] == pytest.approx(50 * (43.3 + 2.4 + 1) + 16)


@pytest.mark.parametrize(
    ("model", "operations"),
    [
        ({}, 6),
        ({"gradient_checkpointing": True}, 8),
        ({"lora": {"rank": 4}}, 4),
        ({"lora": {"rank": 4}, "gradient_checkpointing": True}, 6),
    ],
)
def test_learning_takes_some_operations_for_each_parameter_and_token(model: dict[str, Any], operations: int) -> None:
    # 8 rows of 40 tokens, 100 parameters, 500 operations a second.
    assert times(recipe(model=model)).stages["learn"] == pytest.approx(operations * 100 * 320 / 500)


def test_a_step_learnt_early_has_as_many_parts_as_micro_batches() -> None:
    assert times(recipe()).parts == 1
    assert times(recipe(), early=True).parts == 4  # 320 tokens in micro-batches of 100


@pytest.mark.parametrize(
    ("payload", "up", "down"),
    [
        ({"payload": "sampled"}, 4 * 40, 4 * 30),
        ({"payload": "gather", "k": 8}, 4 * 40 + 8 * 2.25 * 30, (8 * 2 + 8) * 30),  # ids go up: 18 bits each
        ({"payload": "topk", "k": 8}, 4 * 40, (8 * 4.25 + 8) * 30),  # ids come down
        ({"payload": "hidden"}, 4 * 40, 2 * 8 * 30),
    ],
)
def test_a_row_sends_its_ids_and_receives_what_its_payload_has(payload: dict[str, Any], up: float, down: float) -> None:
    found = times(recipe(objective=[{"name": "opd", **payload}], teachers={"endpoints": ["localhost:1"]}))
    assert (found.sent, found.received) == pytest.approx((16 * up, 16 * down))


def test_ranks_exchange_gradients_or_the_weights_of_sharded_layers() -> None:
    assert times(recipe()).exchanged == 2 * 0.5 * 900  # gradients there and back, half of them another rank's
    # Four micro-batches, each with 60 parameters of layers twice, 40 outside once, and 90 gradients of 4 bytes; then
    # all 100 for the rollout. Half of everything is another rank's.
    sharded = times(recipe(train={"sharding": "fsdp"}))
    assert sharded.exchanged == 0.5 * (4 * ((2 * 60 + 40) * 4 + 90 * 4) + 100 * 4)


def test_a_teacher_computes_its_head_only_where_a_payload_needs_it() -> None:
    hidden, sampled = Ask("t", PayloadSpec.hidden(), 1.0), Ask("t", PayloadSpec.sampled(), 0.5)
    # 60 parameters of layers for 100 tokens that are read, and a head of 10 x 8 for 30 that are scored.
    assert seconds_of([hidden], MODEL, 100, 30, DEVICE) == (2 * 60 * 100 / 500, "arithmetic")
    assert seconds_of([hidden, sampled], MODEL, 100, 30, DEVICE) == (2 * (60 * 100 + 80 * 30) / 500, "arithmetic")


def kept(ranks: int = 1, **changes: Any) -> dict[str, float]:
    made = recipe(**changes)
    return dict(memory_of(made, MODEL, build_plugins(made).needs, DEVICE, gpu=True, ranks=ranks).always)


def test_copies_of_weights_are_kept_for_what_reads_them_and_for_nothing_else() -> None:
    plain = {"weights": 1000.0, "moments of AdamW": 2.0 * 900}
    assert kept() == plain
    assert kept(methods=[{"name": "effopd"}]) == plain | {"copies of effopd": 2.0 * 900}
    windows: dict[str, Any] = {
        "methods": [{"name": "adwin", "windows": [20]}],
        "objective": [{"name": "sft", "rows": "all", "aggregation": "constant"}],
    }
    assert kept(**windows) == plain | {"copy of adwin's probe": 1000.0 + 900}
    assert kept(2, **windows) == plain
    reference: dict[str, Any] = {"objective": [{"name": "sft", "rows": "all"}, {"name": "reference_kl"}]}
    initial: dict[str, Any] = {**reference, "teachers": {"reference": "initial"}}
    assert kept(**initial) == plain | {"copy for the reference initial": 900.0}
    assert kept(**initial, model={"lora": {"rank": 4}}) == plain  # without its adapters the model is the initial one
    assert kept(**reference, teachers={"reference": "ema"}) == plain | {"moving average": 90.0 * 4}
