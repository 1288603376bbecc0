"""Advantages made of a teacher's log-probs, and their golden numbers."""

import math
from dataclasses import replace

import numpy as np
import pytest
from rows import make_row

from opd.wire.types import PayloadKind, Scores
from opd_zoo.advantages.gc_opd import GcOpd, GcOpdSettings
from opd_zoo.advantages.r2_opd import R2Opd, R2OpdSettings
from student.data.needs import TEACHER
from student.data.outcome import Outcome


@pytest.mark.parametrize("made", [R2Opd(R2OpdSettings(name="r2_opd")), GcOpd(GcOpdSettings(name="gc_opd"))])
def test_a_teachers_log_probs_are_found_beside_its_hidden_states(made: R2Opd | GcOpd) -> None:
    row = make_row(2, behaviour=-1.0)
    row.signals[TEACHER, PayloadKind.HIDDEN] = Scores(hidden=np.zeros((2, 4), np.float32))
    row.signals[TEACHER, PayloadKind.SAMPLED] = Scores(sampled=np.array([-0.5, -2.0], np.float32))
    assert made.refine(row, 0.0).tolist() == pytest.approx([0.5, -1.0])


GAPS = [[-0.3, 0.1, -0.1], [0.2, 0.4, 0.0], [-1.0, -0.5, -0.3], [0.0, -0.2, 0.2]]


def test_a_teachers_reward_is_moved_where_the_verifier_ranks_otherwise() -> None:
    rows = [  # of several lengths, with the means of GAPS
        Outcome(0, "p", i, reward=reward, tokens=n, sums={"behaviour": -n, TEACHER: n * (math.fsum(gaps) / 3 - 1)})
        for i, (gaps, reward, n) in enumerate(zip(GAPS, (1.0, 0.0, 1.0, 0.0), (3, 5, 2, 4), strict=True))
    ]
    made = GcOpd(GcOpdSettings(name="gc_opd"))
    residual = made.estimate(rows, None)
    assert residual == pytest.approx([0.9151810, -2.1026456, 2.6115589, -1.4240944], abs=1e-6)
    assert made.fired["disagreement"] == pytest.approx((7.0534801, 4.0), abs=1e-6)
    found = [made.by_token(np.array(gaps), rho).tolist() for gaps, rho in zip(GAPS, residual, strict=True)]
    expected = [
        [-0.2584320, 0.2414683, -0.0084819],
        [-0.0102646, 0.0749741, -0.0955032],
        [-0.8932152, -0.1949106, 0.0837882],
        [-0.1424095, -0.2646831, -0.0201358],
    ]
    for mine, wanted in zip(found, expected, strict=True):
        assert mine == pytest.approx(wanted, abs=1e-6)
    agreed = made.estimate([replace(row, reward=1.0) for row in rows], None)
    assert made.fired["disagreement"] == (0.0, 4.0)
    assert agreed == [0.0] * 4 and made.by_token(np.array(GAPS[0]), 0.0).tolist() == pytest.approx(GAPS[0])
    assert made.by_token(np.array([0.2, 0.2]), 1.0).tolist() == pytest.approx([0.3, 0.3])  # no token more than another
    assert made.by_token(np.array([50.0, -50.0, 0.0]), 0.0).tolist() == [10.0, -10.0, 0.0]


def test_a_teachers_reward_is_shared_out_anew_where_the_verdict_agrees() -> None:
    made = R2Opd(R2OpdSettings(name="r2_opd", beta=1.0))
    gaps = np.array([1.0, -2.0, 0.5, 0.0])  # a median of |d| of 0.75
    right, wrong = made.by_token(gaps, 1.0), made.by_token(gaps, -1.0)
    assert right.tolist() == pytest.approx([2.2128728, -0.3633309, 0.9237966, 0.0], abs=1e-6)
    # Of a wrong answer, what the teacher disowns weighs more; the sum of |A| stays.
    assert wrong[1] < gaps[1] and 0.0 < wrong[0] < gaps[0]
    assert np.abs(right).sum() == pytest.approx(3.5) and np.abs(wrong).sum() == pytest.approx(3.5)
    assert R2Opd(R2OpdSettings(name="r2_opd", beta=0.0)).by_token(gaps, 1.0).tolist() == pytest.approx(gaps.tolist())
    far = made.by_token(np.array([-800.0, -900.0]), 1.0)
    assert np.isfinite(far).all() and (far < 0).all()


def test_cut_answers_are_distilled_as_they_are() -> None:
    made = R2Opd(R2OpdSettings(name="r2_opd", beta=1.0))
    rows = [Outcome(0, "p", i, reward=float(i == 0), truncated=i == 2) for i in range(3)]
    assert made.estimate(rows, None) == [1.0, -1.0, 0.0]
    assert made.by_token(np.array([1.0, -2.0]), 0.0).tolist() == [1.0, -2.0]
