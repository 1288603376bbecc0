import dataclasses
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slow_cases import slow

from opd.config import parse_settings
from opd.errors import DeviceMemoryError, NonFiniteError
from opd.wire.types import PayloadKind
from student.data.needs import TEACHER, teacher_role
from student.job.plugins import build_plugins
from student.settings.recipe import Recipe

PAYLOADS = ["sampled", "gather", "topk", "hidden"]
AGGREGATIONS = ["token_mean", "sequence_mean", "constant"]


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Relative L2 distance of two gradients."""
    top = sum(float((a[name] - b[name]).square().sum()) for name in a)
    return (top / sum(float(value.square().sum()) for value in a.values())) ** 0.5


@pytest.mark.parametrize(
    ("payload", "aggregation"),
    [
        *zip(PAYLOADS, cycle(AGGREGATIONS)),
        *slow(*((one, a) for i, one in enumerate(PAYLOADS) for a in AGGREGATIONS if a != AGGREGATIONS[i % 3])),
    ],
)
def test_a_gradient_does_not_depend_on_micro_batches(bench: Callable[..., Any], payload: str, aggregation: str) -> None:
    term = {"name": "opd", "payload": payload, "aggregation": aggregation} | ({"k": 8} if payload != "sampled" else {})
    one = bench(term, micro_batch_tokens=100_000)
    rows = one.rows()
    whole = one.gradient(rows)
    many = bench(term, micro_batch_tokens=1)
    assert distance(whole, many.gradient(rows)) < 1e-5


def test_a_row_beyond_the_turn_of_a_longrope_changes_no_gradient_of_another(
    bench: Callable[..., Any], longrope: Path
) -> None:
    rows = bench().rows()
    assert min(row.longest for row in rows) <= 16 < max(row.longest for row in rows)
    whole, many = (bench(student=longrope, micro_batch_tokens=tokens).gradient(rows) for tokens in (100_000, 1))
    assert distance(whole, many) < 1e-5


@pytest.mark.parametrize("payload", ["sampled", "gather", "topk"])
def test_a_gradient_does_not_depend_on_the_tiles_of_the_logits(bench: Callable[..., Any], payload: str) -> None:
    term = {"name": "opd", "payload": payload} | ({"k": 8} if payload != "sampled" else {})
    one = bench(term)
    rows = one.rows()
    many = bench(term)
    # A tile of 4 KiB holds four positions of this vocabulary.
    many.learner.projection = dataclasses.replace(many.learner.projection, scratch_bytes=4096)
    assert distance(one.gradient(rows), many.gradient(rows)) < 1e-5


def test_gradients_of_segments_add_up_to_the_whole(bench: Callable[..., Any]) -> None:
    made = bench({"name": "opd", "k": 8, "aggregation": "constant"})
    rows = made.rows()
    whole = made.gradient(rows)
    parts = [
        made.gradient(rows, select=lambda m, a=a, b=b: (m.position >= a) & (m.position < b))
        for a, b in [(0, 2), (2, 5), (5, 99)]
    ]
    total = {name: sum(part[name] for part in parts) for name in whole}
    assert distance(whole, total) < 1e-5


def test_truncating_responses_keeps_the_gradients_of_the_kept_tokens_under_constant_aggregation(
    bench: Callable[..., Any],
) -> None:
    made = bench({"name": "opd", "k": 8, "aggregation": "constant"})
    rows = made.rows()
    prefix = made.gradient(rows, select=lambda m: m.position < 3)
    for row in rows:
        row.loss_mask = np.arange(row.length) < 3
    assert distance(prefix, made.gradient(rows)) < 1e-5


@pytest.mark.parametrize("payload", ["gather", "topk", "hidden"])
def test_a_student_that_equals_its_teacher_has_zero_loss_and_gradient(bench: Callable[..., Any], payload: str) -> None:
    made = bench({"name": "opd", "payload": payload, "k": 260}, teacher="student")
    rows = made.rows()
    gradient = made.gradient(rows)
    # The hidden payload is bf16 and top-k values are f16 on their way, so equal means equal to their rounding.
    assert max(float(value.abs().max()) for value in gradient.values()) < 2e-3
    reference = bench({"name": "opd", "payload": payload, "k": 260}, teacher="teacher")
    scale = max(float(v.abs().max()) for v in reference.gradient(reference.rows()).values())
    assert scale > 0.05


def test_an_update_learns_without_dropout_whatever_mode_the_model_was_left_in(bench: Callable[..., Any]) -> None:
    made = bench({"name": "opd", "payload": "hidden"}, teacher="student")
    rows = made.rows()
    for layer in made.learner.student.lm.model.layers:
        layer.self_attn.attention_dropout = 0.5
    made.learner.student.lm.train()
    assert abs(made.step(rows, 0)["reverse_kl"]) < 1e-4


@pytest.mark.parametrize("payload", PAYLOADS)
def test_masked_tokens_have_no_gradient_whatever_their_signal_holds(bench: Callable[..., Any], payload: str) -> None:
    made = bench({"name": "opd", "payload": payload, "k": 8})
    rows = made.rows()
    for row in rows:
        row.loss_mask = np.arange(row.length) % 2 == 0
    clean = made.gradient(rows)
    kind = PayloadKind(payload)
    for row in rows:
        scores = row.signals["teacher", kind]
        spoiled: dict[str, Any] = {}
        for field in ("sampled", "values", "log_tail"):
            value = getattr(scores, field)
            if value is not None:
                value = value.copy()
                value[~row.loss_mask] = np.nan
                spoiled[field] = value
        row.signals["teacher", kind] = dataclasses.replace(scores, **spoiled)
    assert distance(clean, made.gradient(rows)) == 0.0


def test_the_gradient_depends_on_the_teacher(bench: Callable[..., Any]) -> None:
    made = bench()
    rows = made.rows()
    before = made.gradient(rows)
    for row in rows:
        scores = row.signals["teacher", PayloadKind.GATHER]
        assert scores.values is not None
        row.signals["teacher", PayloadKind.GATHER] = dataclasses.replace(scores, values=scores.values[:, ::-1].copy())
    assert distance(before, made.gradient(rows)) > 0.1


def test_a_non_finite_gradient_is_an_error_and_leaves_the_weights(bench: Callable[..., Any]) -> None:
    made = bench({"name": "opd", "payload": "sampled"})
    rows = made.rows()
    scores = rows[0].signals["teacher", PayloadKind.SAMPLED]
    rows[0].signals["teacher", PayloadKind.SAMPLED] = dataclasses.replace(
        scores, sampled=np.full(rows[0].length, np.inf, np.float32)
    )
    before = {name: p.detach().clone() for name, p in made.learner.named_parameters()}
    with pytest.raises((NonFiniteError, ValueError)):
        made.step(rows, 0)
    assert all(torch.equal(before[name], p) for name, p in made.learner.named_parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_state_moved_to_a_fresh_learner_continues_bit_for_bit(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    if fused:  # as on CUDA
        monkeypatch.setattr(
            "student.learning.learner.make_optimizer",
            lambda groups, settings, device: torch.optim.AdamW(groups, fused=True),
        )
    first = bench()
    rows = first.rows()
    first.step(rows, 0)
    second = bench()
    second.learner.student.load_state_dict(first.learner.student.state_dict())
    second.learner.load_state_dict(first.learner.state_dict())
    for made in (first, second):
        made.step(rows, 1)
    other = dict(second.learner.named_parameters())
    assert all(torch.equal(p, other[name]) for name, p in first.learner.named_parameters())
    assert second.learner.updates == 2


def test_steps_on_the_same_rows_bring_the_student_closer_to_the_teacher(bench: Callable[..., Any]) -> None:
    made = bench({"name": "opd", "payload": "topk", "k": 260, "divergence": "forward_kl"})
    rows = made.rows()
    losses = [made.step(rows, step)["forward_kl"] for step in range(8)]
    assert losses[-1] < 0.8 * losses[0]


def test_the_overlap_of_supports_is_one_for_equal_models_and_less_for_others(bench: Callable[..., Any]) -> None:
    term = {"name": "opd", "payload": "topk", "k": 16}
    overlaps = {}
    for teacher in ("student", "teacher"):
        made = bench(term, teacher=teacher)
        overlaps[teacher] = made.step(made.rows(), 0)["topk_overlap"]
    assert overlaps["student"] > 0.999
    assert 0.05 < overlaps["teacher"] < 0.9


@pytest.mark.parametrize("teachers", [1, 3])
def test_the_head_is_gathered_once_per_micro_batch_also_for_several_teachers(
    bench: Callable[..., Any], teachers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench({"name": "opd", "payload": "topk", "k": 8, "divergence": "forward_kl"}, micro_batch_tokens=64)
    rows = made.rows()
    if teachers > 1:
        shares = tuple((f"t{i}", 1 / teachers) for i in range(teachers))
        for row in rows:
            row.teachers = shares
            signal = row.signals.pop((TEACHER, PayloadKind.TOPK))
            row.signals |= {(teacher_role(name), PayloadKind.TOPK): signal for name, _ in shares}
    micro_batches, heads = [], []
    run, head = made.learner.wrapped.forward, made.learner.student.head
    monkeypatch.setattr(made.learner.wrapped, "forward", lambda *args: (micro_batches.append(1), run(*args))[1])
    monkeypatch.setattr(made.learner.student, "head", lambda: (heads.append(1), head())[1])
    made.learner.accumulate(rows)
    assert len(heads) == len(micro_batches) > 1


def test_a_step_without_trained_tokens_reports_no_divergence_instead_of_zero(bench: Callable[..., Any]) -> None:
    made = bench({"name": "opd", "k": 8})
    rows = made.rows()
    for row in rows:
        row.loss_mask[:] = False
    metrics = made.step(rows, 0)
    assert "reverse_kl" not in metrics and metrics["loss/opd"] == 0 == metrics["grad_norm"]


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_neither_an_infinite_loss_nor_an_infinite_gradient_changes_a_weight(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    made = bench({"name": "opd", "k": 8})
    original = type(made.objective.terms[0]).token_losses

    def spoiled(term: Any, batch: Any) -> Any:
        output = original(term, batch)
        loss = output.loss + float("inf") if where == "loss" else output.loss * float("inf")
        return dataclasses.replace(output, loss=loss)

    monkeypatch.setattr(type(made.objective.terms[0]), "token_losses", spoiled)
    before = {name: p.clone() for name, p in made.learner.named_parameters()}
    with pytest.raises(NonFiniteError, match="step 0 is not finite"):
        made.step(made.rows(), 0)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in made.learner.named_parameters())


def test_a_micro_batch_without_room_on_the_device_changes_nothing_and_names_its_setting(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench(micro_batch_tokens=1)
    rows, calls = made.rows(), []

    def full(*_: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:  # when the first micro-batch has left its gradient
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore")
        return original(*_)

    original = made.learner._pass
    monkeypatch.setattr(made.learner, "_pass", full)
    before = {name: p.clone() for name, p in made.learner.named_parameters()}
    with pytest.raises(DeviceMemoryError, match=r"\(CUDA out .* 2.00 GiB\); .*train.micro_batch_tokens.* 1\."):
        made.step(rows, 0)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in made.learner.named_parameters())


@pytest.mark.parametrize(
    ("dtype", "lora", "said"), [("bfloat16", None, 1), ("bfloat16", {"rank": 2}, 0), ("float32", None, 0)]
)
def test_trained_weights_that_lose_updates_to_rounding_are_remarked_on(dtype: str, lora: Any, said: int) -> None:
    data = {
        "run": "r",
        "model": {"path": "m", "dtype": dtype, "lora": lora},
        "prompts": {"task": "addition"},
        "objective": [{"name": "sft", "rows": "all"}],
        "train": {"learning_rate": 1e-6},
    }
    remarks = [
        one for one in build_plugins(parse_settings(Recipe, data)).remarks if "rounds the trained weights" in one
    ]
    assert len(remarks) == said and all("train.learning_rate 1e-06" in one for one in remarks)
