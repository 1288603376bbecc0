"""Curves of a finished run: accuracy and reverse KL over sampled tokens and FLOPs.

FLOPs are counted, not measured: 2 P per position for a forward pass and 6 P per position for forward and backward, with
P the number of parameters of the model (arXiv 2001.08361). student/data/costs.py counts the positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

TAIL = 3
"""Number of evaluations at the end of a run whose mean is its final value."""
PLATEAU = 0.01
"""Largest difference in accuracy between the last three evaluations and the three before, for an arm at its plateau."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Number of parameters of each model of a run."""

    student: int
    teacher: int
    reference: int


@dataclass(frozen=True, slots=True)
class Curve:
    """The evaluations of one run. All lists have one entry per evaluation, of which the first is before training.

    Attributes:
        steps: training steps done.
        tokens: tokens sampled so far, including those of probes and gates, and answers written by a teacher.
        flops: 10^9 FLOPs spent so far by all models, including those of probes and gates.
        accuracy: accuracy on held-out prompts; nan where unknown.
        reverse_kl: KL(student || teacher) in nats per token; None where it was not measured.
    """

    steps: list[int]
    tokens: list[float]
    flops: list[float]
    accuracy: list[float]
    reverse_kl: list[float | None]

    def final(self, measure: str) -> float:
        """Mean of `measure` (accuracy or reverse_kl) over the last `TAIL` evaluations after training began.

        nan if there are none in which it was measured.
        """
        values = [v for v in getattr(self, measure)[1:] if v is not None]
        return float(np.mean(values[-TAIL:])) if values else float("nan")

    def last_gain(self) -> float:
        """Mean accuracy of the last `TAIL` evaluations minus that of the `TAIL` before; nan for a shorter run."""
        values = self.accuracy[1:]
        if len(values) < 2 * TAIL:
            return float("nan")
        return float(np.mean(values[-TAIL:]) - np.mean(values[-2 * TAIL : -TAIL]))

    def fall(self) -> float:
        """The most that accuracy ever fell below its highest value so far: 0 for a run that only rose."""
        return float(np.max(np.maximum.accumulate(self.accuracy) - self.accuracy))

    def at(self, measure: str, tokens: float) -> float:
        """`measure` when `tokens` had been sampled, by linear interpolation between evaluations."""
        # Not smoothed: at the end of a run all neighbours of a point lie before it, so that their mean lags behind a
        # rising curve, and of two equal curves the shorter would seem worse.
        pairs = [(t, v) for t, v in zip(self.tokens, getattr(self, measure), strict=True) if v is not None]
        return float(np.interp(tokens, [t for t, _ in pairs], [v for _, v in pairs]))

    def cost_to(self, level: float, cost: str) -> float:
        """The `cost` (steps, tokens or flops) at which accuracy first reached `level`, interpolated; inf if never.

        A level counts as reached when two evaluations in a row are at or above it, or the last one is.
        """
        spent: list[float] = getattr(self, cost)
        for i in range(1, len(self.accuracy)):
            # A single evaluation above the level may be chance.
            held = i + 1 == len(self.accuracy) or self.accuracy[i + 1] >= level
            if self.accuracy[i] >= level and held:
                before, now = self.accuracy[i - 1], self.accuracy[i]
                share = 1.0 if now == before else min(1.0, max(0.0, (level - before) / (now - before)))
                return spent[i - 1] + share * (spent[i] - spent[i - 1])
        return float("inf")


def step_flops(record: Mapping[str, Any], sizes: Sizes) -> float:
    """FLOPs of one step, from the counts in its record of metrics.jsonl."""

    def count(name: str) -> float:
        return sum(float(record.get(f"cost/{purpose}/{name}", 0.0)) for purpose in ("train", "probe", "gate"))

    student = 2.0 * (count("decoded_positions") + count("local_positions")) + 6.0 * count("gradient_positions")
    teacher = 2.0 * (count("teacher_positions") + count("expert_positions"))
    return student * sizes.student + teacher * sizes.teacher + 2.0 * count("reference_positions") * sizes.reference


def step_tokens(record: Mapping[str, Any]) -> float:
    """Number of tokens sampled in one step: in rollouts, probes and gates, and in answers written by a teacher."""
    purposes = ("train", "probe", "gate")
    names = [f"cost/{p}/sampled_tokens" for p in purposes] + ["cost/train/expert_tokens"]
    return sum(float(record.get(name, 0.0)) for name in names)


def read_curve(records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], sizes: Sizes) -> Curve:
    """Make the curve of a run from the records of its metrics.jsonl and its summary.json."""
    tokens = list(accumulate((step_tokens(r) for r in records), initial=0.0))
    flops = list(accumulate((step_flops(r, sizes) / 1e9 for r in records), initial=0.0))
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
