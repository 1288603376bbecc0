"""Premise of experiments on reinforcement learning: groups of answers differ enough to learn from before training.

Figures of groups of 8 answers to held-out prompts:

    mixed     share of groups with both right and wrong answers; other groups have advantage 0 under a group's mean
    apart     success rate of the kind of prompts that is solved most often, minus that of the kind solved least often
    shorter   length of the shortest right answer of a group divided by that of the longest right one, averaged over
              groups with at least two right answers
"""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from opd_lab.evaluate import SAMPLES, measure_model
from opd_lab.experiment import Arm, Replicate
from opd_lab.plan import ExperimentPlan
from opd_lab.premises import Measured

PROMPTS = {"full": 96, "quick": 6}
"""Number of prompts, each answered 8 times, by form."""


def measure(
    plan: ExperimentPlan,
    world: int,
    *,
    mixed: float = 0.0,
    equal: float = 0.0,
    apart: float = 0.0,
    shorter: float = 1.0,
) -> Measured:
    """Measure the student's answers to held-out prompts at temperature 1, before any training.

    Args:
        plan: gives the model and the prompts.
        world: seed of the world.
        mixed: least share of groups with both right and wrong answers for the premise to be present.
        equal: least share of other groups.
        apart: least difference in success rate between kinds of prompts.
        shorter: largest ratio of shortest to longest right answer; below 1, it must be known.
    """
    experiment = plan.experiment
    data = plan.recipe(Arm("premise", ""), Replicate(world, experiment.seeds[0]), plan.default_rate())
    path = plan.models[world].model(experiment.student).path
    settings = {"samples": SAMPLES, "prompts": PROMPTS[plan.form], "temperature": 1.0}
    groups = in_groups(measure_model(data, path, settings, keep=True)["samples"])
    share = mean(len({answer["verdict"] for answer in group}) > 1 for group in groups)
    rates = by_kind(groups)
    ratio = shortest_over_longest(groups)
    gap = max(rates.values()) - min(rates.values())
    present = share >= mixed and 1.0 - share >= equal and gap >= apart and (ratio is None or ratio <= shorter)
    kinds = ", ".join(f"{kind} {rate:.2f}" for kind, rate in rates.items())
    lengths = "no group has two right answers" if ratio is None else f"shortest right over longest right {ratio:.2f}"
    return Measured(present and (ratio is not None or shorter >= 1.0), f"right: {kinds}; mixed {share:.2f}; {lengths}")


def in_groups(answers: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Group answers by prompt."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for answer in answers:
        found.setdefault(answer["uid"], []).append(answer)
    return list(found.values())


def by_kind(groups: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Share of right answers in each domain, sorted by name."""
    found: dict[str, list[bool]] = {}
    for answer in (answer for group in groups for answer in group):
        found.setdefault(answer["domain"] or "", []).append(answer["verdict"] == "correct")
    return {kind: mean(right) for kind, right in sorted(found.items())}


def shortest_over_longest(groups: Sequence[Sequence[Mapping[str, Any]]]) -> float | None:
    """The figure `shorter` of the module; None if no group has two right answers."""
    right = [[answer["tokens"] for answer in group if answer["verdict"] == "correct"] for group in groups]
    ratios = [min(lengths) / max(lengths) for lengths in right if len(lengths) > 1]
    return mean(ratios) if ratios else None
