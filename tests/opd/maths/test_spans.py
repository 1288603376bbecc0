"""Reverse KL over spans: the numbers of a small world, its gradient, and that of one tokenizer."""

import itertools

import pytest
import torch

from opd.maths import sampled_reverse_kl, score_tokens, span_reverse_kl, sum_over_spans

STUDENT = torch.tensor([[0.5, 0.1, 1.2, -0.3], [0.2, -0.4, 0.3, 1.5]])  # of a, b, ab and .
TEACHER = torch.tensor([[1.0, 0.2, -0.5], [0.1, 1.4, 0.3], [-0.2, 0.4, 1.1]])  # of a, b and .
IDS = torch.tensor([2, 3])  # ab. to the student; a, b, . to the teacher
T = TEACHER.log_softmax(-1)
SPOKEN = torch.stack([T[0, 0] + T[1, 1], T[2, 2]])


def test_the_log_probs_of_the_world_are_those_known() -> None:
    mine = score_tokens(STUDENT, sampled_ids=IDS).sampled
    torch.testing.assert_close(mine, torch.tensor([-0.719101, -0.544238]), atol=1e-6, rtol=0)
    torch.testing.assert_close(SPOKEN, torch.tensor([-0.987670, -0.570481]), atol=1e-6, rtol=0)
    result = span_reverse_kl(score_tokens(STUDENT, sampled_ids=IDS), torch.arange(2), SPOKEN)
    assert float(result.total) == pytest.approx(0.294812, abs=1e-6)


def test_tokens_of_a_span_share_its_log_ratio() -> None:
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    ids, span = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 0, 2, -1, 2])
    teacher = -torch.rand(5, dtype=torch.float64)
    scores = score_tokens(logits, sampled_ids=ids)
    result = span_reverse_kl(scores, span, teacher)
    ratio = (scores.sampled - teacher).detach()
    first, second = ratio[[0, 1]].sum(), ratio[[2, 4]].sum()
    torch.testing.assert_close(result.per_token.detach(), torch.stack([first, first, second, second * 0, second]) / 2)
    (gradient,) = torch.autograd.grad(result.total, logits, retain_graph=True)
    want = torch.stack([first, first, second, second * 0, second]) * scores.sampled
    torch.testing.assert_close(gradient, torch.autograd.grad(want.sum(), logits)[0])


@pytest.mark.parametrize("cap", [None, 1.1])
def test_spans_of_one_token_are_the_estimate_from_the_sampled_token(cap: float | None) -> None:
    logits = torch.randn(6, 9, requires_grad=True)
    ids, teacher, behaviour = torch.randint(9, (6,)), -torch.rand(6), -torch.rand(6)
    mask = torch.tensor([True, True, False, True, True, True])
    weights = {} if cap is None else {"behaviour_log_probs": behaviour, "importance_cap": cap}
    found = span_reverse_kl(score_tokens(logits, sampled_ids=ids), torch.arange(6), teacher, mask=mask, **weights)
    want = sampled_reverse_kl(logits, ids, teacher, mask=mask, **weights)
    torch.testing.assert_close(found.per_token, want.per_token)
    for one, other in itertools.zip_longest(
        torch.autograd.grad(found.total, logits), torch.autograd.grad(want.total, logits)
    ):
        torch.testing.assert_close(one, other)


def test_a_span_counts_its_masked_tokens_but_trains_only_the_others() -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    scores = score_tokens(logits, sampled_ids=torch.tensor([0, 1, 2]))
    mask = torch.tensor([True, False, True])
    result = span_reverse_kl(scores, torch.tensor([0, 0, 2]), -torch.ones(3), mask=mask)
    ratio = (scores.sampled + 1).detach()
    assert result.per_token[0].item() == pytest.approx(float(ratio[:2].sum() / 2), abs=1e-6)
    assert result.per_token[1].item() == 0 and int(result.count) == 2


def test_sums_leave_out_what_has_no_span() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 8.0])
    assert sum_over_spans(values, torch.tensor([0, -1, 0, 3])).tolist() == [5, 0, 5, 8]


def test_the_expected_gradient_is_that_of_the_divergence_between_texts() -> None:
    """Every text of at most three letters: student tokens a, b, ab and stop; teacher tokens a, b and stop."""
    own = torch.randn(4, 4, dtype=torch.float64, generator=torch.manual_seed(0)).requires_grad_()
    other = torch.randn(3, 3, dtype=torch.float64)
    spelled = {0: [0], 1: [1], 2: [0, 1], 3: [2]}

    def texts() -> list[list[int]]:
        """All sequences of one or two tokens and a stop, the second of which may be the stop."""
        return [[3], *([a, 3] for a in range(3)), *([a, b] for a in range(3) for b in range(3))]

    def student(ids: list[int]) -> torch.Tensor:
        rows = own[[0, *(i for i in ids)]].log_softmax(-1)  # the row of a state is that of its last token
        return torch.stack([rows[t, i] for t, i in enumerate(ids)])

    def teacher(ids: list[int]) -> torch.Tensor:
        letters = [spelled[i] for i in ids]
        flat = [0, *(letter for part in letters for letter in part)]
        rows = other[flat].log_softmax(-1)
        said, at = [], 0
        for part in letters:
            said.append(torch.stack([rows[at + n, letter] for n, letter in enumerate(part)]).sum())
            at += len(part)
        return torch.stack(said)

    exact = sum(student(ids).sum().exp() * (student(ids).sum() - teacher(ids).sum()) for ids in texts())
    (want,) = torch.autograd.grad(exact, own)
    expected = torch.zeros_like(own)
    for ids in texts():
        rows = own[[0, *ids[:-1]]]
        scores = score_tokens(rows, sampled_ids=torch.tensor(ids))
        span = torch.arange(len(ids))
        loss = span_reverse_kl(scores, span, teacher(ids).detach()).total
        # The return-to-go form: later spans credit earlier tokens too.
        ratio = (scores.sampled - teacher(ids)).detach()
        loss = loss + sum(ratio[t + 1 :].sum() * scores.sampled[t] for t in range(len(ids)))
        expected = expected + student(ids).sum().exp().detach() * torch.autograd.grad(loss, own)[0]
    torch.testing.assert_close(expected, want, rtol=1e-9, atol=1e-12)
