"""Golden numbers of the advantages, from the papers and the released code."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from credited import credit

from opd.config import parse_settings
from opd.errors import ConfigError, DataError
from opd_zoo.advantages.bnpo import beta_of, inverse_density
from opd_zoo.advantages.emphasis import EntropyShaping, EntropyShapingSettings
from opd_zoo.advantages.lpo import softmax
from opd_zoo.advantages.noisy_forward import NoisyForward, NoisyForwardSettings
from opd_zoo.rewards.appeals import ACCEPTED, ASKED, OVERTURNED
from student.data.needs import STUDENT
from student.data.outcome import Outcome
from student.data.report import StepReport
from student.job.plugins import build_plugins
from student.rl.advantages.chain import AdvantageChain
from student.settings.recipe import Recipe

ONE = [1.0, 0.0, 0.0, 0.0]


def listwise(rewards: list[float], gaps: list[float], before: list[float] | None = None, **entry: Any) -> Any:
    """Credit of one group in a further update of a step.

    Args:
        rewards: of its responses.
        gaps: their log-ratios to the policy that sampled them.
        before: what those were when the rows were scored; none: 0.
        entry: the advantage.
    """
    chain = AdvantageChain(entry, "a test")
    for now in (before or [0.0] * len(gaps), gaps):
        found = chain.estimate(
            [
                Outcome(0, "p", i, reward=reward, tokens=2, sums={"behaviour": -3.0, STUDENT: -3.0 + gap})
                for i, (reward, gap) in enumerate(zip(rewards, now, strict=True))
            ]
        )
    return found


@pytest.mark.parametrize(
    ("entry", "rewards", "expected"),
    [
        ({"name": "ngrpo"}, [0.0] * 8, [-1 / 3] * 8),
        ({"name": "ngrpo"}, [0.0] * 4, [-0.4472] * 4),
        ({"name": "ngrpo"}, [1.0] * 8, [0.0] * 8),
        ({"name": "ngrpo"}, [1.0] + [0.0] * 7, [1.7638] + [-0.5040] * 7),
        ({"name": "ngrpo", "count": 0}, ONE, [1.5, -0.5, -0.5, -0.5]),
        ({"name": "signed"}, ONE, [0.1, -1, -1, -1]),
        ({"name": "signed", "positive": 1.0, "negative": 0.0}, ONE, [1, 0, 0, 0]),
        ({"name": "opmd"}, ONE, [0.375, -0.125, -0.125, -0.125]),
        ({"name": "opmd", "soft": True}, [1.0, 0.0], [(1 - 0.62011) / 2, -0.62011 / 2]),
        ({"name": "asym_re"}, ONE, [0.85, -0.15, -0.15, -0.15]),
        (
            {"name": "mc_grpo", "rescale": False},
            [0, 0.2, 0.5, 0.9, 1],
            [-1.246883, -0.748130, 0, 0.997506, 1.246883],
        ),
        ({"name": "mc_grpo"}, [0, 0.2, 0.5, 0.9, 1], [-1.558603, -0.935162, 0, 1.246883, 1.558603]),
        ({"name": "mc_grpo", "clamp": None, "rescale": False}, [1, 1, 1, 0, 0], [0, 0, 0, -1000, -1000]),
        ({"name": "mc_grpo"}, [1, 1, 1, 0, 0], [0, 0, 0, -3, -3]),
        ({"name": "lpo"}, ONE, [0.2254, -0.0751, -0.0751, -0.0751]),
        ({"name": "lpo", "divergence": "reverse_kl"}, ONE, [0.1875, -0.0625, -0.0625, -0.0625]),
        ({"name": "lpo", "tau": "std"}, ONE, [0.5204, -0.1735, -0.1735, -0.1735]),
        ({"name": "pacs"}, ONE, [1 / 3, -1 / 9, -1 / 9, -1 / 9]),
        ({"name": "noisy_forward", "false_negative": 0.2}, [0.0, 1.0], [-0.8, 0.2]),
        ({"name": "prompt_value"}, ONE, ONE),
    ],
)
def test_credit_of_one_group(entry: dict[str, Any], rewards: list[float], expected: list[float]) -> None:
    assert credit(rewards, **entry) == pytest.approx(expected, abs=1e-4)


def test_as_many_wrong_answers_as_right_ones_are_compared() -> None:
    found = credit(ONE, name="rec_balance")
    assert sorted(found) == [-0.5, 0.0, 0.0, 0.5] and found[0] == 0.5  # two of the three wrong ones are left out
    assert credit([1.0, 1.0, 1.0, 0.0], name="rec_balance") == [0.25, 0.25, 0.25, -0.75]
    scaled = credit(ONE, name="rec_balance", scale="std", epsilon=0.0)
    assert sorted(scaled) == pytest.approx([-1.0, 0.0, 0.0, 1.0])
    assert credit([0.1] * 3, [0.0] * 4, name="rec_balance") == [0.0] * 7
    seeds = {tuple(credit([1.0] + [0.0] * 7, name="rec_balance", seed=seed)) for seed in range(20)}
    assert len(seeds) > 1  # chance leaves out others
    chain = AdvantageChain({"name": "rec_balance"}, "a test")
    chain.estimate([Outcome(0, "p", i, reward=reward) for i, reward in enumerate(ONE)])
    assert chain.metrics() == {"rec_balance/dropped": (2.0, 4.0)}


def test_groups_share_the_deviation_of_the_batch() -> None:
    groups = [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]
    centred = [0.75, -0.25, -0.25, -0.25, 0.25, 0.25, 0.25, -0.75]
    raw = credit(*groups, name="lite_ppo", ddof=0, epsilon=0.0)
    assert raw == pytest.approx([value / 0.5 for value in centred])
    left = credit(*groups, name="lite_ppo", of="centred", ddof=0, epsilon=0.0)
    assert left == pytest.approx([value / 0.4330127 for value in centred])
    assert credit(*groups, name="reinforce_pp", ddof=0, epsilon=0.0) == pytest.approx([1, -1, -1, -1, 1, 1, 1, -1])
    assert credit([1.0, 1.0], [0.0, 1.0], name="lite_ppo")[:2] == [0.0, 0.0]


def test_scaling_all_rewards_leaves_batch_scaled_credit_as_it_is() -> None:
    one = credit([1.0, 0.0], [0.5, 0.0], name="lite_ppo", epsilon=0.0)
    assert credit([7.0, 0.0], [3.5, 0.0], name="lite_ppo", epsilon=0.0) == pytest.approx(one)


def test_the_beta_of_a_batch() -> None:
    assert beta_of([0.25, 0.5, 0.75]) == pytest.approx((1.5, 1.5))
    weights = [inverse_density(rate, 1.5, 1.5) for rate in (0.25, 0.5, 0.75)]
    assert weights == pytest.approx([0.9069, 0.7854, 0.9069], abs=1e-4)
    # A tenth has no exact binary form, and the mean of three tenths is another number.
    assert beta_of([0.5]) == beta_of([0.5, 0.5]) == beta_of([0.1] * 3) == (1.0, 1.0)
    groups = [1.0, 0, 0, 0], [1.0, 1, 0, 0], [1.0, 1, 1, 0]
    hard, even, easy = [0.75, *[-0.25] * 3], [0.5, 0.5, -0.5, -0.5], [*[0.25] * 3, -0.75]
    weighed = [gap * weight for gaps, weight in zip((hard, even, easy), weights, strict=True) for gap in gaps]
    assert credit(*groups, name="bnpo") == pytest.approx(weighed)
    assert credit(*groups, [1.0, 1, 1, 1], name="bnpo")[-4:] == [0.0] * 4


def test_rewards_outside_of_the_density_are_mapped_or_refused() -> None:
    with pytest.raises(DataError, match=r"sample 0 of prompt p0 .*-1; .*lowest"):
        credit([-1.0, 1.0], name="bnpo")
    groups = [0.0, 0, 0, 1], [0.0, 1, 1, 1], [0.0, 0, 1, 1]
    plain = credit(*groups, name="bnpo")
    moved = credit(*([4 * value - 2 for value in group] for group in groups), name="bnpo", lowest=-2.0, highest=2.0)
    assert moved == pytest.approx(plain)
    with pytest.raises(ConfigError, match="highest must be larger"):
        credit([0.0, 1.0], name="bnpo", lowest=1.0, highest=1.0)


def test_ace_punishes_confident_errors_alone() -> None:
    base = {"name": "group_mean", "scale": "none"}
    plain = credit([1.0, 0.0, 0.0], gaps=[5.0, 0.0, 2.0], chain=[base])
    relu = credit([1.0, 0.0, 0.0], gaps=[5.0, 0.0, 2.0], chain=[base, {"name": "ace", "shape": "relu", "alpha": 0.5}])
    assert relu == pytest.approx([plain[0], plain[1], 2 * plain[2]])
    soft = credit([1.0, 0.0, 0.0], gaps=[5.0, 0.0, -99.0], chain=[base, {"name": "ace"}])
    assert soft == pytest.approx([plain[0], plain[1] * 1.6931, plain[2]], abs=1e-4)


def test_sngs_spares_groups_that_rarely_succeed() -> None:
    base = {"name": "asym_re", "delta": 0.1}
    found = credit([0.0, 0.0], [1.0, 0.0], [1.0, 1.0], chain=[base, {"name": "sngs"}])
    assert found == pytest.approx([-0.05, -0.05, 0.4, -0.6 * 0.75, -0.1, -0.1])


def test_outliers_are_left_out_and_not_clipped() -> None:
    rewards = [10.0] + [0.0] * 19
    found = credit(rewards, chain=[{"name": "reinforce"}, {"name": "outliers"}])
    assert found[0] == 0.0 and all(value < 0 for value in found[1:])


def test_a_median_without_a_bound_is_refused_unless_rewards_are_graded() -> None:
    def recipe(**advantage: Any) -> Recipe:
        return parse_settings(
            Recipe,
            {
                "run": "unused",
                "model": {"path": "unused"},
                "prompts": {"task": "addition"},
                "rollout": {"samples_per_prompt": 5},
                "objective": [{"name": "rloo", "advantage": {"name": "mc_grpo", **advantage}}],
            },
        )

    with pytest.raises(ConfigError, match="graded"):
        build_plugins(recipe(clamp=None))
    build_plugins(recipe(clamp=None, graded=True))
    build_plugins(recipe())


@pytest.mark.parametrize(
    ("term", "said"),
    [
        ({"advantage": {"name": "ngrpo"}, "skip_degenerate": True}, r"skip_degenerate.*ngrpo"),
        ({"advantage": [{"name": "group_mean"}, {"name": "sngs", "lambda0": 1.0}]}, "changes nothing"),
        ({"advantage": [{"name": "signed", "negative": 0.0}, {"name": "sngs"}]}, "only negative credit"),
    ],
)
def test_what_could_do_nothing_is_refused(term: dict[str, Any], said: str) -> None:
    data = {
        "run": "unused",
        "model": {"path": "unused"},
        "prompts": {"task": "addition"},
        "rollout": {"samples_per_prompt": 4},
        "objective": [{"name": "grpo", **term}],
    }
    with pytest.raises(ConfigError, match=said):
        build_plugins(parse_settings(Recipe, data))


def test_a_listwise_target_is_left_alone_once_it_is_reached() -> None:
    target = softmax(ONE)
    reached = [math.log(w / target[1]) for w in target]  # up to a constant
    assert listwise(ONE, reached, name="lpo") == pytest.approx([0.0] * 4, abs=1e-12)
    assert listwise(ONE, reached, name="lpo", divergence="reverse_kl") == pytest.approx([0.0] * 4, abs=1e-12)
    half = listwise(ONE, [value / 2 for value in reached], name="lpo")
    assert 0 < half[0] < listwise(ONE, [0.0] * 4, name="lpo")[0] and sum(half) == pytest.approx(0.0, abs=1e-12)
    beyond = listwise(ONE, [2 * value for value in reached], name="lpo")
    assert beyond[0] < 0
    assert listwise([0.5, 0.5], [1.0, 0.0], name="lpo")[0] < 0  # equal rewards pull back what has moved
    assert listwise(ONE, reached, name="lpo", recompute=False) == listwise(ONE, [0.0] * 4, name="lpo")


def test_rows_of_another_policy_are_pulled_from_where_they_stand() -> None:
    before = [0.2, -0.1, 0.0, 0.3]
    started = softmax(before)
    credit_ = listwise(ONE, before, before, name="lpo")
    target = [value + p for value, p in zip(credit_, started, strict=True)]
    gained = sum((w - p) * reward for w, p, reward in zip(target, started, ONE, strict=True))
    apart = math.fsum((w - p) * (math.log(w) - math.log(p)) for w, p in zip(target, started, strict=True))
    assert gained == pytest.approx(apart) and apart == pytest.approx(0.23210, abs=1e-5)  # tau times Jeffreys'
    assert listwise(ONE, before, before, name="lpo", divergence="reverse_kl") == pytest.approx(
        [p * (reward - started[0]) for p, reward in zip(started, ONE, strict=True)]
    )
    for entry in ({"name": "lpo"}, {"name": "lpo", "divergence": "reverse_kl"}, {"name": "pacs"}):
        # Where nothing has moved since, equal rewards say nothing, no matter who sampled.
        assert listwise([0.5] * 4, before, before, **entry) == [0.0] * 4
    # Where something has, they take it back, whatever number they are.
    tenths, halves = (listwise([r] * 3, [0.3, -0.1, 0.0], before[:3], name="lpo", tau="std") for r in (0.1, 0.5))
    assert tenths == pytest.approx(halves)
    assert listwise(ONE, before, before, name="pacs") == pytest.approx(listwise(ONE, [0.0] * 4, name="pacs"))


def test_a_step_is_forgotten_when_it_has_been_observed() -> None:
    chain = AdvantageChain({"name": "lpo"}, "a test")

    def of(gap: float) -> Any:
        sums = [{"behaviour": -3.0, STUDENT: -3.0 + gap}, {"behaviour": -3.0, STUDENT: -3.0}]
        return chain.estimate([Outcome(0, "p", i, reward=0.5, sums=one) for i, one in enumerate(sums)])

    assert of(0.0) == [0.0, 0.0] and of(1.0)[0] < 0
    chain.observe(StepReport(0, {}, []))
    assert of(1.0) == [0.0, 0.0]


def test_log_ratios_of_long_responses_do_not_overflow() -> None:
    found = listwise(ONE, [-2000.0, 2000.0, 0.0, 0.0], name="pacs", beta=2.0)
    assert all(map(math.isfinite, found)) and found[0] > 0 > found[1]


def test_labels_let_go_of_what_they_have_told_apart() -> None:
    near, far = (listwise(ONE, [gap, 0.0, 0.0, 0.0], name="pacs") for gap in (1.0, 8.0))
    assert near[0] < 1 / 3 and 0 < far[0] < 0.02 and sum(near) == pytest.approx(0.0, abs=1e-12)
    moved = listwise(ONE, [1.5, 0.5, 0.5, 0.5], name="pacs")
    assert moved == pytest.approx(near)  # a constant added to all log-ratios changes nothing


def test_short_right_answers_go_first_and_lengths_never_reach_wrong_ones() -> None:
    def of(lengths: list[int], rewards: list[float], **entry: Any) -> Any:
        rows = [
            Outcome(0, "p", i, reward=r, length=n, tokens=1, sums={"behaviour": -1.0 - i})
            for i, (n, r) in enumerate(zip(lengths, rewards, strict=True))
        ]
        return AdvantageChain({"name": "drpo", "longest": 1000, **entry}, "a test").estimate(rows)

    assert of([100, 300, 50], [1, 1, 0])[:2] == pytest.approx([0.8808, 0.1192], abs=1e-4)
    assert of([100, 300, 50], [1, 1, 0], lam=1e9)[:2] == pytest.approx([0.5, 0.5])
    wrong = [of([100, n, 70], [1, 0, 0])[1:] for n in (50, 900)]
    assert wrong[0] == wrong[1] and sum(wrong[0]) == pytest.approx(-1.0)
    assert of([100, 50], [1, 1]) == of([100, 50], [0, 0]) == [0.0, 0.0]


def test_what_a_response_is_worth_is_shared_by_its_tokens() -> None:
    sums, tokens, rewards = (-2.0, -3.0, -8.0), (2, 3, 4), (1, 0, 0)
    rows = [
        Outcome(0, "p", i, reward=reward, length=count, tokens=count, sums={"behaviour": total})
        for i, (total, count, reward) in enumerate(zip(sums, tokens, rewards, strict=True))
    ]
    found = AdvantageChain({"name": "drpo", "longest": 10, "tau": 0.5}, "a test").estimate(rows)
    likelier = 1 / (1 + math.exp((-2.0 + 1.0) / 0.5))  # of the wrong ones the first, by means of -1 and -2 nats
    assert found == pytest.approx([1 / 2, -likelier / 3, -(1 - likelier) / 4])


def test_a_tracker_finds_the_success_rate_of_a_prompt_and_needs_no_group() -> None:
    chain = AdvantageChain({"name": "tracker", "memory": 0.9}, "a test")
    for step in range(80):
        rows = [Outcome(step, "easy", 0, reward=float(step % 4 > 0)), Outcome(step, "hard", 0, reward=0.0)]
        chain.observe(StepReport(step, {}, rows))
    values = chain.first.values  # type: ignore[attr-defined]
    assert values["easy"] == pytest.approx(0.75, abs=0.1) and values["hard"] == 0.0
    found = chain.estimate([Outcome(99, "easy", 0, reward=0.0), Outcome(99, "hard", 0, reward=1.0)])
    assert found[0] < 0 < found[1] and sum(found) == pytest.approx(0.0)


def test_a_prompt_without_a_past_is_compared_with_the_others_of_the_step() -> None:
    chain = AdvantageChain({"name": "tracker", "epsilon": 0.0}, "a test")
    chain.load_state_dict({"tracker": {"values": {"p0": 0.25}}})
    found = chain.estimate([Outcome(0, f"p{i}", 0, reward=reward) for i, reward in enumerate([1.0, 0.0, 1.0])])
    gaps = np.array([0.75, -1.0, 0.5])  # the last two from the mean of the others
    assert found == pytest.approx((gaps - gaps.mean()) / gaps.std(ddof=1))
    assert sum(credit([1.0, 0.0], name="tracker")) == pytest.approx(0.0)  # a prompt alone has its own mean


def test_rare_outcomes_weigh_more_at_the_same_mean() -> None:
    chain = [{"name": "group_mean", "scale": "none"}, {"name": "weighted_grpo"}]
    plain, found = credit(ONE, chain=chain[:1]), credit(ONE, chain=chain)
    assert found[0] / -found[1] == pytest.approx(4 * plain[0] / -plain[1])
    assert sum(map(abs, found)) == pytest.approx(sum(map(abs, plain)))
    two = credit([1.0, 1.0, 0.0, 0.0, 0.0], chain=chain)
    assert two[0] / -two[2] == pytest.approx(5 / 2 * 0.6 / 0.4)
    mirrored = credit([1.0, 1.0, 1.0, 0.0], chain=chain)
    assert mirrored == pytest.approx([-value for value in reversed(found)])


def test_the_shaping_by_entropy_is_bounded_keeps_signs_and_ends_at_its_mark(toy: Any) -> None:
    made = toy(lengths=(4,), group=1, masked=False)
    batch = made.batch()
    entropy = batch.student.scores.entropy
    shaping = EntropyShaping(EntropyShapingSettings(name="entropy_shaping"))
    advantage = torch.tensor([2.0, -2.0, 0.001, 0.0], dtype=torch.float64)
    added = shaping.shape(advantage, batch) - advantage
    bound = advantage.abs() / 2
    assert added.tolist() == pytest.approx(torch.minimum(0.4 * entropy, bound).tolist())
    assert torch.equal(shaping.shape(advantage, batch).sign(), advantage.sign())
    made.hidden.requires_grad_()
    assert not shaping.shape(advantage, made.batch()).requires_grad
    shaping._mark = made.rows[0].response_ids[2:3]
    ended = shaping.shape(advantage, batch) - advantage
    end = shaping._end(made.rows[0])
    assert 0 < end <= 2 and (ended[end:] == 0).all() and torch.equal(ended[:end], added[:end])


def test_the_rate_of_refused_right_answers_is_learnt_from_appeals() -> None:
    made = NoisyForward(NoisyForwardSettings(name="noisy_forward", learns=True, memory=0.5, false_negative=0.1))
    said = [{ACCEPTED: float(i < 6)} for i in range(10)]
    notes = [{}] * 6 + [{ASKED: 1.0, OVERTURNED: 1.0}, {ASKED: 1.0, OVERTURNED: 0.0}, {}, {}]
    # Another reward has moved all of them: what was accepted is what the verifier accepted.
    rows = [
        Outcome(0, "p", i, reward=float(i < 6) - 0.3, notes=one | more)
        for i, (one, more) in enumerate(zip(said, notes, strict=True))
    ]
    made.observe(StepReport(0, {}, rows))
    assert made.rate == pytest.approx(0.5 * 0.1 + 0.5 * 2 / 8)  # half of the four refused ones were right
    fresh = NoisyForward(made.settings)
    fresh.load_state_dict(made.state_dict())
    assert fresh.of_group([0.0]) == made.of_group([0.0])
