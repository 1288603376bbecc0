"""Loops are found where they begin, masked where the teacher confirms them, and not sampled again."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.wire.types import PayloadKind
from opd_zoo.windows.effective_length import EffectiveLength, EffectiveLengthSettings, loop_start
from student.data.needs import TEACHER
from student.data.row import EpisodeTrace
from tests.support.rows import make_row


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 6), st.integers(1, 5), st.integers(1, 3))
def test_a_loop_begins_where_every_later_token_repeats_the_one_a_period_before(
    ids: list[int], period: int, repeated: int, rounds: int
) -> None:
    starts = [
        e
        for p in range(1, period + 1)
        for e in range(p, len(ids))
        if all(ids[t] == ids[t - p] for t in range(e, len(ids))) and len(ids) - e >= max(repeated, rounds * p)
    ]
    found = loop_start(np.array(ids, np.uint32), period=period, repeated=repeated, rounds=rounds)
    assert found == min(starts, default=len(ids))


def test_the_first_round_is_kept() -> None:
    ids = np.array([9, 8, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1], np.uint32)
    assert loop_start(ids, period=8, repeated=4, rounds=2) == 5
    assert loop_start(ids, period=2, repeated=4, rounds=2) == len(ids), "a longer period than allowed"
    assert loop_start(np.append(ids, 7).astype(np.uint32), period=8, repeated=4, rounds=2) == len(ids) + 1


def test_a_fraction_of_a_round_is_counted_as_it_is_said() -> None:
    ids = np.array([*range(5), *range(5), *range(5), 0], np.uint32)  # 11 / 5 is 2.2, though 2.2 * 5 is over 11
    assert loop_start(ids, period=5, repeated=1, rounds=2.2) == 5


def _method(limit: int = 64, **settings: Any) -> EffectiveLength:
    plain = {"name": "effective_length", "period": 4, "repeated": 4, "shortest": 2}
    method = EffectiveLength(EffectiveLengthSettings(**(plain | settings)))
    method.limit = limit
    return method


def _looped(probability: float, **fields: Any) -> Any:
    ids = np.array([9, 8, 7, 1, 2, 1, 2, 1, 2, 1, 2], np.uint32)
    signal = SimpleNamespace(sampled=np.full(len(ids), math.log(probability), np.float32))
    return make_row(ids, signals={(TEACHER, PayloadKind.SAMPLED): signal}, **fields)


@pytest.mark.parametrize(("probability", "end"), [(0.9, 5), (0.1, 11)])
def test_a_loop_is_masked_where_the_teacher_would_go_on_with_it(probability: float, end: int) -> None:
    (row,) = _method().compose([_looped(probability)])
    assert row.loss_mask.tolist() == [True] * end + [False] * (11 - end)
    assert row.notes == {"effective_length": end, "looped_tokens": 11 - end}


def test_what_an_environment_repeats_is_not_the_students_loop() -> None:
    written = np.arange(11) >= 7
    (row,) = _method(confirmed=0).compose([_looped(0.9, episode=EpisodeTrace(written))])
    assert row.notes["effective_length"] == 11


def test_a_loop_behind_the_last_answer_of_an_environment_is_the_students() -> None:
    written = np.isin(np.arange(11), (0, 2))  # the loop of 1 and 2 stands behind; its first round is kept
    (row,) = _method(confirmed=0).compose([_looped(0.9, episode=EpisodeTrace(written))])
    assert row.notes == {"effective_length": 5, "looped_tokens": 6}
    written = np.isin(np.arange(11), (0, 3))  # 2 1 2 1 2 1 2 from position 4 on
    (row,) = _method(confirmed=0).compose([_looped(0.9, episode=EpisodeTrace(written))])
    assert row.notes["effective_length"] == 6
    (row,) = _method(confirmed=0).compose([_looped(0.9, episode=EpisodeTrace(np.zeros(11, np.bool_)))])
    assert row.notes["effective_length"] == 5, "an episode in which nothing was answered"


def test_the_teacher_confirms_a_loop_by_its_tokens_alone() -> None:
    row = _looped(0.9)
    row.signals[TEACHER, PayloadKind.SAMPLED].sampled[:5] = -100.0
    _method().compose([row])
    assert row.notes["effective_length"] == 5
    row = _looped(0.9)
    row.signals[TEACHER, PayloadKind.SAMPLED].sampled[5:7] = -3.0  # mean -1.07 of six, under log 0.5
    _method().compose([row])
    assert row.notes["effective_length"] == 11
    row.signals.clear()  # no teacher is asked, and none is read
    _method(confirmed=0).compose([row])
    assert row.notes["effective_length"] == 5


def test_the_next_window_follows_the_effective_lengths() -> None:
    method = _method(limit=20, first=8, quantile=0.5, growth=1.25)
    row: Any = None
    assert method.window(0, row) == 8

    def after(*lengths: int) -> dict[str, float]:
        notes = [SimpleNamespace(notes={"effective_length": n, "looped_tokens": 1}) for n in lengths]
        return method.after_update(0, SimpleNamespace(outcomes=notes))  # type: ignore[arg-type]

    assert after() == {"window": 8.0}
    assert after(8, 8, 3) == {"window": 8.0, "effective_length": 19 / 3, "looped_tokens": 3.0}
    assert method.window(1, row) == 10, "1.25 times the median"
    after(18, 18, 18)
    assert method.window(2, row) == 20, "never beyond the limit"
    after(1, 1, 1)
    assert method.window(3, row) == 2, "never below the shortest"
    other = _method()
    other.load_state_dict(method.state_dict())
    assert other.window(4, row) == 2


def test_without_confirmation_no_teacher_is_asked() -> None:
    assert _method(confirmed=0).needs().signals == () and len(_method().needs().signals) == 1
