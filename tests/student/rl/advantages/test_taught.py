"""Advantages made of a teacher's log-probs."""

import numpy as np
import pytest
from rows import make_row

from opd.wire.types import PayloadKind, Scores
from student.rl.advantages.gc_opd import GcOpd, GcOpdSettings
from student.rl.advantages.r2_opd import R2Opd, R2OpdSettings
from student.scoring.needs import TEACHER


@pytest.mark.parametrize("made", [R2Opd(R2OpdSettings(name="r2_opd")), GcOpd(GcOpdSettings(name="gc_opd"))])
def test_a_teachers_log_probs_are_found_beside_its_hidden_states(made: R2Opd | GcOpd) -> None:
    row = make_row(2, behaviour=-1.0)
    row.signals[TEACHER, PayloadKind.HIDDEN] = Scores(hidden=np.zeros((2, 4), np.float32))
    row.signals[TEACHER, PayloadKind.SAMPLED] = Scores(sampled=np.array([-0.5, -2.0], np.float32))
    assert made.refine(row, 0.0).tolist() == pytest.approx([0.5, -1.0])
