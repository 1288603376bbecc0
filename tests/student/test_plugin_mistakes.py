"""A plug-in that gives something of another kind or size is named, before anything is learnt from it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from thread_ranks import together

from opd.errors import ConfigError
from opd.tasks.prompt import Prompt
from student.controllers import Controller
from student.data.outcome import outcome_of
from student.data.plan import plan_step
from student.learning.objective import Objective
from student.learning.terms import Term, TermOutput, TermSettings
from student.rl.advantages.base import AdvantageSettings, GroupEstimator
from student.rl.losses.policy_gradient import PolicyGradient, PolicyGradientSettings
from student.rl.samplers.base import Sampler, SamplerSettings
from student.rollout.rounds import Rollouts
from student.rollout.strategy import Strategy, StrategySettings
from student.run.series import Series


class Wrong(Term):
    """Gives what it was told to."""

    def __init__(self, made: Callable[[Any], Any]) -> None:
        super().__init__(TermSettings(name="wrong"))
        self.made = made

    def token_losses(self, batch: Any) -> Any:
        return self.made(batch)


def loss_of(term: Term, made: Any) -> None:
    weights = [torch.ones(row.length, dtype=torch.float64) for row in made.rows]
    Objective([term], 8).loss(made.batch(range(len(made.rows))), [torch.cat(weights)])


def test_a_loss_that_is_not_one_number_per_position_is_refused(toy: Any) -> None:
    with pytest.raises(ValueError, match=r"Wrong gave a loss of shape \[\] for \d+ positions; it is one number per"):
        loss_of(Wrong(lambda batch: TermOutput(torch.zeros(len(batch.mask)).mean())), toy())
    with pytest.raises(TypeError, match="Wrong gave a Tensor; token_losses returns a TermOutput"):
        loss_of(Wrong(lambda batch: torch.zeros(len(batch.mask))), toy())


def test_a_surrogate_that_gives_a_bare_tensor_is_named(toy: Any) -> None:
    class Bare(PolicyGradient):
        def surrogate(self, log_ratio: Any, advantage: Any, live: Any, batch: Any) -> Any:
            return advantage

    term = Bare(PolicyGradientSettings(name="bare", advantage={"name": "signed"}))
    with pytest.raises(TypeError, match="Bare gave a Tensor; surrogate returns a TermOutput"):
        toy().gradient([term])


def test_an_advantage_that_is_short_of_its_group_is_named(toy: Any) -> None:
    class Short(GroupEstimator):
        def of_group(self, rewards: Sequence[float]) -> list[float]:
            return [0.0]

    rows = toy().rows
    for row in rows:
        row.reward = 1.0
    outcomes = [outcome_of(row) for row in rows]
    with pytest.raises(ValueError, match=rf"Short gave 1 advantages for a group of {len(rows)} rewards"):
        Short(AdvantageSettings(name="short", group=["step"])).estimate(outcomes, None)


def test_a_sampler_that_scores_another_number_of_prompts_is_named() -> None:
    class Few(Sampler):
        def scores(self, pool: Sequence[Prompt], rng: np.random.Generator) -> list[float]:
            return [0.0] * (len(pool) - 1)

    pool = [Prompt.make(f"{number}+1=") for number in range(4)]
    sampler: Controller = Few(SamplerSettings(name="few"))
    with pytest.raises(ValueError, match="Few gave 3 scores for a pool of 4 prompts"):
        sampler.choose(  # type: ignore[attr-defined]
            pool, 2, np.random.default_rng(0), plan_step(0, pool, samples=1, max_new_tokens=4, temperature=1.0)
        )


def test_a_strategy_that_returns_rows_it_did_not_score_is_named() -> None:
    class Hasty(Strategy):
        def run(self, plan: Any, rollouts: Rollouts) -> Any:
            return rollouts.sample(plan.rows)

    with pytest.raises(ValueError, match=r"Hasty returned rows that it sampled and did not score"):
        together(1, lambda: Hasty(StrategySettings(name="hasty")))


@pytest.mark.parametrize("value", ["one", None])
def test_a_metric_that_is_no_number_is_named_with_its_value(value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"metric 'mine/divisor' is {value!r}, but a metric is a number"):
        Series(CollectorRegistry()).show({"mine/divisor": value})
