"""Is a teacher worth distilling: the figures against enumeration, and what follows from them."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from rows import make_row

from opd.tasks.prompt import Prompt
from opd.tasks.verdict import Verdict, VerdictStatus
from opd.wire.types import PayloadKind, Scores
from student.checks.worth import Worth, _covariances, compare, judge
from student.data.intervals import Interval
from student.data.needs import TEACHER
from student.data.row import Row

S = np.array([0.5, 0.3, 0.2])
T = np.array([0.1, 0.7, 0.2])
CORRECT = np.array([0.0, 1.0, 0.25])


def row(prompt: int, sample: int, tokens: list[int]) -> Row:
    """An answer of tokens from S, scored by T, worth the mean of its tokens' values."""
    ids, scores = np.array(tokens, dtype=np.uint32), np.log(T)
    order = np.argsort(-T)[:2].astype(np.uint32)
    candidates = np.array([[0, 1]] * len(tokens), dtype=np.uint32)
    sampled = scores[ids].astype(np.float32)
    made = make_row(
        ids,
        prompt=replace(Prompt.make(f"question {prompt}"), uid=f"p{prompt}"),
        sample=sample,
        behaviour=np.log(S)[ids],
        candidates=candidates,
        verdict=Verdict(VerdictStatus.WRONG, float(CORRECT[ids].mean())),
    )
    top = np.tile(order, (len(ids), 1))
    made.signals[TEACHER, PayloadKind.TOPK] = Scores(sampled=sampled, ids=top, values=scores[top].astype(np.float32))
    values = np.tile(scores[:2], (len(ids), 1)).astype(np.float32)
    made.signals[TEACHER, PayloadKind.GATHER] = Scores(sampled=sampled, ids=candidates, values=values)
    return made


def test_the_slope_is_the_derivative_of_accuracy_along_the_way_to_the_teacher() -> None:
    """Over all pairs of answers of two tokens, weighted by their probability, float64."""
    answers = list(itertools.product(range(3), repeat=2))
    value = np.array([CORRECT[list(a)].mean() for a in answers])
    student = np.array([S[list(a)].prod() for a in answers])
    teacher = np.array([T[list(a)].prod() for a in answers])

    def accuracy(scale: float) -> float:
        policy = student ** (1 - scale) * teacher**scale
        return float((policy / policy.sum()) @ value)

    derivative = (accuracy(1e-5) - accuracy(-1e-5)) / 2e-5
    expected = 0.0
    for (a, p), (b, q) in itertools.product(zip(answers, student, strict=True), repeat=2):
        (found,) = _covariances([row(0, 0, list(a)), row(0, 1, list(b))])
        expected += p * q * found
    assert expected == pytest.approx(derivative, abs=1e-6) and derivative > 0.1


def test_figures_are_paired_by_prompt_and_unknown_verdicts_count_nowhere() -> None:
    students = [row(prompt, sample, [0, prompt % 2]) for prompt in range(4) for sample in range(2)]
    teachers = [row(prompt, 0, [1, 1]) for prompt in range(4)]
    students[0].verdict = teachers[3].verdict = Verdict(VerdictStatus.UNKNOWN, 0.0)
    rescued = [(own, row(int(own.prompt.uid[1:]), own.key.sample, [0, 1])) for own in students]
    worth = compare(students, teachers, rescued, k=2, parity=0.0)
    assert (worth.prompts, worth.answers) == (4, 8)
    assert worth.better is not None and worth.better.count == 3, "prompt 3 has no judged answer of the teacher"
    assert worth.better.mean == pytest.approx(np.mean([1.0, 0.5, 1.0]))
    assert worth.student == pytest.approx(0.5 / 3) and worth.teacher == 1.0
    assert worth.rescue is not None and worth.rescue.mean == pytest.approx(np.mean([0.5, 0.0, 0.5, 0.0]))
    assert worth.overlap == 0.5, "the student's set is {0, 1}, the teacher's {1, 2}"
    assert worth.mass == pytest.approx(0.8) and worth.first == 0.0
    ratios = [np.log(S[t] / T[t]) for own in students for t in own.response_ids]
    assert worth.reverse_kl == pytest.approx(np.mean(ratios), abs=1e-6)


def interval(mean: float, half: float) -> Interval:
    return Interval(mean, mean - half, mean + half, 50)


WORTH = Worth(50, 200, 0.4, 0.6, interval(0.2, 0.1), interval(0.1, 0.05), None, 0.5, 0.6, 0.9, 0.5, 16, 0.0)


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        ({}, "distil", "helps in the states"),
        ({"rescue": interval(0.05, 0.1), "slope": interval(0.3, 0.1)}, "distil", "helps"),
        ({"better": interval(-0.1, 0.05)}, "do not distil", "not better"),
        ({"better": interval(0.0, 0.005)}, "do not distil", "not better"),
        ({"better": interval(0.1, 0.2)}, "not enough evidence", "use about 240 prompts"),
        ({"rescue": interval(-0.1, 0.05)}, "do not distil", "only in its own states"),
        ({"rescue": interval(0.0, 0.009)}, "do not distil", "only in its own states"),
        ({"rescue": interval(0.05, 0.1)}, "not enough evidence", "whether it helps"),
        ({"rescue": interval(0.1, 0.05), "slope": interval(-0.3, 0.1)}, "do not distil", "only in its own states"),
        ({"better": None, "rescue": None, "slope": interval(0.3, 0.1)}, "not enough evidence", "--teacher-model"),
        ({"better": None, "rescue": None, "slope": interval(-0.3, 0.1)}, "do not distil", "prefers wrong answers"),
        ({"student": math.nan, "better": None}, "not enough evidence", "verifier"),
        ({"student": 0.0, "teacher": 0.0, "better": interval(0.0, 0.0)}, "not enough evidence", "neither student"),
    ],
)
def test_what_follows(changes: dict[str, object], kind: str, reason: str) -> None:
    verdict = judge(replace(WORTH, **changes))  # type: ignore[arg-type]
    assert verdict.kind == kind and reason in verdict.reason, verdict
