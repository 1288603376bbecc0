"""Reverse KL of evaluations."""

from collections.abc import Callable
from typing import Any

import pytest

from student.methods.distil.measure import ReverseKl


@pytest.mark.parametrize("training", [True, False])
def test_a_measure_that_is_interrupted_leaves_the_student_in_the_mode_it_was_in(
    bench: Callable[..., Any], training: bool
) -> None:
    made = bench({"name": "opd", "payload": "sampled"})
    made.learner.student.dropout = True
    made.learner.student.train(training)

    def interrupted(batch: object) -> None:
        assert not made.learner.student.training
        raise InterruptedError

    with pytest.raises(InterruptedError):
        ReverseKl("sampled", 8).measure(made.learner, made.rows(), look=interrupted)
    assert made.learner.student.training is training
