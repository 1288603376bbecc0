"""Every registered objective through the real learner: neither padding nor micro-batches change its gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from registered import registered

from opd.tasks.verdict import Verdict
from student.plugin.terms import OBJECTIVES, build_terms


@pytest.mark.parametrize("name", registered(OBJECTIVES))
def test_a_gradient_does_not_depend_on_padding(bench: Callable[..., Any], name: str) -> None:
    entry = {"name": name}
    made = bench(entry, micro_batch_tokens=100_000)
    rows = made.rows()
    given = build_terms([entry])[0].settings.rows == "expert"
    for index, row in enumerate(rows):
        row.verdict = Verdict.of(index % 2 == 0)
        row.origin = "expert" if given else row.origin
    padded = made.gradient(rows)
    # One row per micro-batch is a batch without any padding; the step must not remember the cut before.
    made.learner.settings = made.learner.settings.model_copy(update={"micro_batch_tokens": 1})
    alone = made.gradient(rows)
    scale = max(float(value.abs().max()) for value in padded.values())
    assert scale > 0
    for parameter in padded:
        torch.testing.assert_close(padded[parameter], alone[parameter], rtol=1e-4, atol=1e-5 * scale)
