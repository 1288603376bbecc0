import pytest
import torch
from torch.testing import assert_close

from opd.maths.diagnostics import TOPK_FIGURES, position_profile, support_figures, topk_figures, topk_overlap
from opd.maths.topk import topk_divergence


def test_overlap_counts_shared_ids_in_any_order():
    student = torch.tensor([[0, 1], [0, 1], [0, 1]])
    teacher = torch.tensor([[1, 0], [1, 2], [4, 5]])
    assert_close(topk_overlap(student, teacher), torch.tensor([1.0, 0.5, 0.0]))
    assert topk_overlap(student[:, :0], teacher).tolist() == [0, 0, 0]


def test_masses_tails_and_bucket_divergences_agree_with_their_definitions(make_logits):
    student, teacher = make_logits(3, 8), make_logits(3, 8, seed=1)
    ids = teacher.topk(3).indices
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    tails = [x.scatter(1, ids, -torch.inf).logsumexp(-1) for x in (log_p, log_q)]
    figures = support_figures(log_p.gather(1, ids), tails[0], log_q.gather(1, ids), tails[1])
    assert_close(figures["student_head_mass"] + figures["student_tail_mass"], torch.ones(3).double())
    assert_close(figures["teacher_head_mass"], log_q.gather(1, ids).exp().sum(-1))
    for kind in ("forward_kl", "reverse_kl"):
        want = topk_divergence(student, ids, log_q.gather(1, ids), tails[1], kind=kind).per_token
        assert_close(figures[f"bucket_{kind}"], want)


def test_profiles_sum_by_position_and_add_up():
    values, position = torch.tensor([1.0, 2, 3, 4]), torch.tensor([0, 3, 4, 99])
    profile = position_profile(values, position, edges=(0, 4, 8), mask=torch.tensor([True, True, True, False]))
    assert_close(profile.total, torch.tensor([3.0, 3, 0]))
    assert_close(profile.mean, torch.tensor([1.5, 3, 0]))
    assert_close((profile + profile).count, torch.tensor([4.0, 2, 0]))


def test_masked_nan_does_not_reach_a_profile():
    profile = position_profile(torch.tensor([torch.nan]), torch.tensor([0]), mask=torch.tensor([False]))
    assert profile.total.sum() == 0


def test_a_bin_begins_at_its_edge_and_the_last_one_takes_the_rest():
    profile = position_profile(torch.ones(6), torch.tensor([0, 15, 16, 63, 64, 1_000_000]))
    assert profile.count.tolist() == [2, 2, 1, 0, 0, 0, 1]


@pytest.mark.parametrize("edges", [(), (1, 2), (0, 4, 4)])
def test_edges_that_do_not_ascend_from_zero_are_refused(edges):
    with pytest.raises(ValueError, match="edges must ascend from 0"):
        position_profile(torch.zeros(1), torch.zeros(1).long(), edges=edges)


def test_topk_figures_agree_with_their_definitions_in_probabilities(make_logits):
    student, teacher = make_logits(2, 3, 9), make_logits(2, 3, 9, seed=1)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    student[~mask] = torch.nan
    figures = topk_figures(student, teacher, 4, temperature=0.7, mask=mask)
    assert tuple(figures) == TOPK_FIGURES
    assert all((row[~mask] == 0).all() for row in figures.values())
    for n, (ours, theirs) in enumerate(zip(student[mask], teacher[mask], strict=True)):
        p, q = (ours / 0.7).softmax(-1), (theirs / 0.7).softmax(-1)
        a, b = set(p.topk(4).indices.tolist()), set(q.topk(4).indices.tolist())
        outside = sorted(set(range(9)) - a)
        want = [len(a & b) / 4, p[sorted(a)].sum(), q[sorted(a)].sum(), p[outside].sum(), q[outside].sum()]
        want += [p[sorted(b)].sum(), q[sorted(b)].sum()]
        for row, value in zip(figures.values(), want, strict=True):
            assert row[mask][n].item() == pytest.approx(float(value), rel=1e-9)


def test_a_tail_of_1e_12_is_a_sum_over_the_complement_and_not_a_difference_from_one():
    logits = torch.tensor([[28.0, 0.0, 0.0]])
    figures = topk_figures(logits, logits, 1)
    assert figures["student_tail_mass"].item() == pytest.approx(2 * torch.tensor(-28.0).double().exp().item(), rel=1e-5)
    assert figures["topk_overlap"].item() == 1


def test_a_tiny_tail_of_a_support_is_not_a_difference_from_one_either():
    head, tail = torch.zeros(1, 1), torch.full((1,), -28.0)
    figures = support_figures(head, tail, head, tail)
    for side in ("student", "teacher"):
        assert_close(figures[f"{side}_tail_mass"], tail.exp(), rtol=1e-6, atol=0)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("figure", "arguments", "words"),
    [
        (topk_overlap, [torch.zeros(2, 3), torch.zeros(2, 3).long()], r"student_ids \(float32"),
        (topk_overlap, [torch.zeros(2, 3).long(), torch.zeros(2, 3).cfloat()], r"teacher_ids \(complex64"),
        (topk_overlap, [torch.tensor(1), torch.tensor(1)], r"student_ids \(int64 \[\]\)"),
        (topk_overlap, [torch.zeros(1, 3).long(), torch.zeros(2, 3).long()], "teacher_ids"),
        (support_figures, [torch.zeros(2, 3), torch.zeros(1), torch.zeros(2, 3), torch.zeros(1)], "student_log_probs"),
        (support_figures, [torch.zeros(2, 3), torch.zeros(2), torch.zeros(2, 1), torch.zeros(2)], "teacher_log_probs"),
        (support_figures, [torch.zeros(2, 3), torch.zeros(2), torch.zeros(2, 3), torch.zeros(1)], "teacher_log_tail"),
        (support_figures, [torch.zeros(2, 3).int(), torch.zeros(2), torch.zeros(2, 3), torch.zeros(2)], "float"),
        (topk_figures, [torch.zeros(2, 3), torch.zeros(1, 3), 1], "teacher_logits"),
        (topk_figures, [torch.zeros(2, 3), torch.zeros(2, 3), 4], "k must be"),
        (topk_figures, [torch.zeros(2, 3), torch.zeros(2, 3), 0], "k must be"),
        (position_profile, [torch.zeros(2, 1), torch.zeros(2, 1).long()], "flatten it"),
        (position_profile, [torch.zeros(2), torch.zeros(1).long()], "position"),
        (position_profile, [torch.zeros(2), torch.zeros(2)], "must be integers"),
    ],
)
def test_figures_of_tensors_that_do_not_fit_are_refused_and_not_broadcast(figure, arguments, words):
    with pytest.raises(ValueError, match=words):
        figure(*arguments)


def test_figures_have_no_gradient_and_leave_the_logits_as_they_are(make_logits):
    student, teacher = make_logits(3, 8).requires_grad_(), make_logits(3, 8, seed=1)
    kept = student.detach().clone(), teacher.clone()
    ids = teacher.topk(3).indices
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    tails = [x.scatter(1, ids, -torch.inf).logsumexp(-1) for x in (log_p, log_q)]
    figures = topk_figures(student, teacher, 3) | support_figures(
        log_p.gather(1, ids), tails[0], log_q.gather(1, ids), tails[1]
    )
    assert not any(row.requires_grad for row in figures.values())
    assert_close((student.detach(), teacher), kept, rtol=0, atol=0)


def test_profiles_of_other_edges_are_not_added_and_a_position_before_the_first_edge_counts_as_it():
    one = position_profile(torch.ones(2), torch.tensor([-3, 5]), edges=(0, 4))
    assert one.count.tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"\(0, 4\) and \(0, 5\)"):
        one + position_profile(torch.ones(2), torch.tensor([0, 5]), edges=(0, 5))
