"""`importance_cap` of policy losses: the sampler's other numerics are weighted out, up to the cap."""

from typing import Any

import pytest
import torch

from opd.config import parse_settings
from opd.errors import ConfigError
from student.learning.objective import Objective
from student.plugins import build_plugins, build_terms
from student.recipe import Recipe


def gradient(made: Any, **settings: Any) -> torch.Tensor:
    return made.gradient(build_terms([{"name": "policy_gradient", "ratio_to": "old", **settings}]))[0]


@pytest.mark.parametrize("cap", [0.9, 1e9])
def test_each_token_weighs_as_old_over_behaviour_up_to_the_cap(toy: Any, cap: float) -> None:
    made = toy(lengths=(3, 2, 4, 1), masked=False)
    old = made.logp(*made.models["student"]).gather(1, made.token_ids[:, None])[:, 0]
    behaviour = torch.cat([torch.from_numpy(row.behaviour_logp.copy()) for row in made.rows]).double()
    weight = (old - behaviour).exp()
    assert (weight > 0.9).any() and (weight < 0.9).any()
    expected = gradient(made) * weight.clamp(max=cap)[:, None]
    torch.testing.assert_close(gradient(made, importance_cap=cap), expected, rtol=1e-5, atol=1e-9)


def test_the_metrics_show_whether_the_cap_acts(toy: Any) -> None:
    made = toy(lengths=(3, 2, 4, 1), masked=False)
    terms = build_terms([{"name": "grpo", "ratio_to": "old", "importance_cap": 1e-6}])
    objective = Objective(terms, length_limit=8)
    objective.prepare(made.rows)
    weights = objective.position_weights(made.rows, torch.device("cpu"))
    _, metrics = objective.loss(made.batch(), weights)
    share, of = metrics["importance_truncated"]
    assert float(share) == float(of) and float(metrics["importance_weight"][0] / of) == pytest.approx(1e-6)


def test_it_is_refused_where_the_ratio_corrects_already() -> None:
    data = {
        "run": "never",
        "model": {"path": "/nowhere"},
        "prompts": {"task": "addition"},
        "rollout": {"samples_per_prompt": 2},
        "objective": [{"name": "grpo", "importance_cap": 2}],
    }
    with pytest.raises(ConfigError, match="importance_cap 2, but its ratio is to the behaviour policy"):
        build_plugins(parse_settings(Recipe, data))
