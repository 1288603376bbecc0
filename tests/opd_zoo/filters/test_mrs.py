"""MRS: which answers are left out, and that they still count in their group."""

from types import SimpleNamespace

import numpy as np
import pytest
from rows import make_row

from opd.tasks.verdict import Verdict
from opd.wire.types import PayloadKind, Scores
from opd_zoo.filters.mrs import Mrs, MrsSettings
from student.data.needs import STUDENT
from student.data.outcome import outcome_of
from student.data.row import Row


def row(index: int, ratios: list[float], known: bool = True) -> Row:
    made = make_row(len(ratios), sample=index, behaviour=-2.0 if known else np.nan, verdict=Verdict.of(True))
    made.signals[STUDENT, PayloadKind.SAMPLED] = Scores(sampled=(np.log(ratios) - 2.0).astype(np.float32))
    return made


def test_answers_that_drift_or_hold_one_impossible_token_are_left_out() -> None:
    made = Mrs(MrsSettings(name="mrs"))
    same, drifted = row(0, [1.0, 1.0]), row(1, [1.01, 1.0])
    balanced, vetoed = row(2, [2.0, 0.5]), row(3, [5e-5, 20000.0])
    given = row(4, [9.0], known=False)  # the student did not sample it
    rows = made.compose([same, drifted, balanced, vetoed, given])
    assert [one.trained for one in rows] == [True, False, True, False, True]
    outcomes = [outcome_of(one) for one in rows]
    assert all(outcome.reward == 1.0 for outcome in outcomes)
    found = made.after_update(0, SimpleNamespace(outcomes=outcomes))  # type: ignore[arg-type]
    assert found["mrs/rejected"] == 0.5 and found["mrs/vetoed"] == 0.25
    assert found["mrs/mean_ratio"] == pytest.approx((1 + 1.01**0.5 + 1 + 1) / 4, rel=1e-4)
