"""EPO's phases: the weight of the term over the run."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from student.plugin.terms import build_terms


def built(steps: int, **settings: Any) -> Any:
    (term,) = build_terms([{"name": "epo", **settings}])
    term.check(SimpleNamespace(train=SimpleNamespace(steps=steps)), [term])  # type: ignore[arg-type]
    return term


def test_the_term_fades_slowly_in_the_first_half_and_fast_in_the_second() -> None:
    term = built(100, phases=True)
    assert [term.phase(step) for step in (0, 49, 50, 75, 99)] == pytest.approx(
        [1.0, 1 - 0.2 * (1 - math.exp(-1.96)), 0.8, 0.8 * math.exp(-1.5), 0.8 * math.exp(-2.94)]
    )
    assert 1 - 0.2 * (1 - math.exp(-2)) == pytest.approx(0.8271, abs=1e-4)  # the end of the first half
    assert built(100).phase(80) == 1.0


def test_the_loss_is_that_of_its_phase(toy: Any) -> None:
    made = toy(masked=False)
    plain, faded = built(10), built(10, phases=True)
    for row in made.rows:
        object.__setattr__(row.key, "step", 5)
    one, other = plain.token_losses(made.batch()), faded.token_losses(made.batch())
    torch.testing.assert_close(other.total, 0.8 * one.total, rtol=1e-5, atol=0.0)
    top, bottom = other.metrics["phase"]
    assert float(top) / float(bottom) == pytest.approx(0.8)
