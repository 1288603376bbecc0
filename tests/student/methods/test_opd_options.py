"""Return-to-go, temperatures and given rows of on-policy distillation."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from slow_cases import slow
from torch import Tensor

from opd.config import parse_settings
from opd.errors import ConfigError
from student.data.needs import SCORES, TEACHER
from student.job.plugins import build_plugins
from student.methods.distil.return_to_go import future_sum
from student.plugin.terms import build_terms
from student.settings.recipe import Recipe


def gradient(made: Any, **settings: Any) -> Tensor:
    hidden, _ = made.gradient(build_terms([{"name": "opd", **settings}]))
    return hidden


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 99))
def test_a_future_sum_adds_later_positions_of_the_same_row(lengths: list[int], discount: float, seed: int) -> None:
    values = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    expected = [
        sum(discount ** (j - i) * float(values[j]) for j in range(i + 1, len(values)) if row[j] == row[i])
        for i in range(len(values))
    ]
    torch.testing.assert_close(future_sum(values, row, discount), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("payload", ["sampled", "gather", *slow("hidden")])
def test_discount_one_has_the_gradient_of_the_sequence_divergence_in_expectation(toy: Any, payload: str) -> None:
    """By enumeration over all responses of two tokens of a model whose second token ignores the first.

    Then the sequence KL is the sum of the two token KLs and the return-to-go must vanish in expectation, while each
    response's gradient changes.
    """
    made = toy(lengths=(2,), group=1, masked=False)
    expected = gradient(made, payload="hidden", aggregation="constant")
    p = made.logp(made.hidden.detach(), made.head.detach()).exp()
    total, changed = torch.zeros_like(expected), False
    for first, second in itertools.product(range(made.vocab), repeat=2):
        made.token_ids = torch.tensor([first, second])
        found = gradient(made, payload=payload, discount=1.0, aggregation="constant")
        total += p[0, first] * p[1, second] * found
        changed |= not torch.allclose(found, gradient(made, payload=payload, aggregation="constant"))
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-7)
    assert changed


def test_return_to_go_holds_a_token_responsible_for_what_follows(toy: Any) -> None:
    made = toy(lengths=(3,), group=1, masked=False)
    plain, discounted = (gradient(made, payload="sampled", discount=d, aggregation="constant") for d in (0.0, 0.5))
    logp = made.logp(made.hidden.detach(), made.head.detach())
    ratio = (logp - made.logp(*made.models[TEACHER])).gather(1, made.token_ids[:, None])[:, 0]
    future = torch.stack([0.5 * ratio[1] + 0.25 * ratio[2], 0.5 * ratio[2], torch.zeros_like(ratio[0])])
    score = made.head.detach()[made.token_ids] - logp.exp() @ made.head.detach()
    torch.testing.assert_close(discounted - plain, future[:, None] * score / 8, rtol=1e-5, atol=1e-8)
    mean = gradient(made, payload="sampled", discount=0.5, aggregation="constant", length_normalised=True)
    later = torch.tensor([2.0, 1.0, 1.0])  # tokens, at least one
    torch.testing.assert_close(mean - plain, (future / later)[:, None] * score / 8, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("payload", "asked"), [("hidden", {"hidden", "sampled"}), ("gather", {"gather"})])
def test_a_discount_asks_for_log_probs_of_sampled_tokens_where_the_payload_has_none(
    payload: str, asked: set[str]
) -> None:
    (term,) = build_terms([{"name": "opd", "payload": payload, "discount": 0.5, "teacher_temperature": 0.7}])
    needs = term.needs()
    assert {need.spec.kind.value for need in needs.signals} == asked
    assert {need.temperature for need in needs.signals} == {0.7} and SCORES in needs.student


def test_a_return_to_go_counts_what_follows_a_trained_prefix(toy: Any) -> None:
    whole, prefix = toy(lengths=(4,), group=1, masked=False), toy(lengths=(4,), group=1, masked=False)
    expected = gradient(whole, payload="sampled", discount=1.0, aggregation="constant")
    term = build_terms([{"name": "opd", "payload": "sampled", "discount": 1.0}])[0]
    prefix.hidden.requires_grad_()
    batch = prefix.batch()
    narrowed = dataclasses.replace(batch, mask=batch.position < 2)
    (term.token_losses(narrowed).loss.sum() / 8).backward()
    torch.testing.assert_close(prefix.hidden.grad[:2], expected[:2], rtol=1e-5, atol=1e-8)
    assert (prefix.hidden.grad[2:] == 0).all()


def test_the_students_temperature_divides_its_logits(toy: Any) -> None:
    made = toy(masked=False)
    actual = gradient(made, payload="hidden", student_temperature=2.0, teacher_temperature=0.5, divergence="forward_kl")
    hidden = made.hidden.detach().clone().requires_grad_()
    teacher = made.models[TEACHER]
    log_q = (teacher[0] @ teacher[1].T / 0.5).log_softmax(-1)
    log_p = (hidden @ made.head.detach().T / 2.0).log_softmax(-1)
    (log_q.exp() * (log_q - log_p)).sum(-1).mean().backward()
    torch.testing.assert_close(actual, hidden.grad, rtol=1e-5, atol=1e-8)


def test_exact_distillation_shows_overlap_and_masses_of_the_top_k_when_asked(toy: Any) -> None:
    made = toy(masked=False)
    (watched, silent) = (
        build_terms([{"name": "opd", "payload": "hidden", "watch_topk": k}])[0].token_losses(made.batch()).metrics
        for k in (3, None)
    )
    log_p, log_q = made.logp(made.hidden, made.head), made.logp(*made.models[TEACHER])
    ours, theirs = log_p.topk(3).indices, log_q.topk(3).indices
    wanted = {
        "topk_overlap": (ours[:, :, None] == theirs[:, None]).any(-1).double().mean(),
        "student_head_mass": log_p.gather(1, ours).exp().sum(-1).mean(),
        "teacher_mass_on_teacher_topk": log_q.gather(1, theirs).exp().sum(-1).mean(),
    }
    for name, value in wanted.items():
        top, count = watched[name]
        assert float(top) / float(count) == pytest.approx(float(value), rel=1e-5)
        assert name not in silent


@pytest.mark.parametrize(
    "term",
    [
        *({"name": "opd", "payload": payload} for payload in ("gather", "topk", "hidden")),
        *({"name": "exopd", "payload": payload} for payload in ("gather", "hidden")),
        {"name": "reference_kl", "payload": "gather", "rows": "all"},
    ],
    ids=lambda term: f"{term['name']}-{term['payload']}",
)
def test_on_given_rows_nothing_depends_on_the_given_token(toy: Any, term: dict[str, Any]) -> None:
    """Of the estimate at one position: the tail must not be sampled by a token that the student did not draw."""
    found = []
    for token in (0, 3, 6):
        made = toy(lengths=(1,), group=1, origins=["expert"], masked=False)
        made.token_ids = torch.tensor([token])
        found.append(made.gradient(build_terms([term]))[0])
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])


def test_on_given_rows_the_tail_has_the_mean_log_ratio_that_the_masses_suggest(toy: Any) -> None:
    made = toy(lengths=(1,), group=1, origins=["expert"], masked=False)
    made.candidates = made.candidates[:, :3]
    logits = (made.hidden @ made.head.T).detach().requires_grad_()
    log_p = logits.log_softmax(-1)
    log_q = made.logp(*made.models[TEACHER]).detach()
    tail = torch.ones_like(log_p, dtype=torch.bool).scatter(1, made.candidates, False)
    (head_p, tail_p), (head_q, tail_q) = (
        (x.gather(1, made.candidates), x.masked_fill(~tail, -torch.inf).logsumexp(-1)) for x in (log_p, log_q)
    )
    ours, theirs = head_p.log_softmax(-1), head_q.log_softmax(-1)
    mean = tail_p - tail_q + (ours.exp() * (ours - theirs)).sum(-1)
    head = ((head_p.exp() * (head_p - head_q)).detach() * head_p).sum(-1)
    (want,) = torch.autograd.grad((head + (tail_p.exp() * mean).detach() * tail_p).sum(), logits)
    found = gradient(made, payload="gather", k=3)
    torch.testing.assert_close(found, want @ made.head.detach(), rtol=1e-5, atol=1e-8)


def test_on_given_rows_a_full_candidate_set_is_exact(toy: Any) -> None:
    made = toy(origins=["expert"] * 4)
    exact = gradient(made, payload="hidden")
    made.candidates = torch.arange(made.vocab).expand(len(made.hidden), -1)
    torch.testing.assert_close(gradient(made, payload="gather"), exact, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ["opd", "gopd"])
def test_the_sampled_payload_refuses_given_rows_unless_they_are_left_out(toy: Any, name: str) -> None:
    made = toy(origins=["policy", "policy", "expert", "expert"])
    with pytest.raises(ConfigError, match="rows to sampled"):
        made.gradient(build_terms([{"name": name, "payload": "sampled"}]))
    hidden, _ = made.gradient(build_terms([{"name": name, "payload": "sampled", "rows": "sampled"}]))
    assert (hidden[made.row >= 2] == 0).all() and (hidden[made.row < 2] != 0).any()


def test_terms_average_over_the_rows_they_select(toy: Any) -> None:
    """GKD's objective is the sum of the two means, whatever the number of rows on either side."""
    made = toy(origins=["policy", "expert", "expert", "expert"], masked=False)
    both = [{"name": "opd", "rows": "sampled"}, {"name": "sft", "weight": 0.3}]
    hidden, _ = made.gradient(build_terms(both))
    alone = toy(lengths=(4,), group=1, masked=False)
    alone.hidden, alone.head, alone.token_ids = made.hidden[:4], made.head, made.token_ids[:4]
    alone.models = {role: (h[:4], w) for role, (h, w) in made.models.items()}
    alone.candidates, alone.behaviour = made.candidates[:4], made.behaviour[:4]
    torch.testing.assert_close(hidden[:4], gradient(alone))
    logp = made.logp(made.hidden.detach(), made.head.detach())
    score = made.head.detach()[made.token_ids] - logp.exp() @ made.head.detach()
    torch.testing.assert_close(hidden[4:], -0.3 * score[4:] / 9)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"payload": "gather", "student_temperature": 0.7}, "hidden"),
        ({"payload": "gather", "watch_topk": 3}, "hidden"),
        ({"payload": "topk", "divergence": "forward_kl", "discount": 0.5}, "reverse_kl"),
        ({"payload": "gather", "discount": 0.5, "importance_cap": 2.0}, "importance_cap"),
    ],
)
def test_options_that_cannot_work_are_refused_with_a_reason(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        build_terms([{"name": "opd", **settings}])


@pytest.mark.parametrize("term", [{"name": "opd", "payload": "sampled"}, {"name": "compressed", "rows": "all"}])
@pytest.mark.parametrize(
    ("giving", "words"),
    [
        ({"methods": [{"name": "expert_rows", "share": 0.5}]}, "but method expert_rows adds others"),
        ({"rollout": {"strategy": {"name": "critique"}}}, "but rollout.strategy critique adds others"),
    ],
)
def test_an_estimate_from_the_sampled_token_is_refused_where_rows_are_given(
    term: dict[str, Any], giving: dict[str, Any], words: str
) -> None:
    data = {"run": "run", "model": {"path": "m"}, "prompts": {"task": "addition"}, "objective": [term]}
    data |= {"teachers": {"default": "initial"}, **giving}
    with pytest.raises(ConfigError, match=f"{words}; .*rows to sampled"):
        build_plugins(parse_settings(Recipe, data))
