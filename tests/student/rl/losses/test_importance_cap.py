"""`importance_cap` and `importance_band` of policy losses: the sampler's other numerics are weighted out, or cut."""

import dataclasses
from typing import Any

import pytest
import torch

from opd.config import parse_settings
from opd.errors import ConfigError
from opd.wire.types import PayloadKind
from student.data.token_batch import SignalTokens
from student.job.plugins import build_plugins
from student.learning.objective import Objective
from student.plugin.terms import build_terms
from student.settings.recipe import Recipe


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


def test_tokens_outside_of_the_band_are_left_out(toy: Any) -> None:
    made = toy(lengths=(3, 2, 4, 1), masked=False)
    old = made.logp(*made.models["student"]).gather(1, made.token_ids[:, None])[:, 0]
    behaviour = torch.cat([torch.from_numpy(row.behaviour_logp.copy()) for row in made.rows]).double()
    weight = (old - behaviour).exp()
    band = float(torch.maximum(weight, 1 / weight).sort().values[4:6].mean())  # half of the tokens lie outside
    kept = (weight >= 1 / band) & (weight <= band)
    assert kept.any() and (weight > band).any() and (weight < 1 / band).any()
    expected = gradient(made) * (weight * kept)[:, None]
    torch.testing.assert_close(gradient(made, importance_band=band), expected, rtol=1e-5, atol=1e-9)


def test_stages_are_distilled_as_the_report_has_it(toy: Any) -> None:
    """The row of numbers: rho, r and A by token give the loss -0.35456 as a mean over the five tokens."""
    made = toy(lengths=(5,), group=1, masked=False)
    logp = made.logp(made.hidden, made.head).gather(1, made.token_ids[:, None])[:, 0].detach()
    rho, ratio, gap = (
        torch.tensor(values, dtype=torch.float64)
        for values in ([0.4, 0.6, 1.0, 1.9, 2.5], [1.0, 1.3, 0.7, 1.5, 1.0], [-0.5, 0.4, -0.6, 0.8, 0.2])
    )
    old = logp - ratio.log()
    made.behaviour = old - rho.log()
    (term,) = build_terms([{"name": "glm_mix", "clip_low": 0.2, "clip_high": 0.28}])
    assert term.settings.importance_band == 2.0 and term.settings.ratio_to == "old"
    term.prepare(made.rows)
    signals = {
        ("student", PayloadKind.SAMPLED): SignalTokens(old),
        ("teacher", PayloadKind.SAMPLED): SignalTokens(logp + gap),
    }
    output = term.token_losses(dataclasses.replace(made.batch(), signals=signals))
    assert output.loss is not None
    assert output.loss.tolist() == pytest.approx([0.0, -0.3072, 0.48, -1.9456, 0.0], rel=1e-6)
    assert float(output.loss.mean()) == pytest.approx(-0.35456, rel=1e-6)
    assert float(output.metrics["importance_dropped"][0]) == 2


def test_the_metrics_show_whether_the_cap_acts(toy: Any) -> None:
    made = toy(lengths=(3, 2, 4, 1), masked=False)
    terms = build_terms([{"name": "grpo", "ratio_to": "old", "importance_cap": 1e-6}])
    objective = Objective(terms, length_limit=8)
    objective.prepare(made.rows)
    weights = objective.position_weights(made.rows, torch.device("cpu"))
    _, metrics = objective.loss(made.batch(), weights)
    share, of = metrics["importance_truncated"]
    assert float(share) == float(of) and float(metrics["importance_weight"][0] / of) == pytest.approx(1e-6)


@pytest.mark.parametrize("weight", [{"importance_cap": 1e9}, {"importance_band": 1e9}])
@pytest.mark.parametrize("entry", [{"name": "rl_plus"}, {"name": "mixed_context", "denominator": "one"}])
def test_answers_that_no_policy_sampled_have_no_such_weight(
    toy: Any, entry: dict[str, Any], weight: dict[str, float]
) -> None:
    def of(**settings: Any) -> tuple[Any, torch.Tensor, Any]:
        made = toy(lengths=(3, 2), masked=False, origins=["policy", "expert"])
        made.rows[1].behaviour_logp[:] = torch.nan  # a given answer
        made.behaviour = torch.where(made.row == 1, torch.nan, made.behaviour)
        (term,) = build_terms([{**entry, "ratio_to": "old", **settings}])
        term.prepare(made.rows)
        output = term.token_losses(made.batch())
        assert output.loss is not None
        return made, output.loss.detach(), output.metrics

    made, plain, _ = of()
    _, weighed, metrics = of(**weight)
    torch.testing.assert_close(weighed[3:], plain[3:])
    old = made.logp(*made.models["student"]).gather(1, made.token_ids[:, None])[:3, 0]
    torch.testing.assert_close(weighed[:3], plain[:3] * (old - made.behaviour[:3]).exp())
    assert float(metrics["importance_weight"][1]) == 3


def test_it_is_refused_where_the_ratio_corrects_already() -> None:
    data = {
        "run": "never",
        "model": {"path": "/nowhere"},
        "prompts": {"task": "addition"},
        "rollout": {"samples_per_prompt": 2},
        "objective": [{"name": "grpo", "importance_cap": 2}],
    }
    with pytest.raises(ConfigError, match=r"importance_cap 2, .*behaviour policy"):
        build_plugins(parse_settings(Recipe, data))
