"""The credit of rows: what unknown, equal, truncated and given rows do to it, and rows that a model could not read."""

from typing import Any

import numpy as np
import pytest
import torch
from gradients import gradient, scores, verdicts

from opd.wire.types import PayloadKind, Scores
from student.data.outcome import gather_outcomes
from student.plugin.terms import build_terms


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_unknown_verdicts_change_no_mean_and_no_loss(toy: Any, name: str) -> None:
    made = toy(lengths=(4, 1, 5, 3, 2, 2), group=3, masked=False)
    verdicts(made, 1, None, 0, 0, 1, None)
    actual = gradient(made, name=name)
    unknown = torch.isin(made.row, torch.tensor([1, 5]))
    assert (actual[unknown] == 0).all() and (actual[~unknown] != 0).any()
    without = toy(lengths=(4, 1, 5, 3, 2, 2), group=3, masked=False)
    verdicts(without, 1, 1, 0, 0, 1, 1)
    keep = [0, 2, 3, 4]
    without.rows = [without.rows[i] for i in keep]
    chosen = torch.isin(made.row, torch.tensor(keep))
    without.row = torch.searchsorted(torch.tensor(keep), made.row[chosen])
    for field in ("hidden", "token_ids", "position", "behaviour", "candidates"):
        setattr(without, field, getattr(without, field)[chosen].detach())
    without.models = {role: (h[chosen], w) for role, (h, w) in without.models.items()}
    torch.testing.assert_close(actual[chosen], gradient(without, name=name), rtol=1e-6, atol=1e-10)


def test_degenerate_groups_count_in_the_mean_unless_they_are_skipped(toy: Any) -> None:
    made = toy(masked=False)
    verdicts(made, 1, 0, 1, 1)
    kept, skipped = (gradient(made, name="grpo", skip_degenerate=skip) for skip in (False, True))
    torch.testing.assert_close(2 * kept, skipped, rtol=1e-6, atol=1e-10)
    assert (kept[made.row >= 2] == 0).all()


def test_truncated_responses_can_be_left_out(toy: Any) -> None:
    made = toy(lengths=(4, 1, 5, 3), group=4, masked=False)
    verdicts(made, 1, 0, 1, 0)
    made.rows[0].truncated = True
    found = gradient(made, name="rloo", skip_truncated=True)
    assert (found[made.row == 0] == 0).all()
    expected = torch.tensor([0.0, -0.5, 1.0, -0.5])[made.row][:, None] * -scores(made) / (3 * 8)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)


def test_given_rows_are_no_samples(toy: Any) -> None:
    made = toy(lengths=(4, 1, 5), group=3, origins=["policy", "policy", "expert"], masked=False)
    verdicts(made, 1, 0, 1)
    found = gradient(made, name="rloo")
    assert (found[made.row == 2] == 0).all()
    assert (found[made.row == 0] != 0).any()


@pytest.mark.parametrize(
    ("objective", "role", "learnt"),
    [
        ({"name": "safe"}, "reference", False),  # the loss reads it
        (
            {"name": "grpo", "advantage": [{"name": "group_mean"}, {"name": "ace"}]},
            "reference",
            False,
        ),  # the credit does
        ({"name": "grpo"}, "reference", True),
        ({"name": "rlsd"}, "ema", True),  # its credit is plain then
    ],
)
def test_rows_without_the_context_of_a_model_that_is_read_are_passed_over(
    toy: Any, objective: dict[str, Any], role: str, learnt: bool
) -> None:
    made = toy(masked=False)
    for row in made.rows:
        row.signals["reference", PayloadKind.SAMPLED] = Scores(sampled=np.full(row.length, -1.0, np.float32))
    made.rows[0].unread = frozenset({role})
    (term,) = build_terms([objective])
    term.assess(made.rows, *gather_outcomes(made.rows))
    assert [term.selects(row) for row in made.rows] == [learnt, True, True, True]
