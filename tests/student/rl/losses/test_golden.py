"""Golden numbers of the policy losses: weights and kept tokens at given ratios, and REINFORCE on policy."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from registered import registered

from opd.wire.types import PayloadKind, Scores
from student.data.outcome import gather_outcomes
from student.data.token_batch import SignalTokens
from student.learning.objective import Objective
from student.plugin.terms import OBJECTIVES, build_terms
from student.rl.losses.policy_gradient import PolicyGradient

LOSSES = {
    entry.name
    for entry in OBJECTIVES
    if ".losses." in entry.path
    and issubclass(OBJECTIVES.load(entry.name), PolicyGradient)
    and not ("teacher" in entry.path or "rlsd" in entry.path)  # whose credit is a teacher's
    and entry.name != "rover"  # a regression
}
NAMES = [one for one in registered(OBJECTIVES) if one.id in LOSSES]
FIXED = {"name": "signed", "positive": 1.0}
ON_POLICY: dict[str, dict[str, Any]] = {
    "minirl": {"ratio_to": "behaviour"},
    "dapo": {"skip_degenerate": False},
    "a_lol": {"ratio": "none"},  # whose ratio is to a reference
}
"""Settings with which the policy that sampled is the one that the ratio is to."""


def factors(toy: Any, ratios: list[float], good: bool, name: str, **settings: Any) -> tuple[list[float], Any]:
    """d loss / d log pi over -A of each token of one row, and the metrics."""
    made = toy(lengths=(len(ratios),), group=1, masked=False)
    made.rows[0].reward = 1.0 if good else 0.0
    logp = made.logp(made.hidden, made.head).gather(1, made.token_ids[:, None])[:, 0]
    made.behaviour = logp - torch.tensor(ratios, dtype=torch.float64).log()
    made.hidden = made.hidden.clone().requires_grad_()
    (term,) = build_terms([{"name": name, "advantage": FIXED, "rows": "all", **settings}])
    term.prepare(made.rows)
    batch = made.batch()
    live = batch.student.scores.sampled
    output = term.token_losses(batch)
    assert output.loss is not None
    (slope,) = torch.autograd.grad(output.loss.sum(), live)
    return [value / (-1.0 if good else 1.0) for value in slope.tolist()], output.metrics


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("good", [True, False])
def test_on_policy_every_loss_is_reinforce(toy: Any, name: str, good: bool) -> None:
    settings = ON_POLICY.get(name, {})
    slopes, _ = factors(toy, [1.0, 1.0, 1.0], good, name, **settings)
    assert slopes == pytest.approx([1.0, 1.0, 1.0])
    assert issubclass(OBJECTIVES.load(name), PolicyGradient)


@pytest.mark.parametrize(
    ("name", "settings", "good", "ratios", "expected"),
    [
        ("cispo", {}, True, [9.0, 0.5], [5.0, 0.5]),
        ("cispo", {"floor": 0.8}, False, [9.0, 0.5], [5.0, 0.8]),
        ("dispo", {}, True, [20.0, 0.5, 1.5], [11.0, 0.8, 1.5]),
        ("dispo", {}, False, [200.0, 0.5, 1.5], [101.0, 0.5, 1.5]),
        ("dispo", {"right_floor": 0, "right_cap": 5, "wrong_cap": 5}, True, [9.0, 0.5], [5.0, 0.5]),
        ("topr", {"ratio": "token"}, False, [3.0, 0.2], [1.0, 0.2]),
        ("topr", {"ratio": "token"}, True, [3.0, 0.2], [1.0, 1.0]),
        ("topr", {}, False, [0.5, 0.4], [0.2, 0.2]),
        ("minpro", {}, True, [0.5, 2.0, 1.5], [0.8, 1.0, 0.8]),
        ("minpro", {"clip_high": None}, False, [2.0, 3.0, 1.5], [2.0, 6.0, 3.0]),
        ("rec", {}, True, [1.3, 0.5], [0.0, 1.0]),
        ("rec", {}, False, [1.3, 0.5], [1.0, 0.0]),
        ("rec", {"rule": "two_sided"}, True, [1.3, 0.5, 1.1], [0.0, 0.0, 1.0]),
        ("rec", {"rule": "ring"}, True, [1.3, 0.5, 0.3], [0.0, 0.0, 1.0]),
        ("rec", {"rule": "ring"}, False, [1.3, 3.5, 1.1], [0.0, 1.0, 1.0]),
        ("minirl", {"ratio_to": "behaviour"}, True, [1.3, 0.5], [0.0, 0.5]),
        ("minirl", {"ratio_to": "behaviour"}, False, [1.3, 0.5, 7.0], [1.3, 0.0, 2.0]),
        ("minirl", {"ratio_to": "behaviour", "beyond": "drop"}, True, [1.1, 0.6, 0.4], [1.1, 0.6, 0.0]),
        ("minirl", {"ratio_to": "behaviour", "beyond": "drop"}, False, [1.3, 7.0, 1.9], [1.3, 0.0, 1.9]),
        ("grpo", {}, True, [1.1, 1.3, 0.5], [1.1, 0.0, 0.5]),
        ("grpo", {}, False, [1.1, 1.3, 0.5], [1.1, 1.3, 0.0]),
        ("grpo", {"dual_clip": 3.0}, False, [1.3, 3.5, 0.5], [1.3, 0.0, 0.0]),
        ("dr_grpo", {}, True, [1.1, 1.3, 0.5], [1.1, 0.0, 0.5]),
        ("ppo", {}, False, [1.1, 1.3, 0.5], [1.1, 1.3, 0.0]),
        ("dapo", {}, True, [1.25, 1.3, 0.5], [1.25, 0.0, 0.5]),
        ("stable_reinforce", {}, True, [1.1, math.exp(50)], [1.1, 0.0]),
        ("stable_reinforce", {}, False, [1.1, math.exp(50)], [1.1, 0.0]),
    ],
)
def test_slopes_at_given_ratios(
    toy: Any, name: str, settings: dict[str, Any], good: bool, ratios: list[float], expected: list[float]
) -> None:
    if name == "dapo":
        settings = {**settings, "skip_degenerate": False}
    slopes, metrics = factors(toy, ratios, good, name, **settings)
    assert slopes == pytest.approx(expected, rel=1e-5)
    acted = [float(top) for key, (top, _) in metrics.items() if key.endswith("ed_share")]
    assert sum(acted) > 0 or name == "topr"


@pytest.mark.parametrize(
    ("name", "credit", "weights"),
    [
        ("grpo", [1.5, -0.5, -0.5, -0.5], [1 / (4 * length) for length in (1, 2, 3, 4)]),  # the mean of means
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25], [1 / (4 * 8)] * 4),  # over rows times the limit of 8 tokens
        ("dapo", [1.5, -0.5, -0.5, -0.5], [1 / 10] * 4),  # the mean over all tokens
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3], [1 / (4 * 8)] * 4),
    ],
)
def test_the_gradient_of_a_group_with_one_right_answer(
    toy: Any, name: str, credit: list[float], weights: list[float]
) -> None:
    """Rewards 1, 0, 0, 0 of answers of 1, 2, 3 and 4 tokens, on policy: mean 1/4, deviation 1/2."""
    made = toy(lengths=(1, 2, 3, 4), group=4, masked=False)
    for row, reward in zip(made.rows, (1.0, 0.0, 0.0, 0.0), strict=True):
        row.reward = reward
    made.behaviour = made.logp(made.hidden, made.head).gather(1, made.token_ids[:, None])[:, 0]
    made.hidden = made.hidden.clone().requires_grad_()
    objective = Objective(build_terms([{"name": name}]), length_limit=8)
    objective.prepare(made.rows)
    batch = made.batch()
    loss, _ = objective.loss(batch, objective.position_weights(made.rows, torch.device("cpu")))
    (slope,) = torch.autograd.grad(loss, batch.student.scores.sampled)
    expected = [-a * w for a, w, n in zip(credit, weights, (1, 2, 3, 4), strict=True) for _ in range(n)]
    assert slope.tolist() == pytest.approx(expected, rel=1e-5)


def test_dhpo_mixes_the_clipped_ratios(toy: Any) -> None:
    made = toy(lengths=(2,), group=1, masked=False)
    made.rows[0].reward = 1.0
    logp = made.logp(made.hidden, made.head).gather(1, made.token_ids[:, None])[:, 0]
    made.behaviour = logp - torch.tensor([1.5, 0.5], dtype=torch.float64).log()
    for mix, expected in [(0.5, [1.0330, 0.8330]), (1.0, [1.2, 0.8]), (0.0, [0.8660, 0.8660])]:
        (term,) = build_terms([{"name": "dhpo", "advantage": FIXED, "mix": mix}])
        term.prepare(made.rows)
        output = term.token_losses(made.batch())
        assert (-output.loss).tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("mix_by", ["entropy", "certainty"])
def test_dhpo_mixes_by_the_entropy_at_the_token(toy: Any, mix_by: str) -> None:
    made = toy(lengths=(2,), group=1, masked=False)
    made.rows[0].reward = 1.0
    scores = made.logp(made.hidden, made.head)
    made.behaviour = scores.gather(1, made.token_ids[:, None])[:, 0] - torch.tensor([1.5, 0.5]).double().log()
    share = -(scores.exp() * scores).sum(1) / math.log(made.vocab)
    share = share if mix_by == "entropy" else 1 - share
    (term,) = build_terms([{"name": "dhpo", "advantage": FIXED, "mix_by": mix_by}])
    term.prepare(made.rows)
    output = term.token_losses(made.batch())
    expected = share * torch.tensor([1.2, 0.8]).double() + (1 - share) * 0.75**0.5
    torch.testing.assert_close(-output.loss, expected, atol=1e-6, rtol=1e-6)
    assert share.min() > 0 and share.max() < 1 and float(output.metrics["mix"][0]) == pytest.approx(float(share.sum()))


@pytest.mark.parametrize(
    ("settings", "good", "expected"),
    [
        ({"weigh": "importance"}, True, [1.1, 0.5, 0.0]),
        ({"weigh": "sequence"}, True, [(1.1 * 0.5 * 3) ** (1 / 3)] * 2 + [0.0]),
        ({"weigh": "credit", "temperature": 2.0}, True, [math.exp(0.5)] * 2 + [0.0]),
        ({"weigh": "credit"}, False, [math.exp(-1.0), 0.0, math.exp(-1.0)]),
        ({"regulariser": "forward_kl", "strength": 0.1}, True, [1.1, 1.1, 0.1]),
        (
            {"regulariser": "k2", "strength": 0.1},
            True,
            [1 - 0.2 * math.log(1.1), 1 - 0.2 * math.log(0.5), -0.2 * math.log(3)],
        ),
    ],
)
def test_rec_weighs_what_it_keeps_and_regularises_all(
    toy: Any, settings: dict[str, Any], good: bool, expected: list[float]
) -> None:
    slopes, metrics = factors(toy, [1.1, 0.5, 3.0], good, "rec", **settings)
    assert slopes == pytest.approx(expected, rel=1e-6)
    assert float(metrics["regulariser" if "strength" in settings else "weight"][0]) != 0.0


def test_gspo_clips_the_ratio_of_the_response(toy: Any) -> None:
    inside, _ = factors(toy, [1.0002, 1.0004], True, "gspo")
    outside, metrics = factors(toy, [1.5, 1.5], True, "gspo")
    assert inside == pytest.approx([1.0003, 1.0003], rel=1e-6) and outside == [0.0, 0.0]
    assert float(metrics["clipped_share"][0]) == 2


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_says_how_well_it_is_known(name: str) -> None:
    assert OBJECTIVES.load(name).evidence in {"text and code", "text", "abstract", "inferred"}


def hinted(toy: Any, probabilities: list[float], behaviour: list[float], name: str, **settings: Any) -> Any:
    """d loss / d log pi over -A of the tokens of a row that the student did not sample, and the metrics."""
    made = toy(lengths=(len(probabilities),), group=1, masked=False, origins=["hinted"])
    made.rows[0].reward = 1.0
    rest = [(1.0 - p) / (made.vocab - 1) for p in probabilities]
    logits = torch.tensor(rest, dtype=torch.float64)[:, None].expand(-1, made.vocab).clone()
    logits[range(len(probabilities)), made.token_ids] = torch.tensor(probabilities, dtype=torch.float64)
    made.hidden, made.head = logits.log().requires_grad_(), torch.eye(made.vocab, dtype=torch.float64)
    made.models = {role: (made.hidden.detach(), made.head) for role in made.models}
    made.behaviour = torch.tensor(behaviour, dtype=torch.float64).log()
    (term,) = build_terms([{"name": name, "advantage": FIXED, **settings}])
    term.prepare(made.rows)
    batch = made.batch()
    output = term.token_losses(batch)
    assert output.loss is not None
    (slope,) = torch.autograd.grad(output.loss.sum(), batch.student.scores.sampled)
    return (-slope).tolist(), (-output.loss).tolist(), output.metrics


def test_the_shaped_ratio_of_hinted_rows(toy: Any) -> None:
    slopes, gains, metrics = hinted(toy, [0.1, 0.5, 0.9], [0.1, 0.25, 0.9], "mixed_context")
    assert gains == pytest.approx([r / (r + 0.1) for r in (1.0, 2.0, 1.0)])
    assert slopes == pytest.approx([0.1 * r / (r + 0.1) ** 2 for r in (1.0, 2.0, 1.0)])
    assert float(metrics["hinted_tokens"][0]) == 3 and float(metrics["clipped_share"][0]) == 0
    _, gains, _ = hinted(toy, [0.01, 0.1, 0.9], [0.5, 0.5, 0.5], "mixed_context", denominator="one")
    assert gains == pytest.approx([0.0909, 0.5, 0.9], abs=1e-4)


def test_gamma_by_quantile_is_of_the_hinted_ratios_of_the_step(toy: Any) -> None:
    made = toy(lengths=(2, 3, 2), group=3, masked=False, origins=["hinted", "hinted", "policy"])
    ratios = [[0.5, 1.0], [2.0, 3.0, 0.2], [9.0, 9.0]]  # what the student sampled itself has no part in it
    for row, values in zip(made.rows, ratios, strict=True):
        row.reward, row.behaviour_logp = 1.0, np.full(row.length, -3.0, np.float32)
        row.signals["student", PayloadKind.SAMPLED] = Scores(sampled=np.float32(-3.0) + np.log(np.float32(values)))
    (term,) = build_terms([{"name": "mixed_context", "advantage": FIXED, "quantile": 0.9}])
    term.assess(made.rows, *gather_outcomes(made.rows))
    term.prepare(made.rows)
    total, count = term.token_losses(made.batch()).metrics["gamma"]
    assert float(total / count) == pytest.approx(2.6) and float(count) == 5  # between 2 and 3, six tenths of the way
    term.assess(made.rows[2:], *gather_outcomes(made.rows[2:]))  # no hinted row: the constant
    term.prepare(made.rows)
    total, count = term.token_losses(made.batch()).metrics["gamma"]
    assert float(total / count) == pytest.approx(0.1)


@pytest.mark.parametrize("entry", [{"name": "rl_plus"}, {"name": "mixed_context", "denominator": "one"}])
def test_the_mean_ratio_is_of_the_rows_that_the_student_sampled(toy: Any, entry: dict[str, Any]) -> None:
    made = toy(lengths=(2, 3), masked=False, origins=["policy", "expert"])
    logp = made.logp(made.hidden, made.head).gather(1, made.token_ids[:, None])[:, 0]
    # No policy has sampled a given answer.
    made.behaviour = torch.where(made.row == 1, torch.nan, logp - torch.tensor(1.5).log())
    (term,) = build_terms([entry])
    term.prepare(made.rows)
    total, count = term.token_losses(made.batch()).metrics["ratio"]
    assert float(total / count) == pytest.approx(1.5) and float(count) == 2


def test_given_answers_by_the_ratio_to_a_mixture(toy: Any) -> None:
    _, plain, _ = hinted(toy, [0.1, 0.5, 0.9], [1.0, 1.0, 1.0], "rl_plus", power=0.0)
    assert plain == pytest.approx([0.3077, 0.8, 0.9730], abs=1e-4)
    slopes, gains, metrics = hinted(toy, [0.1, 0.5, 0.9], [1.0, 1.0, 1.0], "rl_plus")
    factors = [0.9487, 0.7071, 0.3162]
    assert gains == pytest.approx([p * f for p, f in zip(plain, factors, strict=True)], abs=1e-4)
    assert slopes == pytest.approx(gains)  # the factor carries no gradient
    assert float(metrics["exploration"][0]) == pytest.approx(sum(factors), abs=1e-4)


def test_a_teacher_and_an_outcome_add_up_and_far_tokens_are_dropped(toy: Any) -> None:
    made = toy(lengths=(3,), group=1, masked=False)
    made.rows[0].reward = 1.0
    logp = made.logp(made.hidden, made.head).gather(1, made.token_ids[:, None])[:, 0]
    made.behaviour = logp - torch.tensor([1.0, 1.5, 3.0], dtype=torch.float64).log()
    teacher = made.logp(*made.models["teacher"]).gather(1, made.token_ids[:, None])[:, 0]
    for name, expected in [
        ("mimo_mix", torch.tensor([1.0, 1.5, 0.0]) * (teacher - logp + 0.5)),
        ("glm_mix", None),
    ]:
        made.hidden = made.hidden.detach().clone().requires_grad_()
        (term,) = build_terms([{"name": name, "advantage": FIXED, "ratio_to": "behaviour", "importance_band": None}])
        term.prepare(made.rows)
        batch = made.batch()
        output = term.token_losses(batch)
        assert output.loss is not None
        (slope,) = torch.autograd.grad(output.loss.sum(), batch.student.scores.sampled)
        if expected is None:
            gap, ratio = teacher - logp, torch.tensor([1.0, 1.5, 3.0], dtype=torch.float64)
            wanted = ratio * gap * ((gap < 0) | (ratio <= 1.28))
        else:
            wanted = expected.double()
        torch.testing.assert_close(-slope, wanted)
    silent = toy(lengths=(3,), group=1, masked=False)
    silent.rows[0].verdict = None  # no reward: the teacher alone
    (term,) = build_terms([{"name": "mimo_mix"}])
    term.prepare(silent.rows)
    assert term.selects(silent.rows[0]) and float(term.token_losses(silent.batch()).metrics["outcome_share"][0]) == 0
    silent.rows[0].truncated = True
    assert term.selects(silent.rows[0])
    for name in ("mimo_mix", "glm_mix"):
        (term,) = build_terms([{"name": name, "skip_truncated": True}])
        term.prepare(silent.rows)
        assert not term.selects(silent.rows[0])


def test_a_teacher_with_the_solution_weighs_tokens_and_never_turns_them(toy: Any) -> None:
    """Gaps of 0.1, 3 and -0.1 nats, A = 1 and -1: exp(sign(A) g) within 1 +- 0.2, half of the credit in step 0."""
    for sign, weights in ((1.0, [math.exp(0.1), 1.2, math.exp(-0.1)]), (-1.0, [math.exp(-0.1), 0.8, math.exp(0.1)])):
        made = toy(lengths=(3,), group=1, masked=False)
        made.rows[0].reward = max(0.0, sign)
        logp = made.logp(made.hidden, made.head).gather(1, made.token_ids[:, None])[:, 0]
        made.behaviour = logp
        (term,) = build_terms([{"name": "rlsd", "advantage": FIXED, "role": "teacher"}])
        term.prepare(made.rows)
        batch = made.batch()
        told = SignalTokens(logp + torch.tensor([0.1, 3.0, -0.1], dtype=torch.float64))
        batch = dataclasses.replace(batch, signals={("teacher", PayloadKind.SAMPLED): told})
        output = term.token_losses(batch)
        assert output.loss is not None
        expected = [-sign * (0.5 + 0.5 * weight) for weight in weights]
        assert output.loss.tolist() == pytest.approx(expected, rel=1e-6)
        moved = sum(abs(weight - 1) / 2 for weight in weights)
        assert float(output.metrics["rlsd_moved"][0]) == pytest.approx(moved, rel=1e-6)
        made.rows[0].unread = frozenset({"teacher"})  # its context was missing: plain credit
        assert term.token_losses(batch).loss.tolist() == pytest.approx([-sign] * 3)  # type: ignore[union-attr]
        made.rows[0].unread = frozenset()
        made.rows[0].key = dataclasses.replace(made.rows[0].key, step=50)  # the teacher has faded out
        assert term.token_losses(batch).loss.tolist() == pytest.approx([-sign] * 3)  # type: ignore[union-attr]


def test_turns_that_add_more_to_the_answer_may_move_further(toy: Any) -> None:
    """Gains of 0.3 and 0.1 at the first turn: z = +-0.707, so that clips are at 1 + 0.2 (1 +- 0.5 tanh 0.707)."""
    made = toy(lengths=(4, 4), group=2, masked=False)
    for row, gain, reward in zip(made.rows, (0.3, 0.1), (1.0, 0.0), strict=True):
        row.reward, row.turns, row.turn_rewards = reward, ((0, 2), (2, 4)), (gain, reward)
    logp = made.logp(made.hidden, made.head).gather(1, made.token_ids[:, None])[:, 0]
    made.behaviour = logp - math.log(2.0)  # every ratio is 2
    (term,) = build_terms([{"name": "a2tgpo"}])
    term.prepare(made.rows)
    output = term.token_losses(made.batch())
    assert output.loss is not None
    first, last = 2 * math.sqrt(0.5), math.sqrt(0.5)
    wide = 1 + 0.2 * (1 + 0.5 * math.tanh(math.sqrt(0.5)))
    assert output.loss.tolist()[:4] == pytest.approx([-wide * first] * 2 + [-1.2 * last] * 2, rel=1e-4)
    assert output.loss.tolist()[4:] == pytest.approx([2 * first] * 2 + [2 * last] * 2, rel=1e-4)
    assert float(output.metrics["clipped_share"][0]) == 4
    assert float(output.metrics["clip_width"][0]) == pytest.approx(8.0, rel=1e-5)
