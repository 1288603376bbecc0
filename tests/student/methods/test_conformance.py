"""What every registered objective owes: conformance tests that a new term inherits by being registered."""

from pathlib import Path
from typing import Any

import pytest
import torch
from registered import registered
from saved_state import save_state

from opd.config import parse_settings
from opd.tasks.verdict import Verdict
from student.plugin.terms import OBJECTIVES, build_terms
from student.rl.losses.policy_gradient import PolicyGradient
from student.state.state_io import load_state

VARIANTS: list[dict[str, Any]] = [
    *({"name": "opd", "payload": payload} for payload in ("sampled", "topk", "hidden")),
    *({"name": "opd", "payload": "topk", "divergence": d} for d in ("forward_kl",)),
    {"name": "opd", "payload": "hidden", "divergence": "jsd", "mixture": 0.3, "student_temperature": 1.5},
    *({"name": "opd", "payload": p, "discount": 0.9} for p in ("sampled", "gather", "hidden")),
    {"name": "opd", "discount": 1.0, "length_normalised": True, "aggregation": "sequence_mean"},
    *({"name": "exopd", "payload": payload} for payload in ("sampled", "hidden")),
    {"name": "gopd", "domain_reward_scale": {"d0": 0.5}, "reward_scale": 1.5, "payload": "hidden"},
    {"name": "exopd", "guards": {"gap_clip": 0.5, "flip_cap": 0.9}, "importance_cap": 5.0},
    *({"name": "reference_kl", "payload": payload} for payload in ("gather", "hidden")),
    *({"name": "reference_kl", "form": form} for form in ("k2", "k3_loss")),
    *({"name": "tropd", "outlier": outlier} for outlier in ("mask", "clip")),
    *({"name": "tip", "score": score} for score in ("entropy", "divergence")),
    {"name": "tip", "score": "overlap", "payload": "topk"},
    {"name": "tip", "score": "entropy", "payload": "hidden", "retention": 0.3},
    {"name": "reopold", "exploration_steps": 5},
    {"name": "policy_gradient", "ratio": "sequence", "aggregation": "constant"},
    *({"name": "policy_gradient", "ratio": ratio} for ratio in ("turn", "prefix", "none")),
    {"name": "grpo", "ratio_to": "old", "dual_clip": 3.0},
    *({"name": "grpo", "aggregation": aggregation} for aggregation in ("balanced", "prompt_mean")),
    {"name": "opd", "payload": "sampled", "aggregation": "balanced"},
]
ENTRIES = [{"name": entry.name} for entry in OBJECTIVES] + VARIANTS


@pytest.fixture(params=registered(OBJECTIVES, ENTRIES))
def entry(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


def origins_for(entry: dict[str, Any]) -> list[str] | None:
    return ["expert"] * 4 if build_terms([entry])[0].settings.rows == "expert" else None


def test_gradients_are_finite_and_not_zero(toy: Any, entry: dict[str, Any]) -> None:
    hidden, head = toy(origins=origins_for(entry)).gradient(build_terms([entry]))
    assert hidden.isfinite().all() and head.isfinite().all()
    assert hidden.abs().max() > 0 and head.abs().max() > 0


def test_masked_positions_get_no_gradient_whatever_their_signals_hold(toy: Any, entry: dict[str, Any]) -> None:
    clean, spoiled = toy(origins=origins_for(entry)), toy(origins=origins_for(entry))
    mask = clean.batch().mask
    assert not mask.all()
    for hidden, _ in spoiled.models.values():
        hidden[~mask] = torch.nan
    spoiled.behaviour[~mask] = torch.nan
    expected, actual = clean.gradient(build_terms([entry])), spoiled.gradient(build_terms([entry]))
    assert (actual[0][~mask] == 0).all()
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("parts", [[[0], [1], [2], [3]], [[3, 0], [2, 1]]])
def test_a_gradient_does_not_depend_on_micro_batches(toy: Any, entry: dict[str, Any], parts: list[list[int]]) -> None:
    made, terms = toy(origins=origins_for(entry)), build_terms([entry])
    whole, cut = made.gradient(terms), made.gradient(terms, parts)
    torch.testing.assert_close(whole, cut, rtol=1e-6, atol=1e-9)


def test_a_gradient_depends_on_what_the_term_asks_for(toy: Any, entry: dict[str, Any]) -> None:
    terms = build_terms([entry])
    made, other = toy(origins=origins_for(entry)), toy(origins=origins_for(entry))
    needs = terms[0].needs()
    for signal in needs.signals:
        other.models[signal.role] = tuple(value * 0.3 for value in other.models[signal.role])
    if needs.reward:
        for row, value in zip(other.rows, [1.0, 0.0, 0.0, 1.0], strict=True):
            row.verdict = Verdict.score(value)
    if not needs.signals and not needs.reward:
        other.token_ids = (other.token_ids + 1) % other.vocab
        other.hidden = other.hidden * 0.7  # all that a term sees which looks at no token
    assert not torch.allclose(made.gradient(terms)[0], other.gradient(terms)[0], rtol=1e-3)


def test_doubling_the_weight_doubles_the_gradient(toy: Any, entry: dict[str, Any]) -> None:
    made = toy(origins=origins_for(entry))
    once, twice = (made.gradient(build_terms([entry | {"weight": weight}])) for weight in (1.0, 2.0))
    torch.testing.assert_close(once[0] * 2, twice[0], rtol=1e-6, atol=1e-9)


def test_settings_survive_a_round_trip(entry: dict[str, Any]) -> None:
    settings = build_terms([entry])[0].settings
    assert parse_settings(type(settings), settings.model_dump(mode="json")) == settings


def test_state_survives_a_round_trip(toy: Any, entry: dict[str, Any], tmp_path: Path) -> None:
    made, (term,), (fresh,) = toy(origins=origins_for(entry)), build_terms([entry]), build_terms([entry])
    made.gradient([term])
    save_state(tmp_path, "term", term.state_dict())
    fresh.load_state_dict(load_state(tmp_path, "term"))
    torch.testing.assert_close(made.gradient([term]), made.gradient([fresh]), rtol=0, atol=0)


def test_what_a_term_shows_is_what_it_reports(toy: Any, entry: dict[str, Any]) -> None:
    made, (term,) = toy(origins=origins_for(entry)), build_terms([entry])
    made.gradient([term])
    # The loss is the objective's to report, and the reward the loop's.
    assert term.traits.shown.keys() <= {*term.token_losses(made.batch()).metrics, "loss", "reward"}


def test_metrics_are_sums_that_do_not_depend_on_micro_batches(toy: Any, entry: dict[str, Any]) -> None:
    made, terms = toy(origins=origins_for(entry)), build_terms([entry])
    made.gradient(terms)
    whole, parts = (
        terms[0].token_losses(made.batch()).metrics,
        [terms[0].token_losses(made.batch([i])) for i in range(4)],
    )
    assert whole
    # What the advantages did to the whole batch is the same pair whichever part asks.
    whole_batch = terms[0].chain.metrics() if isinstance(terms[0], PolicyGradient) else {}
    for name, (top, bottom) in whole.items():
        if name in whole_batch:
            assert all(part.metrics[name] == (top, bottom) for part in parts)
            continue
        assert sum(float(part.metrics[name][0]) for part in parts) == pytest.approx(float(top), rel=1e-5, abs=1e-6)
        assert sum(float(part.metrics[name][1]) for part in parts) == pytest.approx(float(bottom))
