import pytest
import torch
from torch.testing import assert_close

from opd.maths.exact import forward_kl, reverse_kl
from opd.maths.head_tail import head_tail_reverse_kl
from opd.maths.reference import adjusted_log_probs, adjusted_logits, adjusted_payload
from opd.maths.sampled import sampled_reverse_kl
from opd.maths.topk import topk_divergence

N, V = 4, 9
POWERS = [0.0, 0.5, 1.0, 1.25, 1.5]


@pytest.fixture
def models(make_logits):
    """Logits of student, teacher and reference."""
    return tuple(make_logits(N, V, seed=seed) for seed in (1, 2, 3))


def product_of_powers(teacher, reference, power):
    weights = teacher.softmax(-1) ** power * reference.softmax(-1) ** (1 - power)
    return weights / weights.sum(-1, keepdim=True)


def payload(logits, ids, y):
    log_q = logits.log_softmax(-1)
    tail = log_q.scatter(1, ids, -torch.inf).logsumexp(-1)
    return log_q.gather(1, ids), log_q.gather(1, y[:, None]).squeeze(1), tail


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("power", POWERS)
def test_adjusted_logits_are_the_normalised_product_of_powers_at_any_temperature(power, temperature, models):
    _, teacher, reference = models
    got = (adjusted_logits(teacher, reference, power) / temperature).softmax(-1)
    assert_close(got, product_of_powers(teacher / temperature, reference / temperature, power))


def test_the_optimum_is_plain_distillation_at_power_one_and_the_reference_at_zero(models):
    student, teacher, reference = models
    assert_close(adjusted_logits(teacher, reference, 1.0), teacher)
    assert_close(
        forward_kl(student, adjusted_logits(teacher, reference, 0.0)).mean, forward_kl(student, reference).mean
    )


def test_a_teacher_equal_to_the_reference_makes_the_power_irrelevant(models):
    _, teacher, _ = models
    for power in POWERS:
        assert_close(adjusted_log_probs(teacher, teacher, power), teacher)


@pytest.mark.parametrize("power", POWERS)
def test_the_sampled_form_has_the_gradient_of_the_full_target(power, models, expected_gradient):
    student, teacher, reference = models
    log_t, log_r = teacher.log_softmax(-1), reference.log_softmax(-1)

    def estimate(logits, y):
        target = adjusted_log_probs(log_t, log_r, power).gather(1, y[:, None]).squeeze(1)
        return sampled_reverse_kl(logits, y, target).per_token

    leaf = student.clone().requires_grad_()
    truth = torch.autograd.grad(reverse_kl(leaf, adjusted_logits(teacher, reference, power)).total, leaf)[0]
    assert_close(expected_gradient(estimate, student), truth, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("k", [0, 1, 4, V])
def test_the_payload_form_has_the_gradient_of_the_full_target_for_every_k(k, power, models, expected_gradient):
    student, teacher, reference = models
    ids = student.topk(k).indices

    def estimate(logits, y):
        target = adjusted_payload(*payload(teacher, ids, y), *payload(reference, ids, y), power)
        return head_tail_reverse_kl(
            logits, y, ids, target.teacher_log_probs, target.teacher_sampled, target.teacher_log_tail
        ).per_token

    leaf = student.clone().requires_grad_()
    truth = torch.autograd.grad(reverse_kl(leaf, adjusted_logits(teacher, reference, power)).total, leaf)[0]
    assert_close(expected_gradient(estimate, student), truth, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("power", POWERS)
def test_the_estimated_normaliser_is_above_the_true_one_within_the_unit_interval_and_below_it_beyond(power, models):
    student, teacher, reference = models
    ids = student.topk(3).indices
    y = ids[:, 0]
    estimate = adjusted_payload(*payload(teacher, ids, y), *payload(reference, ids, y), power).log_z
    weights = teacher.softmax(-1) ** power * reference.softmax(-1) ** (1 - power)
    gap = estimate - weights.sum(-1).log()
    assert (gap >= -1e-12).all() if power <= 1 else (gap <= 1e-12).all()


def test_the_whole_vocabulary_as_support_gives_the_exact_target(models):
    student, teacher, reference = models
    ids = student.topk(V).indices
    y = ids[:, 0]
    target = adjusted_payload(*payload(teacher, ids, y), *payload(reference, ids, y), 1.25)
    got = topk_divergence(student, ids, target.teacher_log_probs, target.teacher_log_tail, kind="forward_kl")
    assert_close(got.per_token, forward_kl(student, adjusted_logits(teacher, reference, 1.25)).per_token)


def test_clipping_bounds_what_the_reference_can_add(models):
    _, teacher, reference = models
    free, clipped = (adjusted_log_probs(teacher, reference, 2.0, clip=clip) for clip in (None, 0.5))
    assert (clipped - teacher).abs().max() <= 0.5 + 1e-12
    assert (free - teacher).abs().max() > 0.5


@pytest.mark.parametrize(("power", "clip", "words"), [(-0.1, None, "power .* -0.1"), (1.5, 0.0, "clip .* 0.0")])
def test_settings_out_of_range_are_refused(power, clip, words, models):
    with pytest.raises(ValueError, match=words):
        adjusted_log_probs(models[1], models[2], power, clip=clip)
