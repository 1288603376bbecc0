"""Golden numbers of the terms other than policy losses, and of the controller of entropy."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opd.errors import ConfigError
from student.data.report import StepReport
from student.plugin.terms import build_terms


def report(**metrics: float) -> StepReport:
    return StepReport(0, metrics, [])


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"name": "chord"}, [0.09, 0.25, 0.09]),
        ({"name": "otr", "beta": 0.0}, [0.1, 0.5, 0.9]),
        ({"name": "otr", "beta": -0.2}, [0.12, 0.6, 1.08]),
    ],
)
def test_weights_of_given_tokens(entry: dict[str, Any], expected: list[float]) -> None:
    (term,) = build_terms([entry])
    found = term.weight(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64))  # type: ignore[attr-defined]
    assert found.tolist() == pytest.approx(expected)


def test_tokens_of_an_action_weigh_more() -> None:
    spans = [{"pattern": "<a>.*?</a>", "weight": 2}, {"pattern": r"\d+,\d+", "weight": 4}]
    (term,) = build_terms([{"name": "asft", "spans": spans}])
    pieces = ["I ", "click ", "<a", ">at ", "1", "2,", "3", " now<", "/a>", " or 7", ",", "8", "\n"]
    found = term.weights(pieces)  # type: ignore[attr-defined]
    assert found.tolist() == [1, 1, 2, 2, 4, 4, 4, 2, 2, 4, 4, 4, 1]
    with pytest.raises(ConfigError, match="regular expression"):
        build_terms([{"name": "asft", "spans": [{"pattern": "(", "weight": 2}]}])


def test_asft_multiplies_the_cross_entropy_of_the_given_tokens(toy: Any) -> None:
    made = toy(lengths=(3, 2), masked=False, origins=["expert", "policy"])
    (term,) = build_terms([{"name": "asft", "spans": [{"pattern": "b", "weight": 3}]}])
    term.bind(SimpleNamespace(decode=lambda ids: "ab"[ids[0] % 2]))
    output = term.token_losses(made.batch())
    weight = 1.0 + 2.0 * (made.token_ids % 2)
    torch.testing.assert_close(output.loss, -weight * made.behaviour)
    assert [term.selects(row) for row in made.rows] == [True, False]
    assert float(output.metrics["weighted_share"][0]) == float((made.token_ids % 2).sum())


def test_the_weight_is_the_expectation_over_drawn_tokens() -> None:
    """- sum_v pi(v) r(v) grad log pi(v), against the gradient of the weighted cross-entropy."""
    logits = torch.tensor([0.3, -1.0, 0.7, 0.1], dtype=torch.float64, requires_grad=True)
    logp, beta, given = logits.log_softmax(0), -0.3, 2
    reward = torch.full((4,), beta, dtype=torch.float64)
    reward[given] = 1.0
    (expected,) = torch.autograd.grad(-(logp.detach().exp() * reward * logp).sum(), logits, retain_graph=True)
    (term,) = build_terms([{"name": "otr", "beta": beta}])
    weight = term.weight(logp[given].detach().exp())  # type: ignore[attr-defined]
    (found,) = torch.autograd.grad(-weight * logp[given], logits)
    torch.testing.assert_close(found, expected)


def test_the_controller_of_entropy_weakens_confident_good_tokens_below_its_target(toy: Any) -> None:
    made = toy(lengths=(3, 3), masked=False)
    made.head = made.head * 0.0
    made.head[0] = 40.0
    made.hidden = torch.ones_like(made.hidden)
    made.hidden[1] = 0.0  # no longer confident there
    made.token_ids[:] = 0
    made.behaviour = made.logp(made.hidden, made.head).gather(1, made.token_ids[:, None])[:, 0]
    (term,) = build_terms([{"name": "entropic", "target": 0.5, "advantage": {"name": "signed", "positive": 1.0}}])
    term.prepare(made.rows)
    base = term.token_losses(made.batch()).loss
    term.observe(report(student_entropy=0.1))
    output = term.token_losses(made.batch())
    assert term.alpha == pytest.approx(-0.4)  # type: ignore[attr-defined]
    assert output.loss is not None and base is not None
    good, bad = (output.loss / base)[:3], (output.loss / base)[3:]
    assert good.tolist() == pytest.approx([0.6, 1.0, 0.6]) and bad.tolist() == pytest.approx([1.4] * 3)
    term.observe(report(student_entropy=-9.0))
    assert term.alpha == -1.0  # type: ignore[attr-defined]
    term.observe(report(student_entropy=0.5))
    assert term.alpha == pytest.approx(0.01 * (-0.4 - 9.5))  # type: ignore[attr-defined]


def test_the_integral_rests_at_a_bound_where_it_is_told_to() -> None:
    (term,) = build_terms([{"name": "entropic", "target": 0.0, "unwind": True}])
    for _ in range(5):
        term.observe(report(student_entropy=3.0))
    assert term.total == 0.0  # type: ignore[attr-defined]


def test_the_reference_is_flatter_the_worse_the_answer(toy: Any) -> None:
    made = toy(masked=False)
    (plain,) = build_terms([{"name": "rapo_kl", "low": 1.0}])
    (term,) = build_terms([{"name": "rapo_kl", "low": 0.5}])
    hidden, head = made.models["reference"]
    logp = made.logp(made.hidden, made.head)
    for chosen, low in ((plain, 1.0), (term, 0.5)):
        power = torch.tensor([1.0 if row.verdict.value else low for row in made.rows], dtype=torch.float64)
        target = (hidden @ head.T * power[made.row][:, None]).log_softmax(-1)
        expected = (target.exp() * (target - logp)).sum(-1)
        output = chosen.token_losses(made.batch())
        assert float(output.metrics["forward_kl"][0]) == pytest.approx(float(expected.sum()), rel=1e-5)
        assert output.total is not None
        assert float(output.total) == pytest.approx(float(expected.sum()), rel=1e-5)
    assert float(term.token_losses(made.batch()).metrics["phi"][0]) < float(len(made.row))


def test_the_reference_is_never_so_flat_that_it_has_no_head(toy: Any) -> None:
    made = toy(masked=False)
    (flattest,), (term,) = (build_terms([{"name": "rapo_kl", "low": low}]) for low in (1 / 16, 0.01))
    totals = [one.token_losses(made.batch()).total for one in (flattest, term)]
    assert totals[0] is not None and totals[1] is not None
    assert float(totals[1]) == pytest.approx(float(totals[0]), rel=1e-12)


def test_the_entropy_is_pulled_into_its_band(toy: Any) -> None:
    made = toy(masked=False)
    entropy = made.batch().student.scores.entropy

    def slope(term: Any) -> torch.Tensor:
        made.hidden = made.hidden.detach().clone().requires_grad_()
        (found,) = torch.autograd.grad(term.token_losses(made.batch()).total, made.hidden)
        return torch.as_tensor(found)

    (bonus,), (term,) = build_terms([{"name": "entropy_bonus"}]), build_terms([{"name": "epo", "penalty": 0.5}])
    torch.testing.assert_close(slope(term), slope(bonus))  # no history yet
    term.observe(report(**{"entropy_by_turn/0": float(entropy.median())}))
    factor = torch.ones_like(entropy)
    factor[entropy < 0.8 * entropy.median()] = 1.5
    factor[entropy > 1.2 * entropy.median()] = 0.5
    assert len(factor.unique()) > 1
    torch.testing.assert_close(slope(term), slope(bonus) * factor[:, None])
    assert float(term.token_losses(made.batch()).metrics["outside_share"][0]) == float((factor != 1).sum())
