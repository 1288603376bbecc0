"""Golden numbers of the policy losses: weights and kept tokens at given ratios, and REINFORCE on policy."""

import math
from typing import Any

import pytest
import torch

from student.learning.terms import OBJECTIVES
from student.plugins import build_terms
from student.rl.losses.policy_gradient import PolicyGradient

NAMES = [entry.name for entry in OBJECTIVES if ".rl.losses." in entry.path and entry.name != "entropy_bonus"]
FIXED = {"name": "signed", "positive": 1.0}


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
    settings = {"minirl": {"ratio_to": "behaviour"}, "dapo": {"skip_degenerate": False}}.get(name, {})
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


def test_gspo_clips_the_ratio_of_the_response(toy: Any) -> None:
    inside, _ = factors(toy, [1.0002, 1.0004], True, "gspo")
    outside, metrics = factors(toy, [1.5, 1.5], True, "gspo")
    assert inside == pytest.approx([1.0003, 1.0003], rel=1e-6) and outside == [0.0, 0.0]
    assert float(metrics["clipped_share"][0]) == 2


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_says_how_well_it_is_known(name: str) -> None:
    assert OBJECTIVES.load(name).evidence in {"text and code", "text", "abstract", "inferred"}
