import pytest
import torch
from torch.testing import assert_close

from opd.maths.scores import score_tokens


def test_all_outputs_have_the_gradient_of_their_definitions(make_logits):
    logits = make_logits(2, 5, 7, seed=1).requires_grad_()
    ids = make_logits(2, 5, 7, seed=2).topk(3).indices
    y = torch.tensor([[0, 1, 2, 3, 4], [6, 5, 4, 3, 2]])
    mask = make_logits(2, 5, seed=3) > -1
    weights = make_logits(6, 2, 5, seed=4)

    def total(leaf):
        scores = score_tokens(leaf, candidate_ids=ids, sampled_ids=y, temperature=0.6, mask=mask)
        head = (scores.candidates * weights[3:6].movedim(0, -1)).sum()
        return head + (weights[0] * scores.sampled + weights[1] * scores.log_tail + weights[2] * scores.log_z).sum()

    assert torch.autograd.gradcheck(total, (logits,))


def test_values_equal_log_softmax(make_logits):
    logits = make_logits(4, 9, seed=5)
    ids, y = logits.topk(3).indices, torch.tensor([0, 3, 8, 2])
    scores = score_tokens(logits, candidate_ids=ids, sampled_ids=y, temperature=1.3)
    truth = (logits / 1.3).log_softmax(-1)
    assert_close(scores.candidates, truth.gather(1, ids))
    assert_close(scores.sampled, truth.gather(1, y[:, None]).squeeze(1))
    assert_close(scores.log_tail, truth.scatter(1, ids, -torch.inf).logsumexp(-1))
    assert_close(scores.log_z, (logits / 1.3).logsumexp(-1))
    assert_close(scores.entropy, torch.distributions.Categorical(logits=truth).entropy())
    assert_close(scores.mean_log_prob, truth.mean(-1))


def test_the_mean_log_prob_has_its_gradient(make_logits):
    logits = make_logits(4, 9, seed=5).requires_grad_()
    upstream = make_logits(4, seed=6)
    found = torch.autograd.grad(score_tokens(logits, temperature=1.3).mean_log_prob, logits, upstream)
    assert_close(found, torch.autograd.grad((logits / 1.3).log_softmax(-1).mean(-1), logits, upstream))


def test_a_tail_of_1e_12_keeps_its_relative_accuracy_in_float32(make_logits):
    logits = make_logits(3, 50, seed=6)
    logits[:, 0] += 30
    ids = torch.zeros(3, 1, dtype=torch.int64)
    single, double = logits.float().requires_grad_(), logits.float().double().requires_grad_()
    got, want = score_tokens(single, candidate_ids=ids), score_tokens(double, candidate_ids=ids)
    assert want.log_tail.exp().max() < 1e-9
    assert_close(got.log_tail.double(), want.log_tail, rtol=1e-6, atol=0)
    got.log_tail.sum().backward()
    want.log_tail.sum().backward()
    assert_close(single.grad.double(), double.grad, rtol=1e-5, atol=1e-6)


def test_candidates_that_cover_the_vocabulary_leave_an_empty_tail_without_gradient(make_logits):
    logits = make_logits(2, 4, seed=7).requires_grad_()
    scores = score_tokens(logits, candidate_ids=torch.arange(4).expand(2, 4))
    assert scores.log_tail.isneginf().all()
    (gradient,) = torch.autograd.grad(scores.log_tail.sum(), logits)
    assert (gradient == 0).all()


def test_bfloat16_logits_are_scored_in_float32(make_logits):
    logits = make_logits(3, 4000, seed=8).bfloat16()
    ids = logits.topk(4).indices
    got, want = score_tokens(logits, candidate_ids=ids), score_tokens(logits.double(), candidate_ids=ids)
    assert got.candidates.dtype == torch.float32
    assert_close(got.candidates.double(), want.candidates, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("unchecked_types")
def test_a_nan_row_is_refused_unless_masked():
    logits = torch.zeros(2, 3)
    logits[1, 1] = torch.nan
    with pytest.raises(ValueError, match=r"logits \(float32 \[2, 3\]\) .*NaN in row 1"):
        score_tokens(logits)
    assert score_tokens(logits, mask=torch.tensor([True, False])).log_z.isfinite().all()
