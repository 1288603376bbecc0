"""The weighted sum of divergences to several teachers on one row."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from opd.errors import ConfigError
from opd.maths import score_tokens
from student.data.needs import TEACHER
from student.data.token_batch import TeacherShare
from student.job.plugins import build_plugins
from student.plugin.terms import build_terms
from student.settings.recipe import Recipe

OTHER = 11  # seed of the second teacher
WEIGHTS = (0.7, 0.3)
LOSSES: list[dict[str, Any]] = [
    {"name": "opd", "payload": "sampled"},
    {"name": "opd", "payload": "gather", "k": 3},
    {"name": "opd", "payload": "gather", "k": 3, "divergence": "forward_kl"},
    {"name": "opd", "payload": "topk", "k": 3},
    {"name": "opd", "payload": "topk", "k": 3, "divergence": "forward_kl"},
    {"name": "opd", "payload": "hidden"},
    {"name": "opd", "payload": "hidden", "divergence": "jsd", "mixture": 0.3},
    {"name": "opd", "payload": "gather", "k": 3, "discount": 0.5},
    {"name": "gopd", "payload": "gather", "k": 3, "reward_scale": 1.25},
    {"name": "vopd", "k": 3},
]
PARTIAL = {"name": "opd", "payload": "topk", "aggregation": "constant"}
IDS = [" ".join(str(value) for value in loss.values()) for loss in LOSSES]


def with_teacher(toy: Any, models: dict[str, Any]) -> Any:
    made = toy(lengths=(4, 1, 5, 3), masked=True)
    made.models[TEACHER] = models[TEACHER]
    return made


def summed(made: Any, parts: list[tuple[float, Any]]) -> Any:
    """`made` whose batches have the teachers of `parts` (weight, Toy) as shares instead of one teacher."""
    plain = made.batch

    def batch(indices: Any = None) -> Any:
        base = plain(indices)
        chosen = made.positions(range(len(made.rows)) if indices is None else indices)
        logits = made.hidden[chosen] @ made.head.T
        shares = []
        for weight, other in parts:
            ids = other.teacher_ids()[chosen]
            at_teacher = score_tokens(logits, candidate_ids=ids, sampled_ids=base.token_ids)
            student = dataclasses.replace(base.student, scores_at_teacher=at_teacher)
            shares.append(TeacherShare(weight, other.signals(chosen), student))
        others = {key: value for key, value in base.signals.items() if key[0] != TEACHER}
        return dataclasses.replace(base, signals=others, shares=tuple(shares))

    made.batch = batch
    return made


def teachers(toy: Any) -> list[Any]:
    return [with_teacher(toy, toy(lengths=(4, 1, 5, 3), seed=seed).models) for seed in (0, OTHER)]


@pytest.mark.parametrize("loss", LOSSES, ids=IDS)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_the_gradient_is_the_weighted_sum_of_each_teachers_gradient(
    toy: Any, loss: dict[str, Any], aggregation: str
) -> None:
    entry = {**loss, "aggregation": aggregation}
    one, two = teachers(toy)
    expected = [
        WEIGHTS[0] * a + WEIGHTS[1] * b
        for a, b in zip(one.gradient(build_terms([entry])), two.gradient(build_terms([entry])), strict=True)
    ]
    made = summed(toy(lengths=(4, 1, 5, 3)), [*zip(WEIGHTS, (one, two), strict=True)])
    found = made.gradient(build_terms([entry]))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float64 and theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("payload", ["sampled", "gather", "topk", "hidden"])
def test_the_gradient_is_that_of_the_sum_written_by_hand(toy: Any, payload: str) -> None:
    """By autograd on full logits in float64: for gather and topk forward KL with a tail bucket, else reverse KL."""
    one, two = teachers(toy)
    made = summed(toy(lengths=(4, 1, 5, 3)), [*zip(WEIGHTS, (one, two), strict=True)])
    divergence = {"gather": "forward_kl", "topk": "forward_kl"}.get(payload, "reverse_kl")
    entry = {"name": "opd", "payload": payload, "divergence": divergence}
    found, _ = made.gradient(build_terms([entry | ({"k": 3} if payload in ("gather", "topk") else {})]))
    hidden = made.hidden.detach().clone().requires_grad_()
    log_p = made.logp(hidden, made.head.detach())
    mask = torch.cat([torch.from_numpy(row.loss_mask) for row in made.rows])
    total = torch.zeros(len(mask), dtype=torch.float64)
    for weight, teacher in zip(WEIGHTS, (one, two), strict=True):
        log_q = made.logp(*teacher.models[TEACHER])
        total = total + weight * _by_hand(payload, log_p, log_q, made.token_ids, made.candidates)
    (total * mask).sum().div(mask.sum()).backward()
    torch.testing.assert_close(found, hidden.grad, rtol=1e-5, atol=1e-8)


def _by_hand(payload: str, log_p: Tensor, log_q: Tensor, token_ids: Tensor, candidates: Tensor) -> Tensor:
    if payload == "hidden":
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    if payload == "sampled":
        ours, theirs = (each.gather(1, token_ids[:, None])[:, 0] for each in (log_p, log_q))
        return (ours - theirs).detach() * ours
    ids = candidates if payload == "gather" else log_q.topk(3, dim=-1).indices

    def bucketed(logp: Tensor) -> Tensor:
        tail = logp.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
        return torch.cat([logp.gather(1, ids), tail], 1)

    p, q = bucketed(log_p), bucketed(log_q)
    return (q.exp() * (q - p)).sum(-1)


@pytest.mark.parametrize("loss", LOSSES, ids=IDS)
def test_one_teacher_of_weight_one_is_the_plain_path_bit_for_bit(toy: Any, loss: dict[str, Any]) -> None:
    plain = toy(lengths=(4, 1, 5, 3))
    expected = plain.gradient(build_terms([loss]))
    found = summed(toy(lengths=(4, 1, 5, 3)), [(1.0, toy(lengths=(4, 1, 5, 3)))]).gradient(build_terms([loss]))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_term_without_a_teacher_is_counted_once(toy: Any) -> None:
    terms = [{"name": "reference_kl", "payload": "sampled"}]
    expected = toy(lengths=(4, 1, 5, 3)).gradient(build_terms(terms))
    one, two = teachers(toy)
    made = summed(toy(lengths=(4, 1, 5, 3)), [*zip(WEIGHTS, (one, two), strict=True)])
    for ours, theirs in zip(made.gradient(build_terms(terms)), expected, strict=True):
        assert torch.equal(ours, theirs)


BRIDGE = {"name": "future_bridge", "teacher": {"endpoint": "http://h:1/v1", "model": "m"}}


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ({"objective": [{"name": "tip"}]}, "tip"),
        ({"objective": [{"name": "tropd"}]}, "tropd"),
        ({"objective": [PARTIAL], "methods": [{"name": "prune_opd"}]}, "prune_opd"),
        ({"objective": [{"name": "opd", "payload": "hidden"}], "rollout": {"strategy": BRIDGE}}, "future_bridge"),
    ],
)
def test_what_knows_only_one_teacher_per_row_is_refused(part: dict[str, Any], name: str) -> None:
    data = {
        "run": "run",
        "model": {"path": "student"},
        "prompts": {"task": "addition"},
        "teachers": {"endpoints": ["h:1"], "default": {"a": 1, "b": 1}, "combine": "divergence"},
        **part,
    }
    with pytest.raises(ConfigError, match=f"{name} .*several teachers .* probability"):
        build_plugins(Recipe.model_validate(data))
    data["teachers"] = {**data["teachers"], "default": "a"}
    build_plugins(Recipe.model_validate(data))
