import pytest
import torch
from slow_cases import slow
from torch.testing import assert_close

from opd.maths.exact import reverse_kl
from opd.maths.head_tail import BASELINES, head_tail_reverse_kl
from opd.maths.scores import score_tokens

N, V = 4, 9


def problem(make_logits, k, *, chosen_by="student", seed=0):
    """Logits, candidate ids and what a teacher would send for them."""
    student, teacher = make_logits(N, V, seed=seed), make_logits(N, V, seed=seed + 1)
    by = {"student": student, "teacher": teacher, "stale": student + make_logits(N, V, seed=seed + 2)}[chosen_by]
    ids = by.topk(k).indices
    log_q = teacher.log_softmax(-1)
    log_tail = log_q.scatter(1, ids, -torch.inf).logsumexp(-1)
    return student, teacher, ids, log_q, log_tail


def estimator(ids, log_q, log_tail, *, behaviour=None, **settings):
    """The loss of sampled ids by position, with what a teacher sends for them; weighted where `behaviour` drew them."""

    def estimate(logits, y):
        at = y[:, None]
        drawn = {} if behaviour is None else {"behaviour_log_probs": behaviour.gather(1, at).squeeze(1)}
        teacher_y = log_q.gather(1, at).squeeze(1)
        values = log_q.gather(1, ids)
        return head_tail_reverse_kl(logits, y, ids, values, teacher_y, log_tail, **drawn, **settings).per_token

    return estimate


def true_gradient(student, teacher):
    leaf = student.clone().requires_grad_()
    return torch.autograd.grad(reverse_kl(leaf, teacher).total, leaf)[0]


@pytest.mark.parametrize("chosen_by", ["student", "teacher", "stale"])
@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("k", [0, 1, V, *slow(*range(2, V))])
def test_head_tail_gradient_is_unbiased_for_every_k(k, baseline, chosen_by, make_logits, expected_gradient):
    student, teacher, ids, log_q, log_tail = problem(make_logits, k, chosen_by=chosen_by)
    estimate = estimator(ids, log_q, log_tail, baseline=baseline)
    assert_close(expected_gradient(estimate, student), true_gradient(student, teacher), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("baseline", BASELINES)
def test_the_gradient_at_every_token_is_that_of_the_formula(baseline, make_logits):
    """Not in the mean alone, in which any baseline would do."""
    student, _, ids, log_q, log_tail = problem(make_logits, 3)
    behaviour = (student + 0.5 * make_logits(N, V, seed=9)).log_softmax(-1)
    log_p = student.log_softmax(-1)
    p, r = log_p.exp(), log_p - log_q
    head = torch.zeros_like(p).scatter(1, ids, 1.0)
    head_p, head_q = ((head * one).sum(-1, keepdim=True) for one in (p, log_q.exp()))
    of_head = head * p / head_p
    conditional = (of_head * (r - (head_p / head_q).log())).sum(-1, keepdim=True)
    b = (head * p * r).sum(-1, keepdim=True) if baseline == "head_kl" else torch.zeros(N, 1, dtype=torch.float64)
    c = ((1 - head_p) / (1 - head_q)).log() + conditional if baseline == "tail_mean" else b
    for token in range(V):
        y, leaf = torch.full((N,), token), student.clone().requires_grad_()
        result = estimator(ids, log_q, log_tail, behaviour=behaviour, baseline=baseline)(leaf, y)
        (got,) = torch.autograd.grad(result.sum(), leaf)
        drawn = torch.eye(V, dtype=torch.float64)[token] * (1 - head)
        weight = (log_p - behaviour).exp()
        # Coefficients of grad log p_i; the mass of the tail is the sum of its p_i.
        coefficient = head * p * (r - b) + (1 - head) * p * (c - b) + drawn * weight * (r - c)
        assert_close(got, coefficient - p * coefficient.sum(-1, keepdim=True), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("k", [0, 1, 3, V])
def test_head_tail_value_is_unbiased(k, baseline, make_logits):
    student, teacher, ids, log_q, log_tail = problem(make_logits, k)
    p, mean = student.softmax(-1), 0
    for token in range(V):
        y = torch.full((N,), token)
        mean = mean + p[:, token] * estimator(ids, log_q, log_tail, baseline=baseline)(student, y)
    assert_close(mean, reverse_kl(student, teacher).per_token)


def test_stale_rows_are_unbiased_with_importance_weights_and_biased_without(make_logits, expected_gradient):
    student, teacher, ids, log_q, log_tail = problem(make_logits, 3, seed=10)
    behaviour = (student + 0.7 * make_logits(N, V, seed=20)).log_softmax(-1)
    truth = true_gradient(student, teacher)
    corrected = estimator(ids, log_q, log_tail, behaviour=behaviour)
    assert_close(expected_gradient(corrected, student, behaviour.exp()), truth, rtol=1e-9, atol=1e-12)
    ignored = expected_gradient(estimator(ids, log_q, log_tail), student, behaviour.exp())
    assert (ignored - truth).abs().max() > 1e-3


def test_capped_importance_weights_are_biased_only_where_the_cap_bites(make_logits, expected_gradient):
    student, teacher, ids, log_q, log_tail = problem(make_logits, 2, seed=30)
    behaviour = (student + 0.7 * make_logits(N, V, seed=31)).log_softmax(-1)
    largest = (student.log_softmax(-1) - behaviour).exp().max().item()

    def bias(cap):
        estimate = estimator(ids, log_q, log_tail, behaviour=behaviour, importance_cap=cap)
        got = expected_gradient(estimate, student, behaviour.exp())
        return (got - true_gradient(student, teacher)).abs().max()

    assert bias(largest * 1.01) < 1e-12
    assert bias(1.0) > 1e-4


def test_what_a_cap_takes_away_is_the_mass_above_it_times_its_centred_log_ratio(make_logits, expected_gradient):
    student, teacher, ids, log_q, log_tail = problem(make_logits, 2, seed=30)
    behaviour = (student + 0.7 * make_logits(N, V, seed=31)).log_softmax(-1)
    log_p, cap = student.log_softmax(-1), 1.1
    estimate = estimator(ids, log_q, log_tail, behaviour=behaviour, baseline="none", importance_cap=cap)
    got = expected_gradient(estimate, student, behaviour.exp())
    above = (log_p.exp() - cap * behaviour.exp()).clamp(min=0.0).scatter(1, ids, 0.0)
    missing = above * (log_p - log_q)
    # grad log p(y) with respect to the logits is onehot(y) - p.
    lacking = missing - log_p.exp() * missing.sum(-1, keepdim=True)
    assert lacking.abs().max() > 1e-4
    assert_close(true_gradient(student, teacher) - got, lacking, rtol=1e-9, atol=1e-12)


def gradient_variance(make_logits, k, baseline, *, noise=0.5):
    """Trace of the covariance of the per-token gradient by enumeration, summed over positions."""
    positions, vocabulary = 6, 160
    student = make_logits(positions, vocabulary, seed=40, scale=3)
    teacher = student + noise * make_logits(positions, vocabulary, seed=41, scale=1)
    ids = student.topk(k).indices
    log_q = teacher.log_softmax(-1)
    log_tail = log_q.scatter(1, ids, -torch.inf).logsumexp(-1)
    # All tokens at once: position n with token y is row n * vocabulary + y.
    rows = torch.arange(positions).repeat_interleave(vocabulary)
    y = torch.arange(vocabulary).repeat(positions)
    leaf = student[rows].requires_grad_()
    loss = head_tail_reverse_kl(
        leaf, y, ids[rows], log_q.gather(1, ids)[rows], log_q[rows, y], log_tail[rows], baseline=baseline
    )
    (gradient,) = torch.autograd.grad(loss.total, leaf)
    gradient = gradient.reshape(positions, vocabulary, vocabulary)
    p = student.softmax(-1)
    mean = (p.unsqueeze(-1) * gradient).sum(1)
    return ((p * gradient.square().sum(-1)).sum() - mean.square().sum()).item()


def test_tail_mean_has_the_least_variance_and_a_head_of_32_leaves_less_than_an_eighth(make_logits):
    sampled_only = gradient_variance(make_logits, 0, "none")
    tail_mean = gradient_variance(make_logits, 32, "tail_mean")
    assert tail_mean < 0.125 * sampled_only
    assert tail_mean < 0.95 * gradient_variance(make_logits, 32, "none")
    assert tail_mean < 0.95 * gradient_variance(make_logits, 32, "head_kl")


def test_equal_models_give_zero_value_and_zero_gradient_for_every_token(make_logits):
    student, _, ids, _, _ = problem(make_logits, 3)
    log_p = student.log_softmax(-1)
    log_tail = log_p.scatter(1, ids, -torch.inf).logsumexp(-1)
    for token in range(V):
        leaf = student.clone().requires_grad_()
        y = torch.full((N,), token)
        result = head_tail_reverse_kl(leaf, y, ids, log_p.gather(1, ids), log_p[:, token], log_tail)
        (gradient,) = torch.autograd.grad(result.total, leaf)
        assert result.per_token.abs().max() < 1e-12
        assert gradient.abs().max() < 1e-12


def test_a_saturated_student_keeps_a_finite_and_accurate_tail():
    student = torch.tensor([[30.0, 1.0, 0.0, -1.0, 2.0]]).requires_grad_()
    teacher = torch.tensor([[5.0, 1.0, 0.0, 2.0, -1.0]], dtype=torch.float64)
    ids, y = torch.tensor([[0]]), torch.tensor([2])
    log_q = teacher.log_softmax(-1)
    log_tail = log_q[:, 1:].logsumexp(-1)
    result = head_tail_reverse_kl(student, y, ids, log_q[:, :1], log_q[:, 2], log_tail)
    (gradient,) = torch.autograd.grad(result.total, student)
    double = student.detach().double().requires_grad_()
    want = head_tail_reverse_kl(double, y, ids, log_q[:, :1], log_q[:, 2], log_tail)
    (truth,) = torch.autograd.grad(want.total, double)
    assert_close(gradient.double(), truth, rtol=1e-5, atol=1e-6)
    scores = score_tokens(student.detach(), candidate_ids=ids)
    assert_close(scores.log_tail.double(), double.detach().log_softmax(-1)[:, 1:].logsumexp(-1), rtol=1e-6, atol=0)


def test_excluded_entries_and_padding_leave_no_trace(make_logits):
    student, _teacher, ids, log_q, log_tail = problem(make_logits, 3)
    y, teacher_y = ids[:, 0].clone(), log_q.gather(1, ids[:, :1]).squeeze(1)
    mask = torch.tensor([True, False, True, False])
    want = head_tail_reverse_kl(
        student[mask], y[mask], ids[mask], log_q.gather(1, ids)[mask], teacher_y[mask], log_tail[mask]
    )
    dirty = torch.cat([student, torch.full((N, 2), -torch.inf, dtype=torch.float64)], -1)
    dirty[~mask] = torch.nan
    dirty.requires_grad_()
    values, tails, y_dirty = log_q.gather(1, ids), log_tail.clone(), y.clone()
    values[~mask], tails[~mask], y_dirty[~mask] = torch.nan, torch.nan, -100
    result = head_tail_reverse_kl(dirty, y_dirty, ids, values, teacher_y, tails, mask=mask)
    result.mean.backward()
    assert_close(result.mean, want.mean)
    assert (dirty.grad[~mask] == 0).all()
    assert dirty.grad.isfinite().all()
    assert all(figure.isfinite().all() for figure in result.diagnostics.values())


def test_a_candidate_that_the_student_excludes_contributes_nothing(make_logits):
    student, _, ids, log_q, log_tail = problem(make_logits, 2)
    extended = torch.cat([ids, torch.full((N, 1), V)], -1)
    padded = torch.cat([student, torch.full((N, 1), -torch.inf, dtype=torch.float64)], -1).requires_grad_()
    values = torch.cat([log_q.gather(1, ids), torch.full((N, 1), -torch.inf, dtype=torch.float64)], -1)
    y = student.argmin(-1)
    teacher_y = log_q.gather(1, y[:, None]).squeeze(1)
    got = head_tail_reverse_kl(padded, y, extended, values, teacher_y, log_tail, baseline="head_kl")
    want = head_tail_reverse_kl(student, y, ids, values[:, :2], teacher_y, log_tail, baseline="head_kl")
    (gradient,) = torch.autograd.grad(got.total, padded)
    assert_close(got.per_token.detach(), want.per_token)
    assert gradient.isfinite().all()


def test_ready_scores_and_logits_give_the_same_loss(make_logits):
    student, _, ids, log_q, log_tail = problem(make_logits, 3)
    y = ids[:, 1]
    teacher_y = log_q.gather(1, y[:, None]).squeeze(1)
    scores = score_tokens(student, candidate_ids=ids, sampled_ids=y, temperature=0.7)
    arguments = (y, ids, log_q.gather(1, ids), teacher_y, log_tail)
    assert_close(
        head_tail_reverse_kl(scores, *arguments).per_token,
        head_tail_reverse_kl(student, *arguments, temperature=0.7).per_token,
    )


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"teacher_sampled": torch.zeros(3)}, r"teacher_sampled \(float32 \[3\]\) must have shape \[2\]"),
        ({"teacher_log_probs": torch.zeros(2, 3)}, r"teacher_log_probs .* \[2, 2\]"),
        ({"candidate_ids": torch.tensor([[0, 1], [2, 2]])}, "repeats an id in row 1"),
        ({"candidate_ids": torch.tensor([[0, 1], [2, 7]])}, "holds the id 7, .* vocabulary of 4"),
        ({"sampled_ids": torch.tensor([0, -1])}, "holds the id -1"),
        ({"sampled_ids": torch.tensor([0.0, 1.0])}, "sampled_ids .* must be int64"),
        ({"teacher_sampled": torch.tensor([-1.0, torch.nan])}, r"teacher_sampled .* nan at \[1\]"),
        ({"teacher_log_probs": torch.tensor([[-1.0, torch.inf], [-1, -1]])}, r"teacher_log_probs .* inf at \[0, 1\]"),
        ({"baseline": "mean"}, "baseline must be one of .* 'mean'"),
        ({"baseline": "tail_mean"}, "needs teacher_log_tail"),
        ({"importance_cap": 2.0}, "importance_cap is 2.0 but behaviour_log_probs is None"),
        ({"importance_cap": -1.0, "behaviour_log_probs": torch.zeros(2)}, "importance_cap .* -1.0"),
    ],
)
def test_bad_input_is_refused_with_name_shape_and_value(changes, words):
    good = {
        "student": torch.zeros(2, 4),
        "sampled_ids": torch.tensor([0, 1]),
        "candidate_ids": torch.tensor([[0, 1], [2, 3]]),
        "teacher_log_probs": torch.full((2, 2), -1.4),
        "teacher_sampled": torch.full((2,), -1.4),
    }
    with pytest.raises(ValueError, match=words):
        head_tail_reverse_kl(**(good | changes))


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("where", ["candidate", "sampled token", "candidate that was sampled"])
def test_a_teacher_that_excludes_what_the_student_has_gives_infinity_and_not_nan(where, baseline, make_logits):
    student, _, ids, log_q, log_tail = problem(make_logits, 3)
    excluded = student.argmin(-1) if where == "sampled token" else ids[:, 0]
    log_q[torch.arange(N), excluded] = -torch.inf
    y = ids[:, 0] if where == "candidate that was sampled" else student.argmin(-1)
    leaf = student.clone().requires_grad_()
    teacher_y = log_q.gather(1, y[:, None]).squeeze(1)
    result = head_tail_reverse_kl(leaf, y, ids, log_q.gather(1, ids), teacher_y, log_tail, baseline=baseline)
    assert result.per_token.isposinf().all()
    assert not torch.autograd.grad(result.total, leaf)[0].isfinite().all()  # a training step must notice


def test_a_stale_token_that_the_student_excludes_now_has_no_weight(make_logits):
    student, _, ids, log_q, log_tail = problem(make_logits, 2)
    y = student.argmin(-1)
    student[torch.arange(N), y] = -torch.inf
    arguments = (y, ids, log_q.gather(1, ids), log_q.gather(1, y[:, None]).squeeze(1), log_tail)
    result = head_tail_reverse_kl(student, *arguments, behaviour_log_probs=torch.full((N,), -2.0).double())
    assert (result.diagnostics["importance_weight"] == 0).all()


def test_masses_and_tails_of_both_sides_are_reported(make_logits):
    student, teacher, ids, log_q, log_tail = problem(make_logits, 3)
    y = ids[:, 0]
    figures = head_tail_reverse_kl(
        student, y, ids, log_q.gather(1, ids), log_q.gather(1, y[:, None]).squeeze(1), log_tail
    ).diagnostics
    for side, logits in (("student", student), ("teacher", teacher)):
        head = logits.softmax(-1).gather(1, ids).sum(-1)
        assert_close(figures[f"{side}_head_mass"], head)
        assert_close(figures[f"{side}_tail_mass"], 1 - head)
