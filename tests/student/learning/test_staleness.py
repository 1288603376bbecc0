"""Which terms learn from rows of older weights: those whose gradient, given the prefix, is the same for any sampler."""

from typing import Any

import pytest
import torch
from torch import Tensor

from opd.config import parse_settings
from opd.errors import ConfigError
from student.job.plugins import build_plugins
from student.plugin.terms import Term, build_terms
from student.plugin.traits import Traits
from student.rollout.engine import RolloutEngine
from student.settings.recipe import Recipe

WIDE = 1e9  # a cap that never bites
UNBIASED: list[dict[str, Any]] = [
    *({"name": "opd", "payload": payload, "k": 3, "importance_cap": WIDE} for payload in ("sampled", "gather", "topk")),
    {"name": "opd", "payload": "topk", "k": 3, "divergence": "forward_kl"},
    {"name": "opd", "payload": "hidden"},
    {"name": "opd", "payload": "hidden", "divergence": "jsd", "mixture": 0.3},
    {"name": "exopd", "payload": "gather", "k": 3, "importance_cap": WIDE},
    {"name": "reference_kl", "payload": "hidden"},
    *({"name": "reference_kl", "form": form, "importance_cap": WIDE} for form in ("policy_gradient", "k2", "k3_loss")),
    {"name": "reference_kl", "payload": "gather", "k": 3, "importance_cap": WIDE},
    {"name": "entropy_bonus"},
    {"name": "epo"},
    {"name": "rapo_kl"},
]


def expected(toy: Any, entry: dict[str, Any] | Term, gap: float, tokens: range = range(7)) -> Tensor:
    """The gradient of each position's hidden state, over all `tokens`, drawn by a policy that is `gap` away."""
    whole = torch.zeros(())
    for token in tokens:
        rows = toy(masked=False)
        behaviour = rows.logp(rows.hidden + gap * torch.sin(rows.hidden), rows.head)
        rows.token_ids = torch.full_like(rows.token_ids, token)
        rows.behaviour = behaviour[:, token]
        terms = [entry] if isinstance(entry, Term) else build_terms([entry])
        whole = whole + behaviour[:, token].exp()[:, None] * rows.gradient(terms)[0]
    return whole


@pytest.mark.parametrize("entry", UNBIASED, ids=lambda entry: "-".join(str(v) for v in entry.values()))
def test_the_expected_gradient_is_that_on_policy_whoever_sampled(toy: Any, entry: dict[str, Any]) -> None:
    assert build_terms([entry])[0].traits.learns_from_stale_rows
    truth = expected(toy, entry, 0.0)
    assert truth.abs().max() > 1e-3
    torch.testing.assert_close(expected(toy, entry, 0.5), truth, rtol=1e-6, atol=1e-9)


def test_a_ratio_to_the_policy_that_sampled_gives_an_event_the_gradient_that_it_has_on_policy(toy: Any) -> None:
    """Over all tokens the gradient of a row's own advantage is 0, so here it is over some."""
    entry = {"name": "policy_gradient"}
    truth = expected(toy, entry, 0.0, range(3))
    assert truth.abs().max() > 1e-3
    torch.testing.assert_close(expected(toy, entry, 0.5, range(3)), truth, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"name": "opd", "k": 3}, "payload gather .* set importance_cap"),
        ({"name": "exopd", "payload": "sampled"}, "set importance_cap"),
        ({"name": "reference_kl"}, "set importance_cap .* use payload hidden"),
        ({"name": "vopd", "k": 3}, "no importance weight"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_a_term_that_would_be_biased_is_refused_with_the_reason(toy: Any, entry: dict[str, Any], said: str) -> None:
    assert (expected(toy, entry, 0.5) - expected(toy, entry, 0.0)).abs().max() > 1e-3
    with pytest.raises(ConfigError, match=f"max_staleness is 1, but {entry['name']} .*{said}"):
        build_plugins(recipe(objective=[entry]))


@pytest.mark.parametrize("updates", [{"epochs": 2}, {"minibatches": 2}], ids=lambda value: next(iter(value)))
def test_a_term_that_would_be_biased_in_later_updates_of_a_step_says_so(updates: dict[str, int]) -> None:
    def said(entry: dict[str, Any], **train: int) -> list[str]:
        return build_plugins(recipe(objective=[entry], train=train)).remarks

    (remark,) = said({"name": "reference_kl"}, **updates)
    assert "of the 2 updates per batch, all but the first" in remark and "set importance_cap" in remark
    assert not said({"name": "reference_kl"}) and not said({"name": "reference_kl", "importance_cap": 2.0}, **updates)


def test_the_penalty_of_safe_is_the_same_whoever_sampled_as_its_clipped_loss_is(toy: Any) -> None:
    (term,) = build_terms([{"name": "safe", "clip_low": None, "clip_high": None}])
    torch.testing.assert_close(expected(toy, term, 0.5), expected(toy, term, 0.0), rtol=0, atol=1e-9)
    term.load_state_dict(term.state_dict() | {"safe": {"short": 1.0}})  # above the threshold, where the penalty acts
    truth = expected(toy, term, 0.0)
    assert truth.abs().max() > 1e-3
    torch.testing.assert_close(expected(toy, term, 0.5), truth, rtol=1e-6, atol=1e-9)


def recipe(**changes: Any) -> Recipe:
    data: dict[str, Any] = {
        "run": "run",
        "model": {"path": "m"},
        "teachers": {"endpoints": ["t:1"]},
        "prompts": {"task": "addition"},
        "rollout": {"samples_per_prompt": 2},
        "objective": [{"name": "opd", "importance_cap": 2.0}],
        "train": {"max_staleness": 1},
    }
    return parse_settings(Recipe, {**data, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"objective": [{"name": "opd", "discount": 0.5}]}, "set discount: 0"),
        ({"objective": [{"name": "grpo", "ratio_to": "old"}]}, "set ratio_to: behaviour"),
        ({"objective": [{"name": "rloo"}]}, "set ratio: token"),
        ({"objective": [{"name": "grpo"}], "methods": [{"name": "mopps"}]}, "mopps does not work with it"),
        (
            {
                "train": {"sharding": "fsdp", "max_staleness": 1},
                "rollout": {"engine": {"name": f"{__name__}:Gathering"}},
            },
            "Gathering gathers the weights of a sharded student from all ranks at once",
        ),
        (
            {"objective": [{"name": "grpo"}], "rollout": {"strategy": {"name": "self_interference"}}},
            "self_interference does not work with it: it samples only .* or set train.max_staleness: 0",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_what_would_meet_rows_of_another_step_is_refused(changes: dict[str, Any], said: str) -> None:
    if "rollout" in changes:
        changes = {**changes, "rollout": {"samples_per_prompt": 2, **changes["rollout"]}}
    with pytest.raises(ConfigError, match=said):
        build_plugins(recipe(**changes))
    build_plugins(recipe(**{**changes, "train": {"max_staleness": 0}}))


@pytest.mark.parametrize("method", ["adwin", "effopd", "tcod", "expert_rows", "linear_window", "prompt_augmentation"])
def test_methods_that_plan_by_what_they_save_go_with_stale_rows(method: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "linear_window": {"first": 4},
        "adwin": {"windows": [4]},
        "expert_rows": {"share": 0.5},
    }
    constant = {"name": "opd", "importance_cap": 2.0, "aggregation": "constant"}
    build_plugins(recipe(objective=[constant], methods=[{"name": method, **options.get(method, {})}]))


@pytest.mark.parametrize("strategy", ["dynamic_sampling", "adaptive_oversampling", "reinforce_ada", "lte", "guide"])
def test_strategies_whose_first_round_is_the_plan_go_with_stale_rows(strategy: str) -> None:
    parts: dict[str, Any] = {"objective": [{"name": "mixed_context"}]} if strategy in ("lte", "guide") else {}
    build_plugins(recipe(rollout={"samples_per_prompt": 4, "strategy": {"name": strategy}}, **parts))


class Held(RolloutEngine):
    """A third party's engine that samples from weights of its own."""

    traits = Traits(holds_weights=True)


class Gathering(Held):
    """An engine that asks all ranks for their parts of the weights when it is synced."""

    traits = Traits(holds_weights=True, takes_shards=True)


def test_given_answers_are_refused_beside_learning_where_the_student_itself_would_read_them() -> None:
    parts: dict[str, Any] = {
        "methods": [{"name": "expert_rows", "share": 0.5}],
        "rollout": {"samples_per_prompt": 2, "engine": {"name": f"{__name__}:Held"}},
    }
    with pytest.raises(ConfigError, match=f"rollout.engine {__name__}:Held .* expert_rows"):
        build_plugins(recipe(**parts))
    build_plugins(recipe(**parts, train={"max_staleness": 0}))
    build_plugins(recipe(**{**parts, "methods": []}))
