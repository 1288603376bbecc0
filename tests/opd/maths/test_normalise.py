import json
from dataclasses import replace

import forked
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from opd.maths.normalise import MODES, LossWeights, token_weights


def term(lengths, mode, strata=None, padding=0):
    """A term over sequences of the given lengths, with `padding` masked tokens after each."""
    sequence = torch.cat([torch.full((n + padding,), i) for i, n in enumerate(lengths)])
    mask = torch.cat([torch.arange(n + padding) < n for n in lengths])
    stratum = None if strata is None else torch.tensor(strata)[sequence]
    return LossWeights(mask, mode, sequence, len(lengths), stratum, 2 if strata is not None else 1)


def test_the_modes_weigh_tokens_as_their_names_say():
    losses = torch.tensor([1.0, 2, 2, 2, 4, 4, 4, 4, 4, 4])
    # Two sequences with positive advantage, of 1 and 3 tokens, and one negative of 6: the paper's example.
    want = {"token_mean": 3.1, "sequence_mean": 7 / 3, "sequence_sum": 31 / 3, "balanced": 2 / 3 * 1.75 + 4 / 3}
    for mode in MODES:
        weights = token_weights({"x": term([1, 3, 6], mode, strata=[0, 0, 1])})["x"]
        assert (weights * losses).sum().item() == pytest.approx(want[mode], rel=1e-6)


def test_a_sum_over_a_sequence_may_be_divided_by_a_length_that_all_share():
    plain = term([1, 3, 6], "sequence_sum")
    weights = token_weights({"sum": plain, "constant": replace(plain, length=8)})
    assert_close(weights["constant"], weights["sum"] / 8)
    with pytest.raises(ValueError, match="length of term 'x'"):
        token_weights({"x": replace(plain, length=0)})


def test_a_longer_negative_sequence_leaves_the_weight_of_the_positive_ones():
    short, long = (token_weights({"x": term([1, 3, n], "balanced", strata=[0, 0, 1])})["x"][:4] for n in (6, 60))
    assert_close(short, long)


@pytest.mark.parametrize("mode", MODES)
def test_padding_and_empty_sequences_do_not_change_the_weights(mode):
    plain = token_weights({"x": term([2, 5], mode, strata=[0, 1])})["x"]
    padded_term = term([2, 5], mode, strata=[0, 1], padding=3)
    padded = token_weights({"x": padded_term})["x"]
    assert_close(padded[padded_term.mask], plain)
    assert (padded[~padded_term.mask] == 0).all()
    with_empty = token_weights({"x": term([2, 0, 5], mode, strata=[0, 1, 1])})["x"]
    assert_close(with_empty, plain)


@pytest.mark.parametrize("mode", MODES)
def test_a_term_without_tokens_gets_zero_weights_and_not_nan(mode):
    empty = term([0, 0], mode, strata=[0, 1], padding=2)
    assert_close(token_weights({"x": empty})["x"], torch.zeros(4))


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), cut=st.integers(1, 20))
@settings(max_examples=40, deadline=None)
def test_cutting_a_step_into_micro_batches_leaves_loss_and_gradient(lengths, cut):
    logits = torch.randn(sum(lengths), dtype=torch.float64, requires_grad=True)
    for mode in ("token_mean", "sequence_mean", "sequence_sum"):
        weights = token_weights({"x": term(lengths, mode)})["x"]
        (whole,) = torch.autograd.grad((weights * logits.square()).sum(), logits)
        parts = torch.zeros_like(logits)
        for start in range(0, len(logits), cut):
            part = slice(start, start + cut)
            parts += torch.autograd.grad((weights[part] * logits[part].square()).sum(), logits)[0]
        assert_close(parts, whole)


WORKER = """
import json, os, sys, torch
from torch import distributed as dist
from opd.maths import LossWeights, token_weights

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
length = (3, 7)[int(sys.argv[2])]
sequence = torch.zeros(length, dtype=torch.int64)
mask = torch.ones(length, dtype=torch.bool)
terms = {mode: LossWeights(mask, mode, sequence, 1) for mode in ("token_mean", "sequence_mean", "sequence_sum")}
found = {
    f"{mode}/{reduction}": weights[0].item()
    for reduction in ("mean", "sum")
    for mode, weights in token_weights(terms, gradient_reduction=reduction).items()
}
print(json.dumps(found))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks_share_their_denominators(tmp_path):
    found = [json.loads(lines[-1]) for lines in forked.ranks(WORKER, tmp_path / "rendezvous")]
    for weights, length in zip(found, (3, 7), strict=True):
        assert weights["token_mean/sum"] == pytest.approx(1 / 10)
        assert weights["token_mean/mean"] == pytest.approx(2 / 10)
        assert weights["sequence_mean/sum"] == pytest.approx(1 / (2 * length))
        assert weights["sequence_sum/mean"] == pytest.approx(1.0)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mode": "mean"}, "mode of term 'x' must be one of .* 'mean'"),
        ({"mode": "sequence_mean"}, "term 'x' .* needs sequence"),
        ({"mask": torch.ones(3)}, "mask of term 'x' .* must be bool"),
        ({"mode": "balanced", "sequence": torch.zeros(3).long(), "num_sequences": 1}, "needs stratum"),
        ({"sequence": torch.zeros(2).long(), "num_sequences": 1}, r"sequence of term 'x' .* \[3\]"),
    ],
)
def test_terms_that_cannot_work_are_refused(arguments, words):
    bad = LossWeights(**({"mask": torch.ones(3, dtype=torch.bool)} | arguments))
    with pytest.raises(ValueError, match=words):
        token_weights({"x": bad})


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match=r"gradient_reduction .*'max'"):
        token_weights({}, gradient_reduction="max")
