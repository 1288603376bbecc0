"""What a batch's mean does to unbiased estimates, by writing out every batch of a tiny language.

Nothing is shared with benchmarks/support/sequences.py, which gets the same numbers by summing over prefixes: here a
batch is built and weighed by `token_weights`.
"""

import math
from functools import cache
from itertools import product

import pytest
import torch

from opd.maths import LossWeights, head_tail_reverse_kl, reverse_kl, sampled_reverse_kl, token_weights
from support.estimator_forms import ESTIMATORS
from support.sequences import Language, batch_bias

END, LONGEST = 3, 3
MODES = {"constant": "sequence_sum", "sequence_mean": "sequence_mean", "token_mean": "token_mean"}
LANGUAGE = Language.make(0.5, seed=1)
STUDENT, TEACHER = LANGUAGE.problem.student, LANGUAGE.problem.teacher
PREFIXES = [prefix for length in range(LONGEST) for prefix in product(range(END), repeat=length)]


def responses(begun=()):
    """(tokens, probability) of everything that the student can write."""
    if len(begun) == LONGEST or begun[-1:] == (END,):
        return [(begun, 1.0)]
    p = STUDENT.softmax(-1)[PREFIXES.index(begun)]
    return [(y, float(p[v]) * share) for v in range(END + 1) for y, share in responses((*begun, v))]


def losses(form, leaf):
    """[P, V] the loss of every token after every prefix."""
    rows, y = torch.arange(len(PREFIXES)).repeat_interleave(END + 1), torch.arange(END + 1).repeat(len(PREFIXES))
    log_q = TEACHER.log_softmax(-1)
    if form == "sampled":
        found = sampled_reverse_kl(leaf[rows], y, log_q[rows, y])
    elif form == "hidden":
        found = reverse_kl(leaf[rows], TEACHER[rows])
    else:
        ids = STUDENT.topk(2).indices
        tail = log_q.scatter(1, ids, -torch.inf).logsumexp(-1)
        values = log_q.gather(1, ids)
        found = head_tail_reverse_kl(leaf[rows], y, ids[rows], values[rows], log_q[rows, y], tail[rows])
    return found.per_token.view(len(PREFIXES), END + 1)


@cache
def expected_weights(aggregation, size):
    """[P, V] of every token after every prefix, over all batches of `size` responses."""
    total = torch.zeros(len(PREFIXES), END + 1, dtype=torch.float64)
    for batch in product(responses(), repeat=size):
        tokens = [(PREFIXES.index(y[:t]), y[t], i) for i, (y, _) in enumerate(batch) for t in range(len(y))]
        rows, y, sequence = torch.tensor(tokens).unbind(1)
        mask = torch.ones(len(rows), dtype=torch.bool)
        weighed = LossWeights(mask, MODES[aggregation], sequence, size, length=LONGEST)
        weights = token_weights({"opd": weighed})["opd"].double()
        share = math.prod(share for _, share in batch)
        total.index_put_((rows, y), share * weights, accumulate=True)
    return total


def expected_gradient(form, aggregation, size):
    leaf = STUDENT.clone().requires_grad_()
    total = (expected_weights(aggregation, size) * losses(form, leaf)).sum()
    return torch.autograd.grad(total, leaf)[0]


def bias(form, aggregation, size=1):
    want = expected_gradient("hidden", aggregation, size)
    return float((expected_gradient(form, aggregation, size) - want).norm() / want.norm())


@pytest.mark.parametrize("form", ["sampled", "gather"])
def test_the_constant_aggregation_keeps_estimates_unbiased_over_whole_responses(form):
    assert bias(form, "constant") < 1e-6  # weights are float32


@pytest.mark.parametrize("form", ["sampled", "gather"])
@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
def test_a_mean_over_lengths_biases_what_depends_on_the_sampled_token(form, aggregation):
    assert bias(form, aggregation) > 0.03


def test_more_rows_lower_the_bias_of_the_token_mean_and_not_of_the_sequence_mean():
    assert bias("sampled", "token_mean", 2) < 0.6 * bias("sampled", "token_mean")
    assert bias("sampled", "sequence_mean", 2) == pytest.approx(bias("sampled", "sequence_mean"), rel=1e-4)


@pytest.mark.parametrize(("form", "name"), [("sampled", "policy_gradient"), ("gather", "tail_mean, K=64")])
@pytest.mark.parametrize(("aggregation", "size"), [("sequence_mean", 1), ("token_mean", 1), ("token_mean", 2)])
def test_the_pages_figures_are_those_of_batches_written_out(form, name, aggregation, size):
    estimator = next(e for e in ESTIMATORS if e.name.endswith(name))
    assert batch_bias(estimator, LANGUAGE, aggregation, size) == pytest.approx(bias(form, aggregation, size), rel=1e-4)
