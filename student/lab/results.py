"""Results of an experiment: every replicate of every arm, and the chosen learning rates."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from student.lab.answers import drawn_share
from student.lab.curve import PLATEAU, Curve, Sizes, read_curve
from student.lab.evaluate import Level, read_level
from student.lab.experiment import OF_METRIC, Arm, Experiment, Replicate
from student.lab.plan import ExperimentPlan
from student.lab.runs import Run, flatten, times


@dataclass(frozen=True, slots=True)
class SeedResult:
    """One finished run.

    Attributes:
        replicate: its world and seed.
        curve: what it learnt and spent.
        totals: sums of all cost/* metrics, tokens.
        cpu_seconds, wall_seconds: of the student's process.
        fired: whether everything that the arm's mechanism must show was seen.
        level: what the last weights reach; None where not measured.
        drawn: tokens that a teacher drew for the answers that the run learnt from, those not kept included.
        metrics: those of training that claims are about, means over the last quarter of the steps.
    """

    replicate: Replicate
    curve: Curve
    totals: dict[str, float]
    cpu_seconds: float
    wall_seconds: float
    fired: bool
    level: Level | None = None
    drawn: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)

    def final(self, measure: str) -> float:
        """Accuracy, greedy accuracy or pass@k of the last weights; reverse_kl of the last evaluations; fall; metric."""
        if measure.startswith(OF_METRIC):
            return self.metrics.get(measure.removeprefix(OF_METRIC), math.nan)
        if measure == "reverse_kl":
            return self.curve.final(measure)
        if measure == "fall":
            return self.curve.fall()
        return math.nan if self.level is None else self.level.get(measure)


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm: its learning rate and its runs; `swept` maps each rate tried to its measure on the tuning replicate."""

    name: str
    title: str
    rate: float
    swept: dict[str, float] = field(default_factory=dict)
    seeds: list[SeedResult] = field(default_factory=list)

    def by_replicate(self) -> dict[Replicate, SeedResult]:
        """Replicate to result."""
        return {result.replicate: result for result in self.seeds}

    @property
    def last_gain(self) -> float:
        """Accuracy gained at the end, mean over replicates; see `Curve.last_gain`."""
        return float(np.mean([seed.curve.last_gain() for seed in self.seeds])) if self.seeds else math.nan

    @property
    def at_plateau(self) -> bool:
        """The rule of all arms: the last three evaluations are within a point of the three before, on average."""
        return abs(self.last_gain) <= PLATEAU


def sizes(plan: ExperimentPlan, arm: Arm | None = None) -> Sizes:
    """Parameters of student, teacher and reference, from the world; several teachers are of one size.

    Args:
        plan: gives the world.
        arm: whose teacher, reference and student they are, where its overrides name others than the experiment.
    """
    experiment, models = plan.experiment, plan.models[plan.worlds[0]]
    named = flatten(experiment.recipe) | dict(arm.overrides if arm else {})
    reference = named.get("teachers.reference")
    teachers = [name for name in experiment.served if name != reference]
    teacher = named.get("teachers.default") or (teachers or [experiment.student])[0]
    student = models.model((arm.student if arm else "") or experiment.student).parameters
    return Sizes(
        student, models.model(teacher).parameters, models.model(reference).parameters if reference else student
    )


def read_seed(plan: ExperimentPlan, arm: Arm, run: Run) -> SeedResult:
    """The result of a finished run."""
    records, spent = run.records(), times(run)
    totals: dict[str, float] = {}
    for record in records:
        for name, value in record.items():
            if name.startswith("cost/"):
                totals[name] = totals.get(name, 0.0) + value
    fired = all(fires.seen(records) for fires in arm.fires)
    curve = read_curve(records, run.summary(), sizes(plan, arm))
    drawn = totals.get("cost/train/expert_tokens", 0.0) * _drawn_share(plan, arm, run.replicate.world)
    metrics = {name: late_mean(records, name) for name in claimed_metrics(plan.experiment)}
    return SeedResult(run.replicate, curve, totals, spent["cpu"], spent["wall"], fired, read_level(run), drawn, metrics)


def claimed_metrics(experiment: Experiment) -> list[str]:
    """The metrics of training that claims are about, in their order."""
    names = [claim.measure.removeprefix(OF_METRIC) for claim in experiment.claims if OF_METRIC in claim.measure]
    return list(dict.fromkeys(names))


def late_mean(records: Sequence[Mapping[str, Any]], name: str) -> float:
    """Mean of a metric over the last quarter of the steps, where it is known; nan where it is in none of them."""
    late = records[-max(1, len(records) // 4) :]
    values = [record[name] for record in late if record.get(name) is not None]
    return float(np.mean(values)) if values else math.nan


def _drawn_share(plan: ExperimentPlan, arm: Arm, world: int) -> float:
    kinds = plan.answer_kinds([arm])
    return drawn_share(plan, world, kinds[0]) if kinds else 0.0


def choose_rate(plan: ExperimentPlan, arm: Arm) -> tuple[float, dict[str, float]]:
    """The best learning rate of the sweep and all its values; the rates themselves when a sweep is incomplete."""
    if arm.same_rate_as is not None:
        return choose_rate(plan, plan.experiment.arm(arm.same_rate_as))[0], {}
    swept = {
        f"{run.rate:g}": read_seed(plan, arm, run).curve.final(plan.experiment.tune)
        for run in plan.tuning(arm)
        if run.done
    }
    if not swept:
        return plan.rates(arm)[0], {}
    sign = 1.0 if plan.experiment.tune == "accuracy" else -1.0
    # A rate without a measure is never the best one; a comparison with nan would let it be.
    best = max(swept, key=lambda rate: -math.inf if math.isnan(swept[rate]) else sign * swept[rate])
    return float(best), swept


def collect(plan: ExperimentPlan) -> list[ArmResult]:
    """What is finished of an experiment: runs that are trained and graded."""
    arms = []
    for arm in plan.experiment.arms:
        rate, swept = choose_rate(plan, arm)
        runs = [plan.run(arm, replicate, rate) for replicate in plan.replicates]
        seeds = [read_seed(plan, arm, run) for run in runs if run.done and read_level(run) is not None]
        arms.append(ArmResult(arm.name, arm.title, rate, swept, seeds))
    return arms


def arm_json(arm: ArmResult) -> dict[str, Any]:
    """An arm as JSON values."""
    data = asdict(arm)
    for seed, result in zip(data["seeds"], arm.seeds, strict=True):
        seed["replicate"] = result.replicate.name
    return {**data, "last_gain": arm.last_gain, "at_plateau": arm.at_plateau}
