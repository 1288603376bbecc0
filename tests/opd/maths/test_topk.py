import math

import pytest
import torch
from torch.testing import assert_close

from opd.maths import exact
from opd.maths.topk import topk_divergence

N, V = 5, 10
KINDS = [
    ("forward_kl", None),
    ("reverse_kl", None),
    ("jsd", 0.3),
    ("skew_forward_kl", 0.3),
    ("skew_reverse_kl", 0.3),
    ("total_variation", None),
]
# The generalised tail is defined for the first three.
FORMS = [(*case, "bucket") for case in KINDS] + [(*case, "generalised") for case in KINDS[:3]]


def support(make_logits, k, by="teacher", seed=0):
    student, teacher = make_logits(N, V, seed=seed), make_logits(N, V, seed=seed + 1)
    ids = (teacher if by == "teacher" else student).topk(k).indices
    log_q = teacher.log_softmax(-1)
    return student, teacher, ids, log_q.gather(1, ids), log_q.scatter(1, ids, -torch.inf).logsumexp(-1)


def full(kind, weight, student, teacher):
    name = {"jsd": "beta", "skew_forward_kl": "alpha", "skew_reverse_kl": "alpha"}.get(kind)
    return getattr(exact, kind)(student, teacher, **({name: weight} if name else {}))


@pytest.mark.parametrize(("kind", "weight", "tail"), FORMS)
def test_the_whole_vocabulary_as_support_gives_the_full_divergence(kind, weight, tail, make_logits):
    student, teacher, ids, values, log_tail = support(make_logits, V)
    leaf = student.clone().requires_grad_()
    got = topk_divergence(leaf, ids, values, log_tail, kind=kind, tail=tail, weight=weight)
    other = student.clone().requires_grad_()
    want = full(kind, weight, other, teacher)
    assert_close(got.per_token, want.per_token)
    got.total.backward()
    want.total.backward()
    assert_close(leaf.grad, other.grad)


@pytest.mark.parametrize("by", ["teacher", "student"])
@pytest.mark.parametrize(("kind", "weight"), KINDS)
def test_buckets_obey_the_data_processing_inequality_in_k(kind, weight, by, make_logits):
    previous = torch.zeros(N, dtype=torch.float64)
    for k in range(V + 1):
        student, teacher, ids, values, log_tail = support(make_logits, k, by)
        here = topk_divergence(student, ids, values, log_tail, kind=kind, weight=weight).per_token
        assert (here >= previous - 1e-12).all()
        previous = here
    assert (previous <= full(kind, weight, student, teacher).per_token + 1e-12).all()


def naive(kind, weight, tail, student, ids, values, log_tail):
    """The forms written in probabilities and differentiated by autograd."""
    p, q = student.softmax(-1).gather(1, ids), values.exp()
    if tail == "bucket":
        p, q = torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1), torch.cat([q, log_tail.exp()[:, None]], -1)

    def kl(a, b):
        return (a * (a / b).log() - a + b).sum(-1)

    m = None if weight is None else weight * q + (1 - weight) * p
    return {
        "forward_kl": lambda: kl(q, p),
        "reverse_kl": lambda: kl(p, q),
        "jsd": lambda: weight * kl(q, m) + (1 - weight) * kl(p, m),
        "skew_forward_kl": lambda: kl(q, m),
        "skew_reverse_kl": lambda: kl(p, weight * p + (1 - weight) * q),
        "total_variation": lambda: 0.5 * (p - q).abs().sum(-1),
    }[kind]()


@pytest.mark.parametrize("by", ["teacher", "student"])
@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize(("kind", "weight", "tail"), FORMS)
def test_value_and_gradient_agree_with_autograd_of_the_definition(kind, weight, tail, k, by, make_logits):
    student, _, ids, values, log_tail = support(make_logits, k, by, seed=3)
    leaf = student.clone().requires_grad_()
    got = topk_divergence(leaf, ids, values, log_tail, kind=kind, tail=tail, weight=weight, temperature=1.0)
    other = student.clone().requires_grad_()
    want = naive(kind, weight, tail, other, ids, values, log_tail)
    assert_close(got.per_token, want)
    (have,) = torch.autograd.grad(got.total, leaf)
    (true,) = torch.autograd.grad(want.sum(), other, materialize_grads=True)
    assert_close(have, true)
    assert (got.per_token >= -1e-12).all()


@pytest.mark.parametrize("tail", ["bucket", "generalised"])
@pytest.mark.parametrize(("kind", "weight"), KINDS[:3])
def test_equal_models_are_a_stationary_zero(kind, weight, tail, make_logits):
    student, _, ids, _, _ = support(make_logits, 3)
    log_p = student.log_softmax(-1)
    leaf = student.clone().requires_grad_()
    log_tail = log_p.scatter(1, ids, -torch.inf).logsumexp(-1)
    got = topk_divergence(leaf, ids, log_p.gather(1, ids), log_tail, kind=kind, tail=tail, weight=weight)
    (gradient,) = torch.autograd.grad(got.total, leaf)
    assert got.total.abs() < 1e-12
    assert gradient.abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
@pytest.mark.parametrize("height", [12.0, 20.0, 28.0])
def test_the_gradient_survives_a_student_whose_tail_is_almost_empty(kind, height):
    student = torch.tensor([[height, 0.0, 0.5, -1.0]])
    log_q = torch.tensor([[0.0, 0.3, 0.1, 0.2]], dtype=torch.float64).log_softmax(-1)
    ids, log_tail = torch.tensor([[0]]), log_q[:, 1:].logsumexp(-1)
    gradients = []
    for leaf in (student.clone().requires_grad_(), student.double().requires_grad_()):
        topk_divergence(leaf, ids, log_q[:, :1], log_tail, kind=kind).total.backward()
        gradients.append(leaf.grad.double())
    assert gradients[1].abs().max() > 0
    # The top entry's gradient is minus the sum of the others: a difference of numbers near one.
    assert_close(gradients[0][:, 1:], gradients[1][:, 1:], rtol=2e-5, atol=0)
    assert_close(gradients[0], gradients[1], rtol=0, atol=1e-6)


def test_temperature_applies_to_the_student_and_its_gradient(make_logits):
    student, teacher = make_logits(N, V, seed=8), make_logits(N, V, seed=9)
    log_q = (teacher / 2).log_softmax(-1)
    ids = teacher.topk(V).indices
    leaf, other = student.clone().requires_grad_(), student.clone().requires_grad_()
    no_tail = torch.full((N,), -torch.inf, dtype=torch.float64)
    topk_divergence(leaf, ids, log_q.gather(1, ids), no_tail, temperature=2.0).total.backward()
    exact.forward_kl(other, teacher, temperature=2.0).total.backward()
    assert_close(leaf.grad, other.grad)


def test_masked_positions_with_garbage_change_nothing(make_logits):
    student, _, ids, values, log_tail = support(make_logits, 3)
    mask = torch.tensor([True, False, True, True, False])
    want = topk_divergence(student[mask], ids[mask], values[mask], log_tail[mask])
    dirty = student.clone()
    dirty[~mask], values[~mask], log_tail[~mask], ids[~mask] = torch.nan, torch.nan, torch.nan, -1
    dirty.requires_grad_()
    got = topk_divergence(dirty, ids, values, log_tail, mask=mask)
    got.mean.backward()
    assert_close(got.mean, want.mean)
    assert (dirty.grad[~mask] == 0).all()
    assert dirty.grad.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "kl"}, "kind must be one of .* 'kl'"),
        ({"kind": "jsd"}, "needs a mixture weight"),
        ({"kind": "jsd", "weight": 1.0}, "beta must lie in"),
        ({"kind": "forward_kl", "weight": 0.5}, "takes no mixture weight"),
        ({"tail": "truncate"}, "tail must be one of .* 'truncate'"),
        ({"teacher_log_tail": None}, "tail 'bucket' needs teacher_log_tail"),
        ({"tail": "generalised", "kind": "total_variation"}, "'generalised' supports"),
        ({"teacher_log_probs": torch.tensor([[-1.0, 0.5]])}, r"teacher_log_probs .* 0.5 at \[0, 1\]"),
        ({"normalised": True}, "normalised applies to kind 'jsd'"),
        ({"temperature": math.inf}, "temperature .* inf"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    good = {
        "student": torch.zeros(1, 4),
        "candidate_ids": torch.tensor([[0, 1]]),
        "teacher_log_probs": torch.full((1, 2), -1.4),
        "teacher_log_tail": torch.tensor([-0.7]),
    }
    with pytest.raises(ValueError, match=words):
        topk_divergence(**(good | settings))
