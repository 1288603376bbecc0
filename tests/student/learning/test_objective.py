"""Several terms in one objective: whose metric is whose, also where two terms have one name."""

from typing import Any

import torch

from student.data.report import StepReport
from student.data.token_batch import TokenBatch
from student.learning.objective import Objective, add
from student.plugin.terms import Term, TermOutput, TermSettings, build_terms


class Now(Term):
    """A term that measures something only where a micro-batch has rows for it, as terms by turn or teacher do."""

    def __init__(self, name: str, value: float, on: set[int]) -> None:
        super().__init__(TermSettings(name=name))
        self.value, self.on = value, on

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        measured = batch.rows[0].key.sample in self.on
        metrics: dict[str, Any] = {"reverse_kl": (self.value, 1.0)} if measured else {}
        return TermOutput(torch.zeros(len(batch.mask), dtype=torch.float64), metrics=metrics)


def test_two_terms_of_one_name_never_add_to_one_metric(toy: Any) -> None:
    made = toy()
    objective = Objective([Now("opd", 1.0, {0}), Now("opd", 5.0, {0, 1})], 8)
    found: dict[str, tuple[Any, Any]] = {}
    for index in range(2):  # the first term measures nothing in the second micro-batch
        weights = [torch.ones(made.rows[index].length, dtype=torch.float64)] * 2
        found = add(found, objective.loss(made.batch([index]), weights)[1])
    assert found["reverse_kl"] == (1.0, 1.0) and found["opd.1/reverse_kl"] == (10.0, 2.0)
    assert {"loss/opd.0", "loss/opd.1"} <= set(found)


def test_a_term_learns_from_what_it_measured_and_not_from_its_namesake() -> None:
    terms = build_terms([{"name": name, "aggregation": "token_mean"} for name in ("epo", "entropic") for _ in range(2)])
    Objective(terms, 8)
    metrics = {f"epo.1/entropy_by_turn/{turn}": 4.0 + turn for turn in range(2)}
    metrics |= {"entropy_by_turn/0": 1.0, "entropic.2/student_entropy": 2.0, "entropic.3/student_entropy": 3.0}
    for term in terms:
        term.observe(StepReport(0, metrics, []))
    first, second, one, other = (vars(term) for term in terms)
    assert first["means"] == {0: 1.0} and second["means"] == {0: 4.0, 1: 5.0}
    assert other["error"] - one["error"] == 1.0
