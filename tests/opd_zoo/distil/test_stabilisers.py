"""vOPD, bounded rewards, trust regions, token selection: against numbers and gradients worked out by hand."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gradients import expectation, gradient, logp, scores
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from opd_zoo.distil.compressed import compress
from opd_zoo.distil.gated_exopd import gate
from opd_zoo.distil.iw_opd import prefix_weights
from opd_zoo.distil.mask_tokens import MaskTokens, MaskTokensSettings
from opd_zoo.distil.selection import spread, top_share
from opd_zoo.distil.tide import worst
from student.data.needs import REFERENCE, TEACHER
from student.data.outcome import gather_outcomes
from student.methods.distil.token_set import TokenSetSettings
from student.plugin.controllers import begin
from student.plugin.terms import TermOutput, build_terms


def output(made: Any, **settings: Any) -> TermOutput:
    (term,) = build_terms([settings])
    term.prepare(made.rows)
    return term.token_losses(made.batch())


def ratio(made: Any) -> Tensor:
    """log S - log T of the response tokens."""
    return (logp(made) - made.logp(*made.models[TEACHER])).gather(1, made.token_ids[:, None])[:, 0]


def spread_of_gradients(made: Any, **settings: Any) -> float:
    """Variance of the gradient over the student's own tokens, summed over its entries."""
    mean, p, total = expectation(made, **settings), logp(made).exp(), 0.0
    for token in range(made.vocab):
        made.token_ids = torch.full_like(made.token_ids, token)
        total += float((p[:, token, None] * (gradient(made, **settings) - mean).square()).sum())
    return total


def test_vopd_is_unbiased_and_varies_less_than_plain_sampling(toy: Any) -> None:
    made = toy(masked=False)
    exact = gradient(made, name="opd", payload="hidden")
    torch.testing.assert_close(expectation(made, name="vopd"), exact, rtol=1e-5, atol=1e-8)
    plain = spread_of_gradients(made, name="opd", payload="sampled")
    assert spread_of_gradients(made, name="vopd") < plain
    made.candidates = torch.arange(made.vocab).expand(len(made.hidden), -1)
    assert spread_of_gradients(made, name="vopd") < 0.9 * plain


@pytest.mark.parametrize("alpha", [0.5, 1.0, 4.0])
def test_the_reward_of_poweropd_is_bounded_and_of_the_sign_of_the_log_ratio(toy: Any, alpha: float) -> None:
    made = toy(masked=False)
    student, teacher = made.behaviour, made.behaviour - ratio(made)
    expected = (teacher.exp() ** alpha - student.exp() ** alpha) / alpha
    assert (expected.abs() <= 1 / alpha).all() and (expected.sign() == -ratio(made).sign()).all()
    total, count = output(made, name="poweropd", alpha=alpha).metrics["reverse_kl"]
    assert float(total) == pytest.approx(float(ratio(made).sum())) and float(count) == len(expected)
    actual = gradient(made, name="poweropd", alpha=alpha)
    torch.testing.assert_close(actual, -expected[:, None] * scores(made) / len(expected), rtol=1e-5, atol=1e-8)


def test_poweropd_becomes_plain_distillation_as_alpha_vanishes(toy: Any) -> None:
    made = toy(masked=False)
    small = gradient(made, name="poweropd", alpha=1e-6)
    torch.testing.assert_close(small, gradient(made, name="opd", payload="sampled"), rtol=1e-4, atol=1e-7)


def test_reopold_floors_the_reward_at_the_mixtures_bound(toy: Any) -> None:
    made = toy(masked=False, seed=3)
    floor = math.log(0.5) / 0.5
    assert (-ratio(made) < floor).any() and (-ratio(made) > floor).any()
    actual = gradient(made, name="reopold", mixture=0.5, retention=1.0)
    expected = (-ratio(made)).clamp(min=floor)
    torch.testing.assert_close(actual, -expected[:, None] * scores(made) / len(expected), rtol=1e-5, atol=1e-8)


def test_reopold_explores_above_the_floor_and_refines_where_the_student_is_uncertain(toy: Any) -> None:
    made = toy(masked=False, seed=3)
    floor = math.log(0.5) / 0.5
    exploring = gradient(made, name="reopold", mixture=0.5, exploration_steps=1, retention=0.5)
    assert ((exploring == 0).all(-1) == (-ratio(made) < floor)).all()
    refining = gradient(made, name="reopold", mixture=0.5, retention=0.5)
    entropy = -(logp(made).exp() * logp(made)).sum(-1)
    for row in range(4):
        mine = made.row == row
        kept = (refining[mine] != 0).any(-1)
        assert kept.sum() == math.ceil(mine.sum() / 2)
        assert kept.all() or entropy[mine][kept].min() > entropy[mine][~kept].max()


def test_the_metrics_of_shaped_rewards_are_means_over_trained_tokens(toy: Any) -> None:
    made = toy(seed=3)  # some tokens are masked
    mask = made.batch().mask
    far = (ratio(made).abs() > 0.5) & mask
    assert 0 < far.sum() < mask.sum() and not mask.all()
    top, count = output(made, name="compressed", limit=0.5).metrics["clipped_share"]
    assert (int(top), int(count)) == (int(far.sum()), int(mask.sum()))
    weights = prefix_weights(-ratio(made), made.row, mask, 0.5, normalise=False)
    top, count = output(made, name="iw_opd").metrics["mean_weight"]
    assert float(top) == pytest.approx(float(weights[mask].sum())) and int(count) == int(mask.sum())


def by_entropy(made: Any) -> Tensor:
    """From -0.5 to -1 in each response, in a straight line by the student's entropy; -1 for a token alone."""
    entropy = -(logp(made).exp() * logp(made)).sum(-1)
    found = torch.full_like(entropy, -1.0)
    for row in made.row.unique():
        mine = entropy[made.row == row]
        if len(mine) > 1:
            found[made.row == row] = -0.5 - 0.5 * (mine - mine.min()) / (mine.max() - mine.min())
    return found


SHAPED: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor, Any], Tensor]]] = {
    "iw_opd": ({"gamma": 0.5}, lambda d, r, made: d * prefix_weights(d, made.row, d.isfinite(), 0.5, normalise=False)),
    "compressed": ({"limit": 0.5}, lambda d, r, made: d.clamp(-0.5, 0.5)),
    "compressed by its logarithm": ({"form": "log"}, lambda d, r, made: compress(d)),
    "gated_exopd": ({"gamma": 0.5, "tau": 1.0}, lambda d, r, made: d + 0.5 * gate(d, 1.0) * r),
    "tide": ({"excess_share": 1.0, "deficit_share": 0.0}, lambda d, r, made: (2.0 * (d / 2.0).expm1()).clamp(max=0.0)),
    "tail_null": ({"share": 1.0, "low": -0.3}, lambda d, r, made: torch.full_like(d, -0.3)),
    "tail_null by entropy": ({"share": 1.0, "low": -1.0, "form": "entropy"}, lambda d, r, made: by_entropy(made)),
}
"""The reward of a token from log T - log S and log T - log R."""


@pytest.mark.parametrize("name", SHAPED)
def test_a_shaped_reward_is_the_weight_of_the_score(toy: Any, name: str) -> None:
    made = toy(masked=False, seed=3)
    (settings, reward), d = SHAPED[name], -ratio(made)
    teacher, reference = (made.logp(*made.models[role]) for role in (TEACHER, REFERENCE))
    expected = reward(d, (teacher - reference).gather(1, made.token_ids[:, None])[:, 0], made)
    assert (d > 0.5).any() and (d < -0.5).any()
    actual = gradient(made, name=name.partition(" ")[0], **settings)
    torch.testing.assert_close(actual, -expected[:, None] * scores(made) / len(d), rtol=1e-5, atol=1e-8)


def test_tide_injects_the_teachers_top_k_where_the_student_lacks_them(toy: Any) -> None:
    made = toy(masked=False, seed=3)
    theirs = made.logp(*made.models[TEACHER]).topk(2, dim=-1)
    wanted = torch.zeros_like(logp(made)).scatter(1, theirs.indices, theirs.values.softmax(-1))
    missing = (wanted * (torch.where(wanted > 0, wanted.log(), 0.0) - logp(made))).sum(-1)
    lacking = worst(missing, made.row, missing.isfinite(), 0.5)
    assert lacking.any() and not lacking.all()
    # S is not made to sum to 1 over the two, so the gradient is that of a cross-entropy over the vocabulary.
    expected = 0.5 * lacking[:, None] * (logp(made).exp() - wanted) @ made.head.detach() / len(lacking)
    actual = gradient(made, name="tide", k=2, excess_share=0.0, deficit_share=0.5, injection=0.5)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("outlier", ["mask", "clip", "forward_kl"])
def test_tropd_weighs_policy_gradient_and_outlier_rule_by_the_acceptance_probability(toy: Any, outlier: str) -> None:
    made = toy(masked=False, seed=3)
    count = len(made.row)
    trust = (-ratio(made)).exp().clamp(max=1.0)[:, None]
    plain = ratio(made)[:, None] * scores(made) / count
    other = {
        "mask": torch.zeros_like(plain),
        "clip": ratio(made).clamp(max=1.0)[:, None] * scores(made) / count,
        "forward_kl": gradient(made, name="opd", payload="topk", divergence="forward_kl"),
    }[outlier]
    actual = gradient(made, name="tropd", outlier=outlier, clip=1.0)
    torch.testing.assert_close(actual, trust * plain + (1 - trust) * other, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("outlier", ["mask", "clip", "forward_kl"])
def test_tropd_survives_a_token_that_the_teacher_excludes(toy: Any, outlier: str) -> None:
    made = toy(masked=False)
    hidden, head = made.models[TEACHER]
    head = head.clone()
    head[int(made.token_ids[0])] = 0.0
    hidden = hidden.clone()
    head[:, 0], hidden[:, 0] = 0.0, 1.0
    head[int(made.token_ids[0]), 0] = -500.0
    made.models[TEACHER] = (hidden, head)
    assert gradient(made, name="tropd", outlier=outlier).isfinite().all()


@given(
    st.lists(st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=1, max_size=7), min_size=1, max_size=4),
    st.sampled_from([0.1, 0.2, 0.5, 0.9, 1.0]),
)
def test_a_share_is_taken_in_each_row_from_the_top(rows: list[list[tuple[float, bool]]], share: float) -> None:
    score = torch.tensor([value for row in rows for value, _ in row])
    mask = torch.tensor([open_ for row in rows for _, open_ in row])
    index = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(row) for row in rows]))
    chosen, factor = top_share(score, index, mask, share)
    assert not (chosen & ~mask).any()
    for r in range(len(rows)):
        mine = index == r
        available = int(mask[mine].sum())
        assert int(chosen[mine].sum()) == math.ceil(available * share - 1e-9)
        left_out = score[mine & mask & ~chosen]
        if len(left_out) and chosen[mine].any():
            assert score[mine & chosen].min() >= left_out.max()
        assert float(factor[mine & chosen].sum()) == pytest.approx(available, rel=1e-5)


def test_spread_scales_each_row_to_the_unit_interval() -> None:
    values, row = torch.tensor([1.0, 3.0, 2.0, 9.0, 5.0, 5.0]), torch.tensor([0, 0, 0, 0, 1, 1])
    mask = torch.tensor([True, True, True, False, True, True])
    assert spread(values, row, mask).tolist() == [0.0, 1.0, 0.5, 0.0, 0.0, 0.0]


def test_full_retention_is_plain_distillation(toy: Any) -> None:
    made = toy()
    for payload in ("gather", "hidden"):
        selected = gradient(made, name="tip", payload=payload, score="entropy", retention=1.0)
        torch.testing.assert_close(selected, gradient(made, name="opd", payload=payload))


@pytest.mark.parametrize("payload", ["gather", "hidden"])
def test_tip_trains_the_chosen_tokens_and_keeps_each_rows_share(toy: Any, payload: str) -> None:
    made = toy(masked=False)
    plain = gradient(made, name="opd", payload=payload)
    selected = gradient(made, name="tip", payload=payload, score="entropy", retention=0.4)
    entropy = -(logp(made).exp() * logp(made)).sum(-1)
    for row in range(4):
        mine = made.row == row
        kept = entropy[mine] >= entropy[mine].sort(descending=True).values[math.ceil(0.4 * int(mine.sum())) - 1]
        factor = float(mine.sum()) / float(kept.sum())
        torch.testing.assert_close(selected[mine], plain[mine] * kept[:, None] * factor, rtol=1e-5, atol=1e-9)


def test_soft_or_finds_confident_mistakes_that_entropy_misses(toy: Any) -> None:
    made = toy(lengths=(4,), group=1, masked=False)
    made.hidden = made.hidden * 0.3
    made.models[TEACHER] = (made.hidden.clone(), made.head.clone())
    # Position 2: the student is sure of its mode, the teacher of the opposite.
    made.hidden[2] *= 40.0
    made.models[TEACHER][0][2] = -made.hidden[2]
    made.candidates = made.logp(made.hidden, made.head).topk(made.k, dim=-1).indices
    kept = {
        score: (gradient(made, name="tip", score=score, retention=0.25) != 0).any(-1).tolist()
        for score in ("entropy", "divergence")
    }
    assert not kept["entropy"][2]
    assert kept["divergence"] == [False, False, True, False]
    assert float(output(made, name="tip", score="soft_or", retention=0.5).metrics["selected_share"][0]) == 2


def test_overlap_keeps_the_tokens_where_the_teachers_top_k_is_the_students(toy: Any) -> None:
    made = toy(lengths=(4,), group=1, masked=False, seed=2)
    overlap = [len(set(a) & set(b)) for a, b in zip(made.candidates.tolist(), made.teacher_ids().tolist(), strict=True)]
    kept = (gradient(made, name="tip", score="overlap", payload="topk", retention=0.25) != 0).any(-1)
    assert overlap[int(kept.nonzero())] == max(overlap) and kept.sum() == 1


class FakeTokenizer:
    """Characters as ids; 0 and 1 are special."""

    all_special_ids = (0, 1)

    def __len__(self) -> int:
        return 300

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}


def test_masked_tokens_leave_losses_and_denominators(toy: Any) -> None:
    made = toy(masked=False)
    banned = int(made.token_ids[0])
    controller = MaskTokens(MaskTokensSettings(name="mask_tokens", tokens=TokenSetSettings(ids=[banned])))

    class Services:
        tokenizer = FakeTokenizer()
        outcomes: Any = ()

    begin(controller, Services())  # type: ignore[arg-type]
    rows = controller.compose(made.rows)
    hit = made.token_ids == banned
    assert np.concatenate([row.loss_mask for row in rows]).tolist() == (~hit).tolist()
    Services.outcomes = gather_outcomes(rows)[0]
    hidden = gradient(made, name="opd", payload="sampled")
    assert (hidden[hit] == 0).all()
    expected = ratio(made)[:, None] * scores(made) / float((~hit).sum())
    torch.testing.assert_close(hidden[~hit], expected[~hit], rtol=1e-5, atol=1e-8)
    assert controller.after_update(0, Services())["masked_share"] == pytest.approx(float(hit.float().mean()))  # type: ignore[arg-type]
