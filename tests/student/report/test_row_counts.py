"""Metrics of rows that need no model."""

import numpy as np
from rows import make_row

from opd.wire.types import PayloadKind, Scores
from student.data.needs import STUDENT, TEACHER
from student.data.outcome import Outcome
from student.report.row_counts import MOST_NAMES, count_rows, outcome_metrics, row_metrics
from student.scoring.routing import mix_scores


def test_tokens_are_told_apart_by_domain_and_teacher_where_there_are_several() -> None:
    rows = [
        Outcome(0, "a", 0, domain="sums", teacher="t", tokens=3),
        Outcome(0, "b", 0, domain="code", teacher="t", tokens=4),
        Outcome(0, "c", 0, domain="", teacher="t", tokens=5),
        Outcome(0, "d", 0, domain="code", teacher="t", tokens=9, trained=False),
    ]
    assert outcome_metrics(rows, {}) == {"domain_tokens/code": 4, "domain_tokens/none": 5, "domain_tokens/sums": 3}


def test_a_domain_and_a_teacher_that_get_no_row_are_counted_with_0() -> None:
    """Else the last one that is left would be the only one, and none would be counted."""
    known = {"domain": {"sums", "code"}, "teacher": {"t", "u"}}
    found = outcome_metrics([Outcome(0, "a", 0, domain="sums", teacher="t", tokens=3)], known)
    assert found == {"domain_tokens/code": 0, "domain_tokens/sums": 3, "teacher_tokens/t": 3, "teacher_tokens/u": 0}
    assert outcome_metrics([Outcome(0, "a", 0, domain="sums", tokens=3)], {"domain": {"sums"}}) == {}
    many = {"domain": {f"domain-{index}" for index in range(MOST_NAMES + 1)}}
    assert outcome_metrics([Outcome(0, "a", 0, domain="sums", tokens=3)], many) == {}


def test_positions_that_teachers_need_not_score_are_counted_once_and_at_servers_alone() -> None:
    row = make_row(8)
    served = Scores(sampled=np.zeros(8, np.float32), wire_bytes=24, unasked=2)
    # The student reads the windows of a cut history in process, which spares no server anything.
    row.signals[STUDENT, PayloadKind.SAMPLED] = Scores(sampled=np.zeros(8, np.float32), unasked=4)
    assert "unasked_share" not in row_metrics(count_rows([row], 8))
    row.signals[TEACHER, PayloadKind.SAMPLED] = mix_scores([(served, 0.5), (served, 0.5)])
    assert row_metrics(count_rows([row], 8))["unasked_share"] == 2 / 8


def test_hints_are_judged_by_the_rows_that_have_one_also_where_another_role_of_these_has_none() -> None:
    """One that says what the response does, read by the reference of both rows; the teacher of one reads another."""
    told = np.arange(2, 10, dtype=np.uint32)
    rows = [make_row(told, contexts={"reference": told}, unread=frozenset({TEACHER})) for _ in range(2)]
    rows[0].contexts[TEACHER], rows[0].unread = told + 40, frozenset()
    found = row_metrics(count_rows(rows, 16))
    assert (found["hinted_share"], found["hint_quoted"], found["context_missing_share"]) == (1.0, 1.0, 0.5)


def test_a_part_of_the_reward_is_averaged_over_the_rows_that_have_it() -> None:
    rows = [make_row(4, reward_parts={"format": 1.0}), make_row(4, reward_parts={"format": 0.0, "length": -2.0})]
    found = row_metrics(count_rows(rows, 8))
    assert (found["reward_part/format"], found["reward_part/length"]) == (0.5, -2.0)
