"""Waiting for answers row by row, while a teacher of other rows is away."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from opd.errors import OutageError
from opd.fleet.membership.outage import Outage, OutageHooks
from student.scoring.arriving import Arriving, Call
from student.settings.teachers import TeacherSettings


def asked(count: int) -> tuple[list[Any], list[Future[Any]], list[tuple[Any, list[Call]]]]:
    """Rows, futures of their answers, and the calls that hold these."""
    nothing: Any = None
    rows: list[Any] = [SimpleNamespace(name=number) for number in range(count)]
    futures: list[Future[Any]] = [Future() for _ in rows]
    calls = [
        (row, [Call(nothing, nothing, nothing, "", nothing, nothing, 0, row, future)])
        for row, future in zip(rows, futures, strict=True)
    ]
    return rows, futures, calls


def test_a_teacher_that_stays_away_is_not_said_to_be_back_when_rows_of_another_arrive() -> None:
    said: list[tuple[str, str]] = []
    hooks = OutageHooks(
        waiting=lambda outage: said.append(("away", outage.teacher)),
        emergency=lambda outage: said.append(("emergency", outage.teacher)),
        recovered=lambda outage: said.append(("back", outage.teacher)),
    )
    rows, futures, calls = asked(4)

    def outages() -> list[Outage]:  # whoever waits looks here, and the next answer arrives then
        next(future for future in futures if not future.done()).set_result([None])
        return [Outage("a", 500.0, 1, "down", 1e4)]

    fleet: Any = SimpleNamespace(outages=outages)
    arriving = Arriving(calls, lambda row, mine: None, fleet, TeacherSettings(), hooks)
    for row in rows[:3]:
        arriving.wait([row])
    assert said == [("away", "a"), ("emergency", "a")] and not arriving.done
    futures[3].set_result(None)
    arriving.wait(rows)
    assert said[2:] == [("back", "a")] and arriving.done


def test_the_failure_of_a_row_is_that_of_who_waits_for_it_and_the_others_are_given_up() -> None:
    rows, futures, calls = asked(3)
    kept: list[Any] = []
    arriving = Arriving(calls, lambda row, mine: kept.append(row), None, None, OutageHooks())
    futures[0].set_result(None)
    futures[1].set_exception(OutageError("teacher 'a' stayed away."))
    assert arriving.late(rows) == 1
    arriving.wait(rows[:1])
    with pytest.raises(OutageError):
        arriving.wait(rows[1:2])
    arriving.close()
    assert kept == rows[:1] and futures[2].cancelled() and arriving.done
