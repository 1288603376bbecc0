"""Figures of modes against numbers worked out by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rows import make_row

from opd.tasks.modes import ModeSettings
from opd.tasks.prompt import Prompt
from opd.tasks.verdict import Verdict
from student.data.mode_figures import (
    across_modes,
    describe_modes,
    hypervolume,
    is_trained,
    judge_budgets,
    mode_figures,
    recovery,
)
from student.data.row import Row
from student.orbit.driver import no_progress

MODES = {"long": ModeSettings(budget=8, prefix="L"), "short": ModeSettings(budget=4, prefix="S", teacher_accuracy=0.9)}


def answer(problem: str, mode: str, length: int, right: bool, truncated: bool = False) -> Row:
    prompt = MODES[mode].mark(Prompt.make(problem), mode)
    return make_row(length, prompt=prompt, truncated=truncated, verdict=Verdict.of(right))


def test_each_mode_has_its_accuracy_tokens_and_violations_and_the_pair_its_ratio() -> None:
    rows = [
        answer("a", "long", 6, True),
        answer("b", "long", 8, True, truncated=True),
        answer("a", "short", 2, True),
        answer("b", "short", 5, True),
    ]
    judge_budgets(rows, MODES)
    figures = mode_figures(rows, MODES)
    assert figures == pytest.approx(
        {
            "tokens/long": 7.0,
            "violations/long": 0.5,
            "truncation/long": 0.5,
            "accuracy/long": 0.5,
            "tokens/short": 3.5,
            "violations/short": 0.5,  # one answer of 5 tokens, over the budget of 4 though it was not cut
            "truncation/short": 0.0,
            "accuracy/short": 0.5,
            "neighbour_ratio/long": 2.0,
            "monotone": 1.0,
            "hypervolume": 0.5 * (8 - 3.5) / 8,
        }
    )
    assert "short 0.500 in 3.5 tokens (50% over budget)" in describe_modes(figures)


def test_an_answer_that_ends_with_the_budget_is_within_it_and_equal_lengths_are_monotone() -> None:
    rows = [answer("a", "long", 4, True), answer("a", "short", 4, True)]
    judge_budgets(rows, MODES)
    figures = mode_figures(rows, MODES)
    assert (figures["violations/short"], figures["accuracy/short"], figures["monotone"]) == (0.0, 1.0, 1.0)


def test_a_problem_with_a_longer_answer_in_the_narrower_mode_is_not_monotone() -> None:
    lengths = {"a": (6, 2), "b": (2, 3)}
    rows = [answer(p, m, n, True) for p, pair in lengths.items() for m, n in zip(MODES, pair, strict=True)]
    assert mode_figures(rows, MODES)["monotone"] == 0.5


def test_the_hypervolume_is_the_area_under_the_best_accuracy_so_far() -> None:
    assert hypervolume([(2.0, 0.5), (6.0, 0.9)], 8.0) == pytest.approx((4 * 0.5 + 2 * 0.9) / 8)
    # A mode that is longer and worse adds nothing; one beyond the widest budget has no area.
    assert hypervolume([(2.0, 0.5), (6.0, 0.4)], 8.0) == pytest.approx(6 * 0.5 / 8)
    assert hypervolume([(9.0, 1.0)], 8.0) == 0.0


def test_a_mode_that_is_never_trained_lies_between_its_neighbours_and_counts_for_nothing_else() -> None:
    between = ModeSettings(budget=6, prefix="M", weight=0)
    modes = {"short": MODES["short"], "between": between, "long": MODES["long"]}  # in whatever order
    trained = {"tokens/long": 8.0, "accuracy/long": 1.0, "tokens/short": 2.0, "accuracy/short": 0.5}
    found = across_modes({**trained, "tokens/between": 3.5, "accuracy/between": 1.0}, modes)
    assert found.pop("interpolation/between") == 0.25
    assert found == across_modes(trained, MODES) == {"neighbour_ratio/long": 4.0, "hypervolume": 0.5 * 6 / 8}
    assert is_trained(answer("a", "long", 3, True), modes)
    row = answer("a", "long", 3, True)
    assert not is_trained(replace(row, prompt=between.mark(row.prompt, "between")), modes)


def test_recovery_is_measured_from_the_start_to_the_teacher() -> None:
    found = recovery(
        {"accuracy/short": 0.6, "accuracy/long": 1.0}, {"accuracy/short": 0.3, "accuracy/long": 0.1}, MODES
    )
    assert found == {"recovery/short": pytest.approx(0.5)}  # the accuracy of the other teacher is not known


def test_a_stage_without_progress_is_named_with_its_curve(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "eval/accuracy": 0.25}\n{"step": 2}\n')
    summary = {"before": {"accuracy": 0.5}, "after": {"accuracy": 0.375}}
    warning = no_progress("short", tmp_path, summary)
    assert warning is not None and "accuracy 0.500 before, 0.250 at step 1, 0.375 after" in warning
    assert no_progress("short", tmp_path, {"before": {"accuracy": 0.5}, "after": {"accuracy": 0.6}}) is None
    assert no_progress("short", tmp_path, {"before": None, "after": None}) is None  # of which nothing is known


def test_a_stage_without_evaluations_is_judged_by_its_rewards(tmp_path: Path) -> None:
    def stage(*rewards: float) -> str | None:
        lines = [json.dumps({"step": i, "reward": value}) for i, value in enumerate(rewards)]
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
        return no_progress("short", tmp_path, {"before": None, "after": None})

    assert stage(0.1, 0.2, 0.3, 0.3, 0.4, 0.4, 0.5, 0.6) is None
    assert "0.400, 0.300, 0.200, 0.150; this mode's teacher is no better" in (
        stage(0.5, 0.3, 0.3, 0.3, 0.2, 0.2, 0.2, 0.1) or ""
    )


def test_modes_without_a_verdict_have_no_accuracy() -> None:
    row = replace(answer("a", "long", 3, True), verdict=Verdict.unknown("no answer"))
    figures = mode_figures([row], MODES)
    assert "accuracy/long" not in figures and "hypervolume" not in figures
