"""Decides whether a teacher is worth distilling into a student on given prompts, from three measurements.

The student answers each prompt a few times, the served teacher scores the answers, and the teacher's own weights answer
the same prompts on this machine. The recipe's verifier says which answers are correct. All intervals are 95 % t
intervals over prompts, on differences within a prompt.

    better     accuracy of the teacher's answers minus accuracy of the student's
    rescue     accuracy of the student's answers with the second half written by the teacher, minus that of the same
               answers as the student ended them: what the teacher is worth at states that the student reaches
    slope      mean over prompts of Cov(correct, sum_t log T(y_t|s_t) - log S(y_t|s_t)) over the student's answers:
               the derivative at lambda = 0 of the accuracy of the policy S^(1 - lambda) T^lambda, and so the effect of
               the first step of distillation; it needs only scores, but its few large terms make its interval wide

A teacher that is better, and that helps at the student's states, is worth distilling. If it is better only from its own
states, fine-tune on its answers instead (`opd answers`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from opd.wire.types import PayloadKind
from student.data.intervals import Interval, t_interval
from student.data.needs import TEACHER
from student.data.row import Row

MARGIN = 0.01
"""Gain in accuracy below which a teacher is not worth its servers: one percentage point."""

Kind = Literal["distil", "do not distil", "not enough evidence"]


@dataclass(frozen=True, slots=True)
class Worth:
    """The measurements of one teacher; see the module. Unknown accuracies are nan, and unknown intervals None.

    Attributes:
        prompts: number of prompts that the student answered.
        answers: number of the student's answers.
        student: accuracy of the student.
        teacher: accuracy of the teacher.
        better: see the module.
        rescue: see the module.
        slope: see the module.
        reverse_kl: mean of log S - log T over the student's tokens, in nats per token.
        overlap: mean share of the student's k most likely tokens that are among the teacher's k.
        mass: mean total probability that the teacher gives to the student's k most likely tokens.
        first: share of positions at which both have the same most likely token.
        k: size of the sets.
        parity: largest difference between served log-probs and those of the weights that answered here, in nats; nan
            if not known.
    """

    prompts: int
    answers: int
    student: float
    teacher: float
    better: Interval | None
    rescue: Interval | None
    slope: Interval | None
    reverse_kl: float
    overlap: float
    mass: float
    first: float
    k: int
    parity: float


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The decision, with its reason in a sentence."""

    kind: Kind
    reason: str


def judge(worth: Worth) -> Recommendation:
    """Decide whether to distil from the measurements, by the intervals rather than the means."""
    if math.isnan(worth.student):
        return _open("no answer could be judged; give the prompts a verifier and reference answers.")
    if worth.student == worth.teacher == 0:
        return _open(
            "neither student nor teacher gave a correct answer; try easier prompts, longer answers or another verifier."
        )
    return _from_scores(worth) if worth.better is None else _from_answers(worth, worth.better)


def _from_scores(worth: Worth) -> Recommendation:
    """The decision on a teacher without answers of its own."""
    if worth.slope is not None and worth.slope.high < 0:
        return Recommendation("do not distil", "the teacher prefers wrong answers of the student to correct ones.")
    return _open("the teacher's own answers are not known here; give its weights with --teacher-model.")


def _from_answers(worth: Worth, better: Interval) -> Recommendation:
    """The decision on a teacher that answered the prompts too."""
    states = [found for found in (worth.rescue, worth.slope) if found is not None]
    helps, hurts = any(found.low > 0 for found in states), any(found.high < 0 for found in states)
    if better.high < MARGIN:
        return Recommendation(
            "do not distil", f"the teacher is not better than the student by {MARGIN:.0%} on these prompts."
        )
    if better.low <= 0:
        return _open(f"it is open whether the teacher is better; use about {_needed(better)} prompts.")
    if helps and not hurts:
        return Recommendation(
            "distil", "the teacher is better, and it also helps in the states that the student gets into."
        )
    if hurts or (worth.rescue is not None and worth.rescue.high < MARGIN):
        return Recommendation(
            "do not distil",
            "the teacher is better only in its own states; fine-tune on its answers instead (opd answers).",
        )
    return _open(
        "the teacher is better, but whether it helps in the student's states is open; use about "
        f"{_needed(worth.rescue)} prompts."
    )


def _open(reason: str) -> Recommendation:
    return Recommendation("not enough evidence", reason)


def _needed(found: Interval | None) -> int:
    """Number of prompts to ask for so that an interval with this mean would lie above 0.

    It is between 2 and 64 times the present number; 256 if nothing was measured.
    """
    if found is None:
        return 256
    half = (found.high - found.low) / 2
    factor = 2.0 if found.mean <= 0 else min(64.0, max(2.0, 1.2 * (half / found.mean) ** 2))
    return math.ceil(found.count * factor)


def compare(
    student: Sequence[Row],
    teacher: Sequence[Row],
    rescued: Sequence[tuple[Row, Row]],
    *,
    k: int,
    parity: float,
) -> Worth:
    """Compute the measurements of one teacher. All rows must be verified.

    Args:
        student: answers of the student, with the teacher's top-k and gather scores.
        teacher: the teacher's answers to the same prompts; empty if it cannot answer here.
        rescued: pairs of an answer of the student and the same answer with its second half written by the teacher.
        k: size of the sets of most likely tokens.
        parity: see `Worth`.
    """
    ours, theirs = _by_prompt(student), _by_prompt(teacher)
    both = [uid for uid in ours if uid in theirs]
    halves: dict[str, list[float]] = {}
    for own, other in rescued:
        before, after = own.verdict_value, other.verdict_value
        if before is not None and after is not None:
            halves.setdefault(own.prompt.uid, []).append(after - before)
    # Both accuracies are over the same prompts, if the teacher has any judged answers.
    judged = both or list(ours)
    return Worth(
        prompts=len({row.prompt.uid for row in student}),
        answers=len(student),
        student=_mean(np.mean(ours[uid]) for uid in judged),
        teacher=_mean(np.mean(theirs[uid]) for uid in both),
        better=_interval([float(np.mean(theirs[uid]) - np.mean(ours[uid])) for uid in both]),
        rescue=_interval([float(np.mean(found)) for found in halves.values()]),
        slope=_interval(_covariances(student)),
        k=k,
        parity=parity,
        **_states(student),
    )


def log_ratio(row: Row) -> np.ndarray:
    """[T] log T - log S of the sampled tokens in nats, float64."""
    sampled = row.signals[TEACHER, PayloadKind.TOPK].sampled
    assert sampled is not None  # both payloads carry it
    return sampled.astype(np.float64) - row.behaviour_logp


def _states(rows: Sequence[Row]) -> dict[str, float]:
    """The figures of `Worth` that compare both models at the student's states: means over all tokens."""
    ratios, overlaps, masses, firsts = [], [], [], []
    for row in rows:
        top, gather = row.signals[TEACHER, PayloadKind.TOPK], row.signals[TEACHER, PayloadKind.GATHER]
        assert top.ids is not None and gather.values is not None and row.candidates is not None
        ratios.append(-log_ratio(row))
        overlaps.append((row.candidates[:, :, None] == top.ids[:, None, :]).any(-1).mean(-1))
        masses.append(np.exp(gather.values.astype(np.float64)).sum(-1))
        firsts.append(row.candidates[:, 0] == top.ids[:, 0])
    return {
        "reverse_kl": float(np.concatenate(ratios).mean()),
        "overlap": float(np.concatenate(overlaps).mean()),
        "mass": float(np.concatenate(masses).mean()),
        "first": float(np.concatenate(firsts).mean()),
    }


def _by_prompt(rows: Sequence[Row]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        value = row.verdict_value
        if value is not None:
            found.setdefault(row.prompt.uid, []).append(value)
    return found


def _covariances(rows: Sequence[Row]) -> list[float]:
    """Unbiased covariance of verdict and summed log-ratio within each prompt that has at least two judged answers."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        value = row.verdict_value
        if value is not None:
            groups.setdefault(row.prompt.uid, []).append((value, float(log_ratio(row).sum())))
    return [float(np.cov(np.array(pairs).T, ddof=1)[0, 1]) for pairs in groups.values() if len(pairs) > 1]


def _interval(values: Sequence[float]) -> Interval | None:
    return t_interval(values) if len(values) > 1 else None


def _mean(values: Iterable[np.floating | float]) -> float:
    found = [float(value) for value in values]
    return sum(found) / len(found) if found else math.nan
