"""Prune-OPD: where a response drifts, what is masked behind it, and the window that follows."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rows import make_row

from opd.config import parse_settings
from opd.wire.types import PayloadKind, Scores
from opd_zoo.windows.prune_opd import PruneOpd, PruneOpdSettings
from student.data.needs import TEACHER
from student.data.row import EpisodeTrace, Row

K, LIMIT = 4, 12


def make(**settings: Any) -> PruneOpd:
    found = PruneOpd(parse_settings(PruneOpdSettings, {"name": "prune_opd", "k": K, "shortest": 2} | settings))
    found.limit = LIMIT
    return found


def row_with(overlap: list[float], *, truncated: bool = True, **changes: Any) -> Row:
    """A row whose top-k sets share these parts of their ids; both lists are longer than k, and part ways behind it."""
    length = len(overlap)
    student = np.tile(np.arange(K + 2, dtype=np.uint32), (length, 1))
    teacher = student + 100
    for t, share in enumerate(overlap):
        shared = round(share * K)
        teacher[t, :shared] = student[t, :shared][::-1]
    row = make_row(length, truncated=truncated, candidates=student, **changes)
    row.signals[TEACHER, PayloadKind.TOPK] = Scores(ids=teacher, weights_hash="")
    return row


def outcomes(*rows: Row) -> Any:
    return SimpleNamespace(outcomes=[SimpleNamespace(notes=row.notes) for row in rows])


def test_what_lies_behind_the_first_low_running_mean_is_masked() -> None:
    row = row_with([1.0, 0.5, 0.25, 1.0, 1.0])  # means over two tokens: 1, 0.75, 0.375, 0.625, 1
    make(smoothing=2, threshold=0.5).compose([row])
    assert row.loss_mask.tolist() == [True, True, False, False, False]
    assert row.notes == {"drift_point": 2, "overlap": pytest.approx(0.75), "pruned_tokens": 3}


def test_a_mean_at_the_threshold_is_no_drift_and_the_first_token_is_always_kept() -> None:
    even, low = row_with([0.5, 0.5]), row_with([0.0, 0.0])
    make(smoothing=1, threshold=0.5).compose([even, low])
    assert even.loss_mask.all() and even.notes["drift_point"] == 2
    assert low.loss_mask.tolist() == [True, False] and low.notes["drift_point"] == 1


def test_a_row_that_ended_by_itself_speaks_for_the_longest_window() -> None:
    row = row_with([1.0, 1.0, 1.0], truncated=False)
    make().compose([row])
    assert row.notes["drift_point"] == LIMIT and row.notes["pruned_tokens"] == 0


def test_what_an_environment_wrote_does_not_count_as_drift() -> None:
    tools = np.array([0, 1, 1, 0, 0], bool)
    row = row_with([1.0, 0.0, 0.0, 1.0, 0.0], episode=EpisodeTrace(tools), loss_mask=~tools)
    make(smoothing=1).compose([row])
    assert row.notes["drift_point"] == 4 and row.loss_mask.tolist() == [True, False, False, True, False]
    assert row.notes["overlap"] == pytest.approx(2 / 3) and row.notes["pruned_tokens"] == 1


def test_given_rows_are_learnt_from_whole_and_set_no_window() -> None:
    row = row_with([0.0] * 4, origin="expert")
    method = make()
    method.compose([row])
    assert row.loss_mask.all() and method.after_update(0, outcomes(row)) == {"window": float(LIMIT)}
    assert method.window(1, SimpleNamespace()) == LIMIT  # type: ignore[arg-type]


def test_the_next_window_is_a_quantile_of_the_drift_points_times_the_growth() -> None:
    rows = [row_with([1.0] * point + [0.0] * (LIMIT - point)) for point in (2, 4, 6)]
    method = make(smoothing=1, quantile=0.5, growth=1.5)
    method.compose(rows)
    metrics = method.after_update(0, outcomes(*rows))
    assert metrics["window"] == LIMIT and metrics["pruned_tokens"] == 24
    assert metrics["overlap"] == pytest.approx(1 / 3)
    assert method.state_dict() == {"window": 6} and method.after_update(1, outcomes())["window"] == 6
    method.compose(rows[:1])
    method.after_update(2, outcomes(rows[0]))
    assert method.state_dict() == {"window": 3}
    short, whole = make(smoothing=1, shortest=8), make(growth=100.0)
    for other in (short, whole):
        other.compose(rows[:1])
        other.after_update(0, outcomes(rows[0]))
    assert [short.state_dict()["window"], whole.state_dict()["window"]] == [8, LIMIT]
