"""SEELE: the curve that is fitted, the share of the solution that follows from it, and what the rounds are shown."""

import math
from typing import Any

import pytest
from thread_ranks import build, metrics_of, of, place, sampled, together

from opd.errors import DataError
from opd.tasks.prompt import Prompt
from opd_zoo.strategies.seele import fitted
from student.data.outcome import outcome_of
from student.data.plan import PlannedRow
from student.data.report import StepReport
from student.data.row import Row


def curve(rate: float, k: float, b: float, c: float) -> float:
    return c + (1 - c) / (1 + math.exp(-k * (rate - b)))


@pytest.mark.parametrize(("k", "b", "c"), [(8.0, 0.3, 0.0), (20.0, 0.7, 0.0), (10.0, 0.55, 0.2)])
def test_the_curve_of_many_answers_is_found_again(k: float, b: float, c: float) -> None:
    rounds = [(rate, curve(rate, k, b, c), 1000) for rate in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)]
    wanted = b - math.log((1 - c) / (0.5 - c) - 1) / k
    assert build("seele").rate(rounds) == pytest.approx(wanted, abs=0.03)
    found = fitted(rounds, 1e-9)
    assert all(curve(r, *found) == pytest.approx(right, abs=0.05) for r, right, _ in rounds)


def test_rounds_that_are_all_right_are_shown_less_next_and_all_wrong_ones_more() -> None:
    made = build("seele")
    assert made.rate([(0.5, 1.0, 4)]) < 0.45 and made.rate([(0.5, 0.0, 4)]) > 0.55
    assert made.rate([(0.5, 0.5, 4)]) == pytest.approx(0.5, abs=0.05)
    assert made.rate([(rate, 1.0, 8) for rate in (0.5, 0.2, 0.0)]) == 0.0
    assert made.rate([(rate, 0.0, 8) for rate in (0.5, 0.8, 1.0)]) == 1.0


class Student:
    """Right where it is shown enough: nothing, 5 of 10 characters, or more than all, by the prompt."""

    def __init__(self) -> None:
        self.shown: dict[str, list[int]] = {}

    def __call__(self, planned: PlannedRow) -> Row:
        text = str(planned.prompt.text)
        hint = text.partition("\n")[2]
        assert "0123456789".startswith(hint)
        self.shown.setdefault(planned.key.uid, []).append(len(hint))
        return sampled(planned, float(len(hint) >= (0, 5, 99)[place(planned)]))


def planned_with_solutions(samples: int, step: int = 0) -> Any:
    def make(prompts: Any) -> Any:
        for prompt in prompts:
            prompt.extra["solution"] = "0123456789"
        return of(samples, step)(prompts)

    return make


@pytest.mark.parametrize("ranks", [1, 2])
def test_rounds_close_in_on_what_makes_half_of_the_answers_right(ranks: int) -> None:
    student = Student()
    parts = together(ranks, lambda: build("seele", rounds=4), student, plan=planned_with_solutions(8), groups=6)
    rows = [row for part, _, _ in parts for row in part]
    assert len(rows) == 48 and all(row.on_policy for row in rows)
    for uid, shown in student.shown.items():
        assert len(shown) == 8 and set(shown[:2]) == {5}  # the first round is shown half
        assert {0: shown[-1] <= 1, 1: 3 <= shown[-1] <= 6, 2: shown[-1] >= 9}[int(uid, 16) % 3]
    assert all(row.prompt.uid == row.key.uid for row in rows)
    found = metrics_of(parts[0][1])
    assert 0 < found["seele/rate"] < 1 and found["seele/off_target"] > 0 and found["seele/too_long_share"] == 0


def test_a_prompt_begins_where_its_last_step_stopped_also_after_a_resume() -> None:
    made, student = build("seele", rounds=2), Student()
    ((rows, _, _),) = together(1, lambda: made, student, plan=planned_with_solutions(4), groups=6)
    assert made.next == {}  # an interrupted step is taken again
    made.observe(StepReport(0, {}, [outcome_of(row) for row in rows]))
    resumed, again = build("seele", rounds=2), Student()
    resumed.load_state_dict(made.state_dict())
    together(1, lambda: resumed, again, plan=planned_with_solutions(4, step=1), groups=6)
    firsts = {int(uid, 16) % 3: shown[0] for uid, shown in again.shown.items()}
    assert firsts[0] < 5 < firsts[2]


def test_a_hint_over_the_limit_is_left_out_and_a_missing_solution_is_refused() -> None:
    student = Student()
    ((_, sampling, _),) = together(
        1, lambda: build("seele"), student, plan=planned_with_solutions(4), groups=2, longest=7
    )
    assert metrics_of(sampling)["seele/too_long_share"] > 0 and all(shown[0] == 0 for shown in student.shown.values())
    with pytest.raises(DataError, match="keep_columns"):
        build("seele").check_prompts([Prompt.make("q")])
