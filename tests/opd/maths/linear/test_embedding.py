import pytest
import torch
from torch.testing import assert_close

from opd.heads import OutputHead
from opd.maths import expected_embedding

N, H, V = 7, 4, 11


@pytest.mark.parametrize("scratch", [None, 1, 8 * V * 3])
def test_it_is_the_mean_of_the_heads_rows_under_the_models_distribution(scratch, make_logits):
    hidden, head, bias = make_logits(N, H), make_logits(V, H, seed=1), make_logits(V, seed=2)
    found = expected_embedding(
        hidden, OutputHead(head, bias, 1.3, 5.0), temperature=0.7, vocab_size=V - 2, scratch_bytes=scratch
    )
    logits = 5.0 * torch.tanh(1.3 * (hidden @ head.T + bias) / 5.0)
    assert_close(found, (logits[:, :-2] / 0.7).softmax(-1) @ head[:-2])


def test_the_row_of_a_token_minus_it_is_the_gradient_of_its_log_prob(make_logits):
    hidden, head = make_logits(N, H).requires_grad_(), make_logits(V, H, seed=1)
    y = torch.arange(N)
    (gradient,) = torch.autograd.grad((hidden @ head.T).log_softmax(-1)[y, y].sum(), hidden)
    assert_close(head[y] - expected_embedding(hidden, head), gradient)


def test_a_half_precision_head_is_summed_in_float32(make_logits):
    hidden, head = make_logits(N, H).bfloat16(), make_logits(V, H, seed=1).bfloat16()
    found = expected_embedding(hidden, head)
    assert found.dtype == torch.float32
    assert_close(found, expected_embedding(hidden.double(), head.double()).float())


@pytest.mark.parametrize("scratch", [None, 8 * V])
def test_a_row_without_a_distribution_is_refused_by_its_number_unless_values_are_not_looked_at(scratch, make_logits):
    hidden, head = make_logits(N, H), make_logits(V, H, seed=1)
    hidden[5, 2] = torch.nan
    with pytest.raises(ValueError, match=r"hidden.* 5\b"):
        expected_embedding(hidden, head, scratch_bytes=scratch)
    found = expected_embedding(hidden, head, scratch_bytes=scratch, check_values=False)
    assert found[5].isnan().all() and found[:5].isfinite().all()


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"scratch_bytes": 0}, {"vocab_size": V + 1}])
def test_settings_that_cannot_work_are_refused(wrong, make_logits):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        expected_embedding(make_logits(N, H), make_logits(V, H, seed=1), **wrong)
