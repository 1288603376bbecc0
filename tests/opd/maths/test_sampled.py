import pytest
import torch
from torch.testing import assert_close

from opd.maths.exact import forward_kl, reverse_kl
from opd.maths.sampled import sampled_reverse_kl
from opd.maths.scores import score_tokens

N, V = 5, 8


@pytest.fixture
def student(make_logits):
    return make_logits(N, V, seed=1)


@pytest.fixture
def teacher(make_logits):
    return make_logits(N, V, seed=2)


def gradient_of(divergence, student, teacher):
    leaf = student.clone().requires_grad_()
    return torch.autograd.grad(divergence(leaf, teacher).total, leaf)[0]


def expectation(expected_gradient, student, teacher, **settings):
    log_q = teacher.log_softmax(-1)

    def estimate(logits, y):
        return sampled_reverse_kl(logits, y, log_q.gather(1, y[:, None]).squeeze(1), **settings).per_token

    return expected_gradient(estimate, student)


@pytest.mark.parametrize("form", ["policy_gradient", "k2"])
def test_policy_gradient_and_k2_have_the_gradient_of_the_reverse_kl(form, student, teacher, expected_gradient):
    got = expectation(expected_gradient, student, teacher, form=form)
    assert_close(got, gradient_of(reverse_kl, student, teacher), rtol=1e-9, atol=1e-12)


def test_a_control_variate_leaves_the_expectation_and_lowers_the_variance(teacher, student, expected_gradient):
    kl = reverse_kl(student, teacher).per_token
    got = expectation(expected_gradient, student, teacher, control_variate=kl)
    assert_close(got, gradient_of(reverse_kl, student, teacher), rtol=1e-9, atol=1e-12)
    # The gradient at y is (r - b) (e_y - p), and the reported estimate of the KL stays r.
    p, r = student.softmax(-1), student.log_softmax(-1) - teacher.log_softmax(-1)
    for token in range(V):
        leaf, y = student.clone().requires_grad_(), torch.full((N,), token)
        result = sampled_reverse_kl(leaf, y, teacher.log_softmax(-1)[:, token], control_variate=kl)
        assert_close(result.per_token, r[:, token])
        (gradient,) = torch.autograd.grad(result.total, leaf)
        assert_close(gradient, (r[:, token] - kl)[:, None] * (torch.eye(V, dtype=torch.float64)[token] - p))
    # |e_y - p|^2, the squared length of the score at y.
    length = 1 - 2 * p + p.square().sum(-1, keepdim=True)
    assert (p * (r - kl[:, None]).square() * length).sum() < (p * r.square() * length).sum()


def test_k1_backpropagated_has_zero_expected_gradient(student, teacher, expected_gradient):
    got = expectation(expected_gradient, student, teacher, form="k1_loss", acknowledge_bias=True)
    assert got.abs().max() < 1e-12
    assert gradient_of(reverse_kl, student, teacher).abs().max() > 1e-2


def test_k3_backpropagated_has_the_gradient_of_the_forward_kl(student, teacher, expected_gradient):
    got = expectation(expected_gradient, student, teacher, form="k3_loss", acknowledge_bias=True)
    assert_close(got, gradient_of(forward_kl, student, teacher), rtol=1e-9, atol=1e-12)
    assert (got - gradient_of(reverse_kl, student, teacher)).abs().max() > 1e-2


@pytest.mark.parametrize("form", ["policy_gradient", "k3_loss"])
def test_k1_and_k3_values_are_unbiased(form, student, teacher):
    p, log_q, mean = student.softmax(-1), teacher.log_softmax(-1), 0
    for token in range(V):
        y = torch.full((N,), token)
        result = sampled_reverse_kl(student, y, log_q[:, token], form=form, acknowledge_bias=True)
        mean = mean + p[:, token] * result.per_token
    assert_close(mean, reverse_kl(student, teacher).per_token)


@pytest.mark.parametrize("form", ["policy_gradient", "k2"])
def test_importance_weights_repair_stale_samples(form, student, teacher, make_logits, expected_gradient):
    behaviour = (student + 0.5 * make_logits(N, V, seed=3)).log_softmax(-1)
    log_q = teacher.log_softmax(-1)

    def estimate(logits, y):
        at = y[:, None]
        return sampled_reverse_kl(
            logits,
            y,
            log_q.gather(1, at).squeeze(1),
            form=form,
            behaviour_log_probs=behaviour.gather(1, at).squeeze(1),
        ).per_token

    got = expected_gradient(estimate, student, behaviour.exp())
    assert_close(got, gradient_of(reverse_kl, student, teacher), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", ["k1_loss", "k3_loss"])
def test_biased_forms_must_be_acknowledged(form, student):
    with pytest.raises(ValueError, match=f"{form}.*biased.*acknowledge_bias=True"):
        sampled_reverse_kl(student, torch.zeros(N, dtype=torch.int64), torch.zeros(N), form=form)


def test_an_unknown_form_and_a_misplaced_control_variate_are_refused(student):
    y, teacher_y = torch.zeros(N, dtype=torch.int64), torch.zeros(N)
    with pytest.raises(ValueError, match=r"form must .* 'k4'"):
        sampled_reverse_kl(student, y, teacher_y, form="k4")
    with pytest.raises(ValueError, match="control_variate applies to form 'policy_gradient'"):
        sampled_reverse_kl(student, y, teacher_y, form="k2", control_variate=torch.zeros(N))


def test_an_empty_mask_gives_zero_and_not_nan(student):
    leaf = student.requires_grad_()
    y, mask = torch.full((N,), -100), torch.zeros(N, dtype=torch.bool)
    result = sampled_reverse_kl(leaf, y, torch.full((N,), torch.nan), mask=mask)
    result.mean.backward()
    assert (result.mean.item(), result.count.item()) == (0.0, 0)
    assert (leaf.grad == 0).all()


@pytest.mark.parametrize("form", ["policy_gradient", "k2", "k1_loss"])
def test_a_teacher_that_excludes_the_sampled_token_gives_infinity_and_not_nan(form, student):
    leaf = student.requires_grad_()
    result = sampled_reverse_kl(
        leaf, torch.zeros(N, dtype=torch.int64), torch.full((N,), -torch.inf), form=form, acknowledge_bias=True
    )
    assert result.per_token.isposinf().all()


def test_a_control_variate_may_hold_anything_where_masked_also_with_ready_scores(student, teacher):
    y, mask = torch.zeros(N, dtype=torch.int64), torch.arange(N) > 0
    variate = torch.where(mask, 0.3, torch.nan).double()
    leaf = student.requires_grad_()
    scores = score_tokens(leaf, sampled_ids=y)
    result = sampled_reverse_kl(scores, y, teacher.log_softmax(-1)[:, 0], control_variate=variate, mask=mask)
    result.mean.backward()
    assert leaf.grad.isfinite().all()
    assert (leaf.grad[0] == 0).all() and (leaf.grad[1:] != 0).all()


def test_the_log_ratio_and_the_weight_of_the_token_are_reported(student, teacher):
    y, log_p, log_q = torch.arange(N), student.log_softmax(-1), teacher.log_softmax(-1)
    at = torch.arange(N), y
    mask = y > 0
    result = sampled_reverse_kl(
        student, y, log_q[at], mask=mask, behaviour_log_probs=log_p[at] - 0.5, importance_cap=1.5
    )
    weight = torch.where(mask, 1.5, 0.0).double()
    assert result.diagnostics.keys() == {"log_ratio", "importance_weight", "importance_truncated"}
    assert_close(result.diagnostics["log_ratio"], torch.where(mask, log_p[at] - log_q[at], 0.0))
    assert_close(result.diagnostics["importance_weight"], weight)
    assert_close(result.diagnostics["importance_truncated"], mask.double())
    assert_close(result.per_token, weight * (log_p[at] - log_q[at]))
