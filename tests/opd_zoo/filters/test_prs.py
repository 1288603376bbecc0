"""PRS: which turns are dropped, how often, and that nothing else of the episode is touched."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rows import make_row

from opd_zoo.filters.prs import Prs, PrsSettings
from student.data.outcome import outcome_of


def made(**settings: Any) -> Prs:
    return Prs(PrsSettings(name="prs", **settings))


@pytest.mark.parametrize(("coverage", "chance"), [(0.25, 0.0), (0.3, 0.0), (0.35, 0.5), (0.4, 1.0), (0.9, 1.0)])
def test_a_correct_turn_is_kept_by_its_coverage(coverage: float, chance: float) -> None:
    assert made().chance({"correct": 1.0, "coverage": coverage}) == pytest.approx(chance)
    fast = {"correct": 1.0, "coverage": coverage, "speedup": 1.6}
    assert made(speedup=1.5).chance(fast) == 1.0 and made(speedup=2.0).chance(fast) == pytest.approx(chance)


def test_turns_that_are_not_kept_leave_the_loss_and_others_stay() -> None:
    rows = []
    for sample in range(2000):
        row = make_row(6, sample=sample)
        row.turns = ((0, 2), (3, 4), (4, 6))
        row.notes = {"correct/0": 1.0, "coverage/0": 0.35, "correct/1": 0.0, "coverage/1": 0.0, "correct/2": 1.0}
        rows.append(row)
    method = made()
    assert method.compose(rows) == rows
    kept = np.array([row.loss_mask for row in rows])
    assert kept[:, 0].mean() == pytest.approx(0.5, abs=0.04) and (kept[:, 0] == kept[:, 1]).all()
    assert kept[:, 2:4].all() and not kept[:, 4:].any()  # wrong turns always, uncovered ones never
    found = method.after_update(0, SimpleNamespace(outcomes=[outcome_of(row) for row in rows]))  # type: ignore[arg-type]
    assert found == {"prs/correct": 2.0, "prs/dropped": pytest.approx(1 - kept[:, 0].mean() / 2)}
    assert method.after_update(0, SimpleNamespace(outcomes=[])) == {}  # type: ignore[arg-type]
