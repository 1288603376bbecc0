"""Golden numbers of the advantages, from the papers and the released code."""

from typing import Any

import pytest

from opd.config import parse_settings
from opd.errors import ConfigError
from student.data.outcome import Outcome
from student.plugins import build_plugins
from student.recipe import Recipe
from student.rl.advantages.bnpo import beta_of, inverse_density
from student.rl.advantages.chain import AdvantageChain
from student.scoring.needs import REFERENCE


def credit(*groups: list[float], gaps: list[float] | None = None, chain: list[Any] | None = None, **entry: Any) -> Any:
    rows = []
    for g, rewards in enumerate(groups):
        for i, reward in enumerate(rewards):
            gap = 0.0 if gaps is None else gaps[i]
            rows.append(Outcome(0, f"p{g}", i, reward=reward, tokens=2, sums={"behaviour": gap, REFERENCE: 0.0}))
    return AdvantageChain(chain or [entry], "a test").estimate(rows)


ONE = [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("entry", "rewards", "expected"),
    [
        ({"name": "reinforce", "baseline": 0.25}, ONE, [0.75, -0.25, -0.25, -0.25]),
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
    ],
)
def test_credit_of_one_group(entry: dict[str, Any], rewards: list[float], expected: list[float]) -> None:
    assert credit(rewards, **entry) == pytest.approx(expected, abs=1e-4)


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
    assert beta_of([0.5]) == beta_of([0.5, 0.5]) == (1.0, 1.0)
    groups = [1.0, 0, 0, 0], [1.0, 1, 0, 0], [1.0, 1, 1, 0], [1.0, 1, 1, 1]
    assert credit(*groups, name="bnpo")[-4:] == [0.0] * 4


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


def test_ngrpo_with_skip_degenerate_is_refused() -> None:
    data = {
        "run": "unused",
        "model": {"path": "unused"},
        "prompts": {"task": "addition"},
        "rollout": {"samples_per_prompt": 4},
        "objective": [{"name": "grpo", "advantage": {"name": "ngrpo"}, "skip_degenerate": True}],
    }
    with pytest.raises(ConfigError, match=r"skip_degenerate.*ngrpo"):
        build_plugins(parse_settings(Recipe, data))
