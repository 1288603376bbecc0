"""Metrics of rows that need no model."""

from student.data.outcome import Outcome
from student.run.row_counts import MOST_NAMES, outcome_metrics


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
