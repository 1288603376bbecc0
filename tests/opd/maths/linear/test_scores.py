import pytest
import torch
from torch.testing import assert_close

from opd.heads import OutputHead
from opd.maths.head_tail import head_tail_reverse_kl
from opd.maths.linear.scores import linear_token_scores, linear_topk
from opd.maths.scores import score_tokens

N, V, H, K = 11, 23, 5, 4


@pytest.fixture
def model(make_logits):
    """Hidden states, head and bias with gradient."""
    return [make_logits(*shape, seed=i).requires_grad_() for i, shape in enumerate([(N, H), (V, H), (V,)])]


def logits_of(hidden, head, bias):
    return 5.0 * torch.tanh(1.3 * (hidden @ head.T + bias) / 5.0)


@pytest.mark.parametrize("scratch", [None, 1, 8 * V * 3])
def test_scores_and_gradients_equal_those_of_the_materialised_logits(scratch, model, make_logits):
    ids, y = make_logits(N, V, seed=5).topk(K).indices, torch.arange(N)
    mask = torch.arange(N) % 4 != 2
    hidden, weight, bias = model
    got = linear_token_scores(
        hidden,
        OutputHead(weight, bias, scale=1.3, soft_cap=5.0),
        candidate_ids=ids,
        sampled_ids=y,
        temperature=0.7,
        mask=mask,
        scratch_bytes=scratch,
    )
    want = score_tokens(logits_of(*model), candidate_ids=ids, sampled_ids=y, temperature=0.7, mask=mask)
    upstream = make_logits(K + 4, N, seed=6)
    gradients = []
    for scores in (got, want):
        total = (upstream[4:].T * scores.candidates).sum() + (upstream[0] * scores.sampled).sum()
        total = total + (upstream[1] * scores.log_tail + upstream[2] * scores.log_z).sum()
        total = total + (upstream[3] * scores.mean_log_prob).sum()
        gradients.append(torch.autograd.grad(total, model))
    for name in ("candidates", "sampled", "log_tail", "log_z", "entropy", "mean_log_prob"):
        assert_close(getattr(got, name), getattr(want, name))
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other)


def test_the_default_estimator_runs_on_them_unchanged(model, make_logits):
    teacher = make_logits(N, V, seed=7).log_softmax(-1)
    hidden, head, _ = model
    y = torch.arange(N)
    ids = linear_topk(hidden, head, K)
    arguments = (y, ids, teacher.gather(1, ids), teacher.gather(1, y[:, None]).squeeze(1))
    fused = head_tail_reverse_kl(linear_token_scores(hidden, head, candidate_ids=ids, sampled_ids=y), *arguments)
    plain = head_tail_reverse_kl(hidden @ head.T, *arguments)
    assert_close(fused.per_token, plain.per_token)
    for one, other in zip(*(torch.autograd.grad(r.mean, [hidden, head]) for r in (fused, plain)), strict=True):
        assert_close(one, other)


def test_topk_finds_the_ids_of_the_materialised_logits_and_skips_padding(model):
    hidden, head, bias = model
    assert_close(
        linear_topk(hidden, OutputHead(head, bias), 3, scratch_bytes=8 * V * 2),
        (hidden @ head.T + bias).topk(3).indices,
    )
    assert linear_topk(hidden, head, 3, vocab_size=10).max() < 10


def test_gradcheck(make_logits):
    ids, y = torch.tensor([[0, 2], [1, 4], [3, 2]]), torch.tensor([1, 1, 0])
    hidden, head = make_logits(3, 4).requires_grad_(), make_logits(5, 4, seed=1).requires_grad_()

    def total(h, w):
        scores = linear_token_scores(h, w, candidate_ids=ids, sampled_ids=y)
        return scores.candidates.square().sum() + scores.log_tail.square().sum() + scores.sampled.sum()

    assert torch.autograd.gradcheck(total, (hidden, head))


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": torch.zeros(2, 4)}, r"hidden \(float32 \[2, 4\]\) must have shape \[2, 3\]"),
        ({"candidate_ids": torch.tensor([[0, 0], [1, 2]])}, "repeats an id in row 0"),
        ({"sampled_ids": torch.tensor([0, 9])}, "holds the id 9"),
        ({"vocab_size": 6}, r"vocab_size must be an integer in \[1, 5\].* 6"),
        ({"head": OutputHead(torch.zeros(5, 3), torch.zeros(4))}, r"head.bias .* must have shape \[5\]"),
        ({"hidden": torch.full((2, 3), torch.nan)}, r"hidden \(float32 \[2, 3\]\) .* logsumexp nan in row 0"),
    ],
)
def test_bad_input_is_refused_with_name_shape_and_value(changes, words):
    good = {"hidden": torch.zeros(2, 3), "head": torch.zeros(5, 3)}
    with pytest.raises(ValueError, match=words):
        linear_token_scores(**(good | changes))


def test_k_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"k must .*\[1, 5\].* 6"):
        linear_topk(torch.zeros(2, 3), torch.zeros(5, 3), 6)
