"""What a finished run learnt and what it spent: curves of accuracy and reverse KL over tokens and FLOPs.

FLOPs are counted, not measured: 2 P per position forward, 6 P per position forward and backward, P the parameters of
the model in question (arXiv 2001.08361); see student/run/costs.py for the counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

TAIL = 3
"""Evaluations at the end of a run whose mean is its final value."""
PLATEAU = 0.01
"""Accuracy by which the last three evaluations of an arm at its plateau differ, at most, from the three before."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parameters of the models of a run."""

    student: int
    teacher: int
    reference: int


@dataclass(frozen=True, slots=True)
class Curve:
    """Evaluations of one run; all lists have one entry per evaluation, the first before training.

    Attributes:
        steps: optimizer steps done.
        tokens: tokens sampled so far, probes and gates included.
        flops: spent so far, everything included.
        accuracy: on held-out prompts.
        reverse_kl: nats per token, or None where not measured.
    """

    steps: list[int]
    tokens: list[float]
    flops: list[float]
    accuracy: list[float]
    reverse_kl: list[float | None]

    def final(self, measure: str) -> float:
        """Mean of `measure` (accuracy or reverse_kl) over the last evaluations."""
        values = [v for v in getattr(self, measure)[1:] if v is not None]
        return float(np.mean(values[-TAIL:])) if values else float("nan")

    def last_gain(self) -> float:
        """How much accuracy the mean of the last `TAIL` evaluations is above that of the `TAIL` before."""
        values = self.accuracy[1:]
        if len(values) < 2 * TAIL:
            return float("nan")
        return float(np.mean(values[-TAIL:]) - np.mean(values[-2 * TAIL : -TAIL]))

    def fall(self) -> float:
        """How far accuracy ever fell under its highest value so far: 0 for a run that only rose."""
        return float(np.max(np.maximum.accumulate(self.accuracy) - self.accuracy))

    def at(self, measure: str, tokens: float) -> float:
        """`measure` where `tokens` had been sampled, by linear interpolation of the evaluations."""
        # Not smoothed: at the end of a run the neighbours of a point are those before it, so that the mean of them lags
        # behind a curve that rises, and the shorter of two runs that are alike would seem the worse one.
        pairs = [(t, v) for t, v in zip(self.tokens, getattr(self, measure), strict=True) if v is not None]
        return float(np.interp(tokens, [t for t, _ in pairs], [v for _, v in pairs]))

    def cost_to(self, level: float, cost: str) -> float:
        """`cost` (tokens or flops) at which accuracy first reached `level`, interpolated; infinite when it never did.

        A level counts as reached when two evaluations in a row are at or over it, or the last one is.
        """
        spent: list[float] = getattr(self, cost)
        for i in range(1, len(self.accuracy)):
            # A single evaluation over the level may be luck.
            held = i + 1 == len(self.accuracy) or self.accuracy[i + 1] >= level
            if self.accuracy[i] >= level and held:
                before, now = self.accuracy[i - 1], self.accuracy[i]
                share = 1.0 if now == before else min(1.0, max(0.0, (level - before) / (now - before)))
                return spent[i - 1] + share * (spent[i] - spent[i - 1])
        return float("inf")


def step_flops(record: Mapping[str, Any], sizes: Sizes) -> float:
    """FLOPs of one step from its counts."""

    def count(name: str) -> float:
        return sum(float(record.get(f"cost/{purpose}/{name}", 0.0)) for purpose in ("train", "probe", "gate"))

    student = 2.0 * (count("decoded_positions") + count("local_positions")) + 6.0 * count("gradient_positions")
    teacher = 2.0 * (count("teacher_positions") + count("expert_positions"))
    return student * sizes.student + teacher * sizes.teacher + 2.0 * count("reference_positions") * sizes.reference


def step_tokens(record: Mapping[str, Any]) -> float:
    """Tokens sampled in one step: rollouts, probes, gates, and answers written by a teacher."""
    purposes = ("train", "probe", "gate")
    names = [f"cost/{p}/sampled_tokens" for p in purposes] + ["cost/train/expert_tokens"]
    return sum(float(record.get(name, 0.0)) for name in names)


def read_curve(records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], sizes: Sizes) -> Curve:
    """The curve of a run from metrics.jsonl and summary.json."""
    tokens = list(accumulate((step_tokens(r) for r in records), initial=0.0))
    flops = list(accumulate((step_flops(r, sizes) for r in records), initial=0.0))
    curve = Curve([], [], [], [], [])

    def put(step: int, accuracy: float | None, reverse_kl: float | None) -> None:
        curve.steps.append(step)
        curve.tokens.append(tokens[step])
        curve.flops.append(flops[step])
        curve.accuracy.append(float("nan") if accuracy is None else accuracy)
        curve.reverse_kl.append(reverse_kl)

    put(0, summary["before"]["accuracy"], summary["before"]["reverse_kl"])
    for i, record in enumerate(records):
        if "eval/accuracy" in record and i + 1 < len(records):
            put(i + 1, record["eval/accuracy"], record.get("eval/reverse_kl"))
    put(len(records), summary["after"]["accuracy"], summary["after"]["reverse_kl"])
    return curve
