"""The properties that every divergence and estimator must have, each over all of them, on one common problem."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from opd.heads import OutputHead
from opd.maths import (
    adjusted_logits,
    adjusted_payload,
    blocks,
    exact,
    head_tail_reverse_kl,
    linear_divergence,
    linear_token_scores,
    reverse_kl,
    sampled_reverse_kl,
    topk_divergence,
)

N, V, K = 6, 8, 3
WEIGHTS = {"jsd": ("beta", 0.3), "skew_forward_kl": ("alpha", 0.2), "skew_reverse_kl": ("alpha", 0.2)}
KINDS = ("forward_kl", "reverse_kl", "total_variation", *WEIGHTS)


def on_payload(student, teacher, y, k, *, fraction_of=None):
    """Candidates and what a teacher sends for them; masked positions of `student` may hold anything."""
    ids = teacher.topk(k).indices
    log_q = teacher.log_softmax(-1)
    tail = log_q.scatter(-1, ids, -torch.inf).logsumexp(-1)
    at_y = log_q.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    if fraction_of is None:
        return ids, log_q.gather(-1, ids), at_y, tail
    log_r = fraction_of.log_softmax(-1)
    reference = log_r.gather(-1, ids), log_r.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    tail_r = log_r.scatter(-1, ids, -torch.inf).logsumexp(-1)
    found = adjusted_payload(log_q.gather(-1, ids), at_y, tail, *reference, tail_r, 1.2)
    return ids, found.teacher_log_probs, found.teacher_sampled, found.teacher_log_tail


def exact_form(kind):
    extra = dict([WEIGHTS[kind]]) if kind in WEIGHTS else {}
    return lambda s, t, y, mask=None, k=K: getattr(exact, kind)(s, t, mask=mask, **extra)


def linear_form(kind):
    """Hidden states of width V and the identity for a head: the logits themselves."""
    weight = WEIGHTS[kind][1] if kind in WEIGHTS else None

    def call(s, t, y, mask=None, k=K):
        one = torch.eye(s.shape[-1], dtype=s.dtype)
        return linear_divergence(s, one, t, one, kind=kind, weight=weight, mask=mask, recompute=True)

    return call


def bucket_form(kind, tail="bucket"):
    weight = WEIGHTS[kind][1] if kind in WEIGHTS else None

    def call(s, t, y, mask=None, k=K):
        ids, values, _, log_tail = on_payload(s, t, y, k)
        return topk_divergence(s, ids, values, log_tail, kind=kind, weight=weight, tail=tail, mask=mask)

    return call


def head_tail(baseline):
    def call(s, t, y, mask=None, k=K):
        ids, values, at_y, tail = on_payload(s, t, y, k)
        return head_tail_reverse_kl(s, y, ids, values, at_y, tail, mask=mask, baseline=baseline)

    return call


def on_linear_scores(s, t, y, mask=None, k=K):
    ids, values, at_y, tail = on_payload(s, t, y, k)
    one = torch.eye(s.shape[-1], dtype=s.dtype)
    scores = linear_token_scores(s, one, candidate_ids=ids, sampled_ids=y, mask=mask)
    return head_tail_reverse_kl(scores, y, ids, values, at_y, tail, mask=mask)


def sampled(form):
    def call(s, t, y, mask=None, k=K):
        at_y = t.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
        return sampled_reverse_kl(s, y, at_y, form=form, mask=mask, acknowledge_bias=True)

    return call


def towards_reference(s, t, y, mask=None, k=K):
    ids, values, at_y, tail = on_payload(s, t, y, k, fraction_of=t.roll(1, -1))
    return head_tail_reverse_kl(s, y, ids, values, at_y, tail, mask=mask)


CLOSED = {kind: exact_form(kind) for kind in KINDS} | {f"linear {kind}": linear_form(kind) for kind in KINDS}
BUCKETS = {f"bucket {kind}": bucket_form(kind) for kind in KINDS}
GENERALISED = {f"generalised {kind}": bucket_form(kind, "generalised") for kind in ("forward_kl", "reverse_kl", "jsd")}
SAMPLED = {
    **{f"head_tail {baseline}": head_tail(baseline) for baseline in ("tail_mean", "head_kl", "none")},
    "head_tail on linear scores": on_linear_scores,
    **{f"sampled {form}": sampled(form) for form in ("policy_gradient", "k2", "k1_loss", "k3_loss")},
}
TRUE = CLOSED | BUCKETS | GENERALISED
ALL = (
    TRUE
    | SAMPLED
    | {
        "head_tail to a reference": towards_reference,
        "reverse_kl to a reference": lambda s, t, y, mask=None, k=K: reverse_kl(
            s, adjusted_logits(t, t.roll(1, -1), 1.2), mask=mask
        ),
    }
)
every = pytest.mark.parametrize("name", ALL)


def problem(seed=0, n=N, v=V, scale=1.5):
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (scale * torch.randn(n, v, generator=generator, dtype=torch.float64) for _ in "ST")
    return student, teacher, torch.randint(0, v, (n,), generator=generator)


def value_and_gradient(name, student, teacher, y, mask=None):
    leaf = student.clone().requires_grad_()
    result = ALL[name](leaf, teacher, y, mask)
    (gradient,) = torch.autograd.grad(result.total, leaf)
    return result, gradient


rows = st.lists(st.floats(-20, 20), min_size=V, max_size=V)
seeds = st.integers(0, 9999)
few = settings(max_examples=settings.default.max_examples // 8)  # of each form, and there are some thirty


@given(name=st.sampled_from(sorted(TRUE)), one=rows, other=rows, k=st.integers(0, V))
def test_divergences_are_non_negative(name, one, other, k):
    student, teacher = (torch.tensor([row], dtype=torch.float64) for row in (one, other))
    assert TRUE[name](student, teacher, torch.tensor([0]), k=k).total >= -1e-11


@given(name=st.sampled_from(sorted(BUCKETS)), one=rows, other=rows)
def test_buckets_obey_the_data_processing_inequality_in_k(name, one, other):
    student, teacher = (torch.tensor([row], dtype=torch.float64) for row in (one, other))
    chain = [float(BUCKETS[name](student, teacher, torch.tensor([0]), k=k).total) for k in range(V + 1)]
    chain.append(float(CLOSED[name.removeprefix("bucket ")](student, teacher, None).total))
    assert all(a <= b + 1e-9 for a, b in pairwise(chain)), chain


@given(name=st.sampled_from(sorted(ALL)), shift=st.floats(-50, 50), seed=st.integers(0, 99))
def test_a_shift_of_either_sides_logits_changes_nothing(name, shift, seed):
    student, teacher, y = problem(seed)
    want, gradient = value_and_gradient(name, student, teacher, y)
    got, moved = value_and_gradient(name, student + shift, teacher - shift, y)
    assert_close(got.per_token, want.per_token, rtol=1e-8, atol=1e-9)
    assert_close(moved, gradient, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", TRUE | SAMPLED)
@given(seed=seeds)
@few
def test_equal_models_give_zero_for_every_token(name, seed):
    student, every_token = problem(seed)[0].repeat(V, 1), torch.arange(V).repeat_interleave(N)
    result, gradient = value_and_gradient(name, student, student + 1.0, every_token)
    assert result.per_token.abs().max() < 1e-12
    if "total_variation" not in name and "k1_loss" not in name:  # a kink; a score that is zero on average only
        assert gradient.abs().max() < 1e-12


@pytest.mark.parametrize("name", TRUE)
@given(seed=seeds, bump=st.floats(0.1, 5))
@few
def test_unequal_models_do_not_give_zero(name, seed, bump):
    student, _, y = problem(seed)
    moved = student.clone()
    moved.scatter_add_(1, student.argmax(-1, keepdim=True), torch.full((N, 1), bump, dtype=torch.float64))
    assert (TRUE[name](student, moved, y).per_token > 1e-9).all()


@every
@given(seed=seeds, block=st.integers(1, N), scratch=st.integers(1, 4 * N))
@few
def test_the_size_of_blocks_and_tiles_changes_nothing(name, seed, block, scratch):
    student, teacher, y = problem(seed)
    want, gradient = value_and_gradient(name, student, teacher, y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_CPU_BLOCK", block * V)
        patch.setattr("opd.maths.linear.project.CPU_SCRATCH", scratch * 8 * V)
        got, tiled = value_and_gradient(name, student, teacher, y)
    assert_close(got.per_token, want.per_token, rtol=1e-12, atol=1e-14)
    assert_close(tiled, gradient, rtol=1e-12, atol=1e-14)


@every
@given(seed=seeds, cuts=st.sets(st.integers(1, N - 1)))
@few
def test_the_cut_into_micro_batches_changes_nothing(name, seed, cuts):
    student, teacher, y = problem(seed)
    want, gradient = value_and_gradient(name, student, teacher, y)
    pieces = [slice(*pair) for pair in pairwise([0, *sorted(cuts), N])]
    parts = [value_and_gradient(name, student[p], teacher[p], y[p]) for p in pieces]
    assert_close(torch.stack([part.total for part, _ in parts]).sum(), want.total)
    assert_close(torch.cat([part for _, part in parts]), gradient)


@every
def test_a_weighted_sum_has_the_weighted_gradient(name):
    student, teacher, y = problem()
    _, gradient = value_and_gradient(name, student, teacher, y)
    leaf, weights = student.clone().requires_grad_(), torch.linspace(-2.0, 3.0, N, dtype=torch.float64)
    (got,) = torch.autograd.grad((weights * ALL[name](leaf, teacher, y).per_token).sum(), leaf)
    assert_close(got, weights[:, None] * gradient)


@every
def test_the_students_entropy_is_reported_where_it_counts(name):
    student, teacher, y = problem()
    mask = torch.arange(N) > 0
    want = -(student.softmax(-1) * student.log_softmax(-1)).sum(-1)
    found = ALL[name](student.requires_grad_(), teacher, y, mask).student_entropy
    assert not found.requires_grad
    assert_close(found, torch.where(mask, want.detach(), 0.0))


@every
@given(
    seed=seeds,
    kept=st.lists(st.booleans(), min_size=N, max_size=N).filter(any),
    junk=st.sampled_from([torch.nan, torch.inf, -torch.inf, 1e300, 0.0]),
)
@few
def test_padding_changes_nothing_whatever_it_holds(name, seed, kept, junk):
    student, teacher, y = problem(seed)
    mask = torch.tensor(kept)
    want, gradient = value_and_gradient(name, student[mask], teacher[mask], y[mask])
    dirty = student.clone()
    dirty[~mask] = junk
    got, padded = value_and_gradient(name, dirty, teacher, torch.where(mask, y, 0), mask)
    assert_close(got.mean, want.mean)
    assert got.count == mask.sum()
    assert_close(padded[mask], gradient)
    assert (padded[~mask] == 0).all() and (got.per_token[~mask] == 0).all()


@pytest.mark.parametrize("name", [name for name in ALL if "linear" not in name])
@given(seed=seeds, order=st.permutations(range(N)), rows_of=st.sampled_from([1, 2, 3, N]))
@few
def test_packing_changes_nothing(name, seed, order, rows_of):
    """Positions in rows of two axes, or of one, in another order."""
    student, teacher, y = problem(seed)
    want, gradient = value_and_gradient(name, student, teacher, y)
    shape = (N // rows_of, rows_of)
    got, packed = value_and_gradient(name, *(x[order].unflatten(0, shape) for x in (student, teacher, y)))
    assert_close(got.per_token.flatten(), want.per_token[order])
    assert_close(packed.flatten(0, 1), gradient[order])


@every
def test_an_empty_mask_and_no_rows_at_all_give_zero(name):
    student, teacher, y = problem()
    for result, gradient in (
        value_and_gradient(name, student, teacher, y, torch.zeros(N, dtype=torch.bool)),
        value_and_gradient(name, student[:0], teacher[:0], y[:0]),
    ):
        assert (result.mean.item(), result.total.item(), result.count.item()) == (0.0, 0.0, 0)
        assert (gradient == 0).all()


@pytest.mark.parametrize("name", [*TRUE, "sampled k1_loss", "sampled k3_loss", "sampled k2"])
def test_gradcheck_of_all_forms_whose_value_is_what_is_differentiated(name):
    student, teacher, y = problem(n=2, v=5)
    assert torch.autograd.gradcheck(lambda z: ALL[name](z, teacher, y, k=2).total, (student.requires_grad_(),))


# Not the linear forms, where a bias excludes (below), nor the references made by moving the teacher's entries by one.
@pytest.mark.parametrize("name", [name for name in ALL if "linear" not in name and "reference" not in name])
def test_entries_that_both_sides_exclude_change_nothing(name):
    student, teacher, y = problem()
    want, gradient = value_and_gradient(name, student, teacher, y)
    excluded = torch.full((N, 1), -torch.inf, dtype=torch.float64)
    wide = [torch.cat([x[:, :4], excluded, x[:, 4:]], -1) for x in (student, teacher)]
    got, padded = value_and_gradient(name, *wide, torch.where(y >= 4, y + 1, y))
    assert_close(got.per_token, want.per_token)
    assert_close(got.student_entropy, want.student_entropy)
    assert_close(got.teacher_entropy, want.teacher_entropy)
    assert (padded[:, 4] == 0).all()
    assert_close(torch.cat([padded[:, :4], padded[:, 5:]], -1), gradient)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_of_minus_infinity_excludes_an_entry_of_the_linear_form(kind):
    student, teacher, _ = problem()
    bias = torch.zeros(V, dtype=torch.float64)
    bias[2] = -torch.inf
    head, kept = OutputHead(torch.eye(V, dtype=torch.float64), bias), torch.arange(V) != 2
    leaves = student.clone().requires_grad_(), student.clone().requires_grad_()
    weight = WEIGHTS[kind][1] if kind in WEIGHTS else None
    got = linear_divergence(leaves[0], head, teacher, head, kind=kind, weight=weight)
    want = CLOSED[kind](leaves[1][:, kept], teacher[:, kept], None)
    assert_close(got.per_token, want.per_token)
    assert_close(torch.autograd.grad(got.total, leaves[0])[0], torch.autograd.grad(want.total, leaves[1])[0])


@every
def test_a_saturated_student_keeps_float32_close_to_float64(name):
    """The student gives all but about 1e-12 of its mass to one entry."""
    student, teacher, y = problem(scale=1.0)
    student[:, 0] += 28.0
    student, teacher = student.float(), teacher.float()
    wide, true = value_and_gradient(name, student.double(), teacher.double(), y)
    got, gradient = value_and_gradient(name, student, teacher, y)
    assert got.total.isfinite()
    assert_close(got.per_token.double(), wide.per_token, rtol=2e-5, atol=2e-5)
    # The entry that holds the mass has minus the sum of the others: a difference of numbers near one.
    assert_close(gradient[:, 1:].double(), true[:, 1:], rtol=2e-5, atol=2e-5 * float(true[:, 1:].abs().max()))
    assert_close(gradient[:, 0].double(), true[:, 0], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in ALL if "linear" not in name])
def test_a_real_vocabulary_in_float32_agrees_with_float64(name):
    gap, teacher, y = problem(n=1, v=151_936, scale=6.0)
    student, teacher = (teacher + 0.1 * gap).float(), teacher.float()
    want, true = value_and_gradient(name, student.double(), teacher.double(), y)
    got, gradient = value_and_gradient(name, student, teacher, y)
    assert_close(got.per_token.double(), want.per_token, rtol=5e-5, atol=1e-5)
    assert_close(gradient.double(), true, rtol=1e-3, atol=1e-4 * float(true.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_real_vocabulary_in_tiles_agrees_with_the_materialised_form(kind):
    generator = torch.Generator().manual_seed(0)
    hidden, head, theirs, their_head = (
        torch.randn(*shape, generator=generator) for shape in ((2, 4), (151_936, 4), (2, 3), (151_936, 3))
    )
    weight = WEIGHTS[kind][1] if kind in WEIGHTS else None
    leaves = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    got = linear_divergence(leaves[0], head, theirs, their_head, kind=kind, weight=weight, scratch_bytes=1)
    want = CLOSED[kind](leaves[1] @ head.double().T, theirs.double() @ their_head.double().T, None)
    assert_close(got.per_token.double(), want.per_token, rtol=5e-5, atol=1e-5)
    have, true = torch.autograd.grad(got.total, leaves[0])[0], torch.autograd.grad(want.total, leaves[1])[0]
    assert_close(have.double(), true, rtol=1e-3, atol=1e-4 * float(true.abs().max()))


TEMPERED = {
    "head_tail": lambda s, q, y, **k: head_tail_reverse_kl(s, y, *on_payload(s, q, y, K), **k),
    "sampled": lambda s, q, y, **k: sampled_reverse_kl(s, y, on_payload(s, q, y, K)[2], **k),
    "k2": lambda s, q, y, **k: sampled_reverse_kl(s, y, on_payload(s, q, y, K)[2], form="k2", **k),
    "bucket": lambda s, q, y, **k: topk_divergence(s, *without_sampled(s, q, y), **k),
}


def without_sampled(student, teacher, y):
    ids, values, _, tail = on_payload(student, teacher, y, K)
    return ids, values, tail


@pytest.mark.parametrize("name", TEMPERED)
@pytest.mark.parametrize("temperature", [0.6, 2.5])
def test_the_temperature_divides_the_students_logits_and_the_teachers_log_probs_come_tempered(name, temperature):
    student, teacher, y = problem()
    leaves = student.clone().requires_grad_(), student.clone().requires_grad_()
    got = TEMPERED[name](leaves[0], teacher / temperature, y, temperature=temperature)
    want = TEMPERED[name](leaves[1] / temperature, teacher / temperature, y)
    assert_close(got.per_token, want.per_token)
    assert_close(torch.autograd.grad(got.total, leaves[0])[0], torch.autograd.grad(want.total, leaves[1])[0])
