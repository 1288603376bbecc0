"""The algebra of G-OPD, in float64, against gradients derived by hand."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from opd.errors import ConfigError
from opd.wire.types import PayloadKind
from student.data.needs import REFERENCE, TEACHER
from student.methods.jumps.extrapolation import Extrapolation, Guards, flip_limit
from student.plugin.terms import build_terms

PAYLOADS = ["sampled", "gather", "hidden"]


def gradient(made: Any, **settings: Any) -> Tensor:
    hidden, _ = made.gradient(build_terms([{"name": "gopd", **settings}]))
    return hidden


def weights(made: Any) -> Tensor:
    mask = made.batch().mask
    return mask.double() / mask.sum()


def log_target(made: Any, scale: float) -> Tensor:
    teacher, reference = (made.logp(*made.models[role]) for role in (TEACHER, REFERENCE))
    return scale * teacher + (1 - scale) * reference


def exact_gradient(made: Any, scale: float) -> Tensor:
    """Of KL(S || T^scale R^(1 - scale)) with respect to the hidden states: sum_v p_v (r_v - E[r]) W_v."""
    logp = made.logp(made.hidden.detach(), made.head.detach())
    ratio = logp - log_target(made, scale)
    centred = ratio - (logp.exp() * ratio).sum(-1, keepdim=True)
    return weights(made)[:, None] * ((logp.exp() * centred) @ made.head.detach())


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 1.25])
def test_the_exact_gradient_is_the_one_derived_by_hand(toy: Any, scale: float) -> None:
    made = toy()
    actual = gradient(made, payload="hidden", reward_scale=scale)
    torch.testing.assert_close(actual, exact_gradient(made, scale), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 1.25])
def test_the_sampled_gradient_is_the_papers_advantage_times_the_score(toy: Any, scale: float) -> None:
    made = toy()
    actual = gradient(made, payload="sampled", reward_scale=scale)
    logp, y = made.logp(made.hidden.detach(), made.head.detach()), made.token_ids[:, None]
    advantage = -(logp - log_target(made, scale)).gather(1, y)
    score = made.head.detach()[made.token_ids] - logp.exp() @ made.head.detach()
    torch.testing.assert_close(actual, -weights(made)[:, None] * advantage * score, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("scale", [0.5, 1.25])
@pytest.mark.parametrize("payload", ["sampled", "gather"])
def test_estimates_have_the_exact_gradient_in_expectation(toy: Any, payload: str, scale: float) -> None:
    made = toy()
    logp = made.logp(made.hidden, made.head)
    total = torch.zeros_like(made.hidden)
    for token in range(made.vocab):
        made.token_ids = torch.full_like(made.token_ids, token)
        total += logp[:, token, None].exp() * gradient(made, payload=payload, reward_scale=scale)
    torch.testing.assert_close(total, exact_gradient(made, scale), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_lambda_one_is_distillation_whatever_the_reference(toy: Any, payload: str) -> None:
    made, other = toy(), toy()
    other.models[REFERENCE] = toy(seed=5).models[REFERENCE]
    plain, _ = made.gradient(build_terms([{"name": "opd", "payload": payload}]))
    # d0 has lambda 1 through a domain of its own, so that the reference is asked for and must not matter.
    domains = {"payload": payload, "reward_scale": 2.0, "domain_reward_scale": {"d0": 1.0}}
    first = torch.tensor([row.prompt.domain == "d0" for row in made.rows])[made.row]
    for bench in (made, other):
        mixed = gradient(bench, **domains)
        torch.testing.assert_close(mixed[first], plain[first], rtol=1e-5, atol=1e-8)
    assert not torch.allclose(gradient(made, **domains)[~first], gradient(other, **domains)[~first])
    torch.testing.assert_close(gradient(made, payload=payload), plain, rtol=1e-6, atol=1e-9)


def test_lambda_one_needs_no_reference() -> None:
    def roles(**settings: Any) -> set[str]:
        return {need.role for need in build_terms([{"name": "gopd", **settings}])[0].needs().signals}

    assert roles() == {TEACHER}
    for scaled in ({"reward_scale": 1.25}, {"final_reward_scale": 0.0}, {"domain_reward_scale": {"code": 0.5}}):
        assert roles(**scaled) == {TEACHER, REFERENCE}


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_teacher_that_is_the_reference_makes_lambda_irrelevant(toy: Any, payload: str) -> None:
    made = toy()
    made.models[REFERENCE] = made.models[TEACHER]
    torch.testing.assert_close(
        gradient(made, payload=payload, reward_scale=0.0),
        gradient(made, payload=payload, reward_scale=3.0),
        rtol=1e-5,
        atol=1e-8,
    )


@pytest.mark.parametrize("payload", ["sampled", "hidden"])
def test_gradients_are_linear_in_lambda(toy: Any, payload: str) -> None:
    made = toy()
    at = [gradient(made, payload=payload, reward_scale=scale) for scale in (0.0, 1.0, 2.0)]
    torch.testing.assert_close(at[2] - at[1], at[1] - at[0], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_lambda_zero_copies_the_reference(toy: Any, payload: str) -> None:
    made, swapped = toy(), toy()
    swapped.models[TEACHER] = swapped.models[REFERENCE]
    copied, _ = swapped.gradient(build_terms([{"name": "opd", "payload": payload}]))
    torch.testing.assert_close(gradient(made, payload=payload, reward_scale=0.0), copied, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_exopd_is_gopd_at_one_and_a_quarter(toy: Any, payload: str) -> None:
    made = toy()
    hidden, _ = made.gradient(build_terms([{"name": "exopd", "payload": payload}]))
    torch.testing.assert_close(hidden, gradient(made, payload=payload, reward_scale=1.25))


def test_a_full_candidate_set_makes_gather_exact(toy: Any) -> None:
    made = toy()
    made.candidates = torch.arange(made.vocab).expand(len(made.hidden), -1)
    actual = gradient(made, payload="gather", reward_scale=1.25)
    torch.testing.assert_close(actual, exact_gradient(made, 1.25), rtol=1e-5, atol=1e-8)


def test_lambda_moves_linearly_with_the_step_of_the_row(toy: Any) -> None:
    (term,) = build_terms([{"name": "gopd", "reward_scale": 1.0, "final_reward_scale": 1.5, "scale_steps": 10}])
    made = toy()
    seen = []
    for step in (0, 5, 10, 99):
        row = made.rows[0]
        row.key = type(row.key)(step, row.key.uid, 0)
        seen.append(term.reward_scale(row))
    assert seen == pytest.approx([1.0, 1.25, 1.5, 1.5])


def test_exact_targets_are_of_the_temperatures_that_are_named(toy: Any) -> None:
    """Student logits over 0.5, those of teacher and reference over 2."""
    made = toy(masked=False)
    (term,) = build_terms([{"name": "exopd", "payload": "hidden", "teacher_temperature": 2.0}])
    made.hidden = made.hidden.detach().requires_grad_()
    batch = dataclasses.replace(made.batch(), temperature=0.5)
    (actual,) = torch.autograd.grad(term.token_losses(batch).total, made.hidden)
    hidden = made.hidden.detach().requires_grad_()
    log_p = (hidden @ made.head.detach().T / 0.5).log_softmax(-1)
    teacher, reference = ((h @ w.T / 2.0).log_softmax(-1) for h, w in (made.models[TEACHER], made.models[REFERENCE]))
    target = (1.25 * teacher - 0.25 * reference).log_softmax(-1)
    (wanted,) = torch.autograd.grad((log_p.exp() * (log_p - target)).sum(), hidden)
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-7)


def test_the_divergence_that_is_shown_is_the_mean_over_the_rows_of_every_lambda(toy: Any) -> None:
    made = toy()
    scales = {"d0": 1.0, "d1": 1.5}
    (term,) = build_terms([{"name": "gopd", "payload": "hidden", "domain_reward_scale": scales}])
    top, count = term.token_losses(made.batch()).metrics["reverse_kl_to_target"]
    logp, batch = made.logp(made.hidden, made.head).detach(), made.batch()
    lambdas = batch.of_rows([scales[row.prompt.domain] for row in made.rows])
    targets = torch.stack([log_target(made, scale).log_softmax(-1) for scale in (1.0, 1.5)])
    target = torch.where((lambdas == 1.0)[:, None], *targets)
    wanted = (logp.exp() * (logp - target)).sum(-1)[batch.mask]
    assert float(count) == len(wanted) and float(top) == pytest.approx(float(wanted.sum()), rel=1e-5)


def test_lambdas_that_differ_by_less_than_float32_count_each_row_once(toy: Any) -> None:
    def total(near: float) -> Any:
        (term,) = build_terms([{"name": "gopd", "payload": "hidden", "domain_reward_scale": {"a": 1.3, "b": near}}])
        made = toy()
        for row, domain in zip(made.rows, "abab", strict=True):
            row.prompt = dataclasses.replace(row.prompt, domain=domain)
        return term.token_losses(made.batch()).total

    torch.testing.assert_close(total(1.3 + 1e-12), total(1.3), rtol=1e-6, atol=1e-9)


def logs(*values: float) -> Tensor:
    return torch.tensor([[math.log(value) for value in values]], dtype=torch.float64)


def test_the_flip_limit_of_a_worked_example() -> None:
    # a_T = ln 95 = 4.5539, a_R = ln 990000 = 13.8055: 13.8055 / (13.8055 - 4.5539) = 1.4922.
    assert float(flip_limit(logs(0.95, 0.01), logs(0.99, 1e-6))) == pytest.approx(1.4922, abs=1e-4)
    assert float(flip_limit(logs(0.95, 0.01), logs(0.9, 0.05))) == math.inf


@given(st.lists(st.floats(-8, 0), min_size=3, max_size=3), st.lists(st.floats(-8, 0), min_size=3, max_size=3))
def test_the_mode_flips_at_the_limit_and_not_before(teacher: list[float], reference: list[float]) -> None:
    ours, theirs = torch.tensor([teacher], dtype=torch.float64), torch.tensor([reference], dtype=torch.float64)
    ranked = ours.sort(descending=True).values[0]
    if ranked[0] - ranked[1] < 1e-3:
        return
    limit = float(flip_limit(ours, theirs))

    def mode(scale: float) -> int:
        return int((scale * ours + (1 - scale) * theirs).argmax())

    assert mode(1 + 0.999 * (min(limit, 50.0) - 1)) == int(ours.argmax())
    if limit < 50.0:
        assert mode(1 + 1.01 * (limit - 1) + 1e-6) != int(ours.argmax())


def test_guards_change_the_target_only_where_they_bite() -> None:
    teacher, reference = logs(0.5, 0.3, 0.2)[0], logs(0.1, 0.3, 0.6)[0]
    ids, scale = torch.tensor([4, 5, 6]), torch.full((3,), 2.0)

    def target(guards: Guards, plain: frozenset[int] = frozenset()) -> Tensor:
        return Extrapolation(guards, plain, scale).target(teacher, reference, ids)

    gap = teacher - reference
    torch.testing.assert_close(target(Guards()), teacher + gap)
    torch.testing.assert_close(target(Guards(gap_clip=1.2)), teacher + gap.clamp(-1.2, 1.2))
    assert not torch.allclose(target(Guards(gap_clip=1.2)), target(Guards()))
    torch.testing.assert_close(target(Guards(), frozenset({4})), teacher + torch.stack([0 * gap[0], gap[1], gap[2]]))


def test_a_capped_lambda_keeps_the_teachers_mode(toy: Any) -> None:
    made = toy(masked=False)
    teacher, reference = (made.logp(*made.models[role]).gather(1, made.candidates) for role in (TEACHER, REFERENCE))
    batch = made.batch()
    guarded = Extrapolation(Guards(flip_cap=0.99), frozenset(), torch.full((len(made.row),), 3.0))
    signals = [batch.signal(PayloadKind.GATHER, role) for role in (TEACHER, REFERENCE)]
    (values, _, _), metrics = guarded.payload(batch, *signals)
    free = 3.0 * teacher - 2.0 * reference
    assert (free.argmax(-1) != teacher.argmax(-1)).any()
    assert (values.argmax(-1) == teacher.argmax(-1)).all()
    assert float(metrics["reward_scale_capped"][0]) > 0


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"payload": "hidden", "guards": {"gap_clip": 1.0}}, "gather"),
        ({"payload": "sampled", "guards": {"flip_cap": 0.9}}, "candidates"),
        ({"domain_reward_scale": {"code": -1.0}}, "code"),
        ({"guards": {"plain_tokens": {}}}, "empty"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_a_reason(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        build_terms([{"name": "gopd", **settings}])
