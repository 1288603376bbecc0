"""Reads the results of an experiment: every replicate of every arm, and the chosen learning rates."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from opd.config.text import flatten
from opd_lab.answers import drawn_share
from opd_lab.curve import PLATEAU, Curve, Sizes, read_curve
from opd_lab.evaluate import Level, read_level
from opd_lab.experiment import OF_METRIC, Arm, Experiment, Replicate
from opd_lab.plan import ExperimentPlan
from opd_lab.runs import Run, times


@dataclass(frozen=True, slots=True)
class SeedResult:
    """The result of one finished run.

    Attributes:
        replicate: its world and seed.
        curve: its evaluations and costs.
        totals: sum of each cost/* metric over all steps, in tokens or positions.
        cpu_seconds: CPU time of the student's process.
        fired: whether all evidence that the arm's mechanism acted was seen.
        level: what the last weights reach; None if not measured.
        drawn: tokens that a teacher drew for the answers that the run learnt from, including answers not kept.
        metrics: the training metrics that claims are about, as means over the last quarter of the steps.
    """

    replicate: Replicate
    curve: Curve
    totals: dict[str, float]
    cpu_seconds: float
    fired: bool
    level: Level | None = None
    drawn: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)

    def final(self, measure: str) -> float:
        """The value of a claim's measure at the end of the run; nan if unknown.

        This is `Curve.final` for reverse_kl, `Curve.fall` for fall, a mean for "metric/NAME", and otherwise a figure
        of the last weights' level.
        """
        if measure.startswith(OF_METRIC):
            return self.metrics.get(measure.removeprefix(OF_METRIC), math.nan)
        if measure == "reverse_kl":
            return self.curve.final(measure)
        if measure == "fall":
            return self.curve.fall()
        return math.nan if self.level is None else self.level.get(measure)


@dataclass(frozen=True, slots=True)
class ArmResult:
    """The results of one arm.

    Attributes:
        name: name of the arm.
        title: its title.
        rate: its learning rate.
        swept: for each rate of its sweep, the tuning measure on the tuning replicate.
        seeds: results of its finished runs.
    """

    name: str
    title: str
    rate: float
    swept: dict[str, float] = field(default_factory=dict)
    seeds: list[SeedResult] = field(default_factory=list)

    def by_replicate(self) -> dict[Replicate, SeedResult]:
        """The results by replicate."""
        return {result.replicate: result for result in self.seeds}

    @property
    def last_gain(self) -> float:
        """Mean over replicates of `Curve.last_gain`, the accuracy gained at the end; nan without results."""
        return float(np.mean([seed.curve.last_gain() for seed in self.seeds])) if self.seeds else math.nan

    @property
    def at_plateau(self) -> bool:
        """Whether mean accuracy over the last three evaluations is within a point of that over the three before."""
        return abs(self.last_gain) <= PLATEAU


def sizes(plan: ExperimentPlan, arm: Arm | None = None) -> Sizes:
    """Numbers of parameters of student, teacher and reference. Several teachers are taken to have the same size.

    Args:
        plan: gives the world.
        arm: arm whose overrides may name other models than the experiment; None for the experiment's.
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
    """Read the result of a finished run."""
    records, cpu = run.records(), times(run)["cpu"]
    totals: dict[str, float] = {}
    for record in records:
        for name, value in record.items():
            if name.startswith("cost/"):
                totals[name] = totals.get(name, 0.0) + value
    fired = all(fires.seen(records) for fires in arm.fires)
    curve = read_curve(records, run.summary(), sizes(plan, arm))
    drawn = totals.get("cost/train/expert_tokens", 0.0) * _drawn_share(plan, arm, run.replicate.world)
    metrics = {name: late_mean(records, name) for name in claimed_metrics(plan.experiment)}
    return SeedResult(run.replicate, curve, totals, cpu, fired, read_level(run), drawn, metrics)


def claimed_metrics(experiment: Experiment) -> list[str]:
    """Names of the training metrics that claims are about, in the order of the claims."""
    names = [claim.measure.removeprefix(OF_METRIC) for claim in experiment.claims if OF_METRIC in claim.measure]
    return list(dict.fromkeys(names))


def late_mean(records: Sequence[Mapping[str, Any]], name: str) -> float:
    """Mean of a metric over those of the last quarter of the steps that have it; nan if none has."""
    late = records[-max(1, len(records) // 4) :]
    values = [record[name] for record in late if record.get(name) is not None]
    return float(np.mean(values)) if values else math.nan


def _drawn_share(plan: ExperimentPlan, arm: Arm, world: int) -> float:
    kinds = plan.answer_kinds([arm])
    return drawn_share(plan, world, kinds[0]) if kinds else 0.0


def choose_rate(plan: ExperimentPlan, arm: Arm) -> tuple[float, dict[str, float]]:
    """Choose the learning rate of an arm.

    Returns:
        The best rate among the finished runs of the sweep, and the tuning measure of each of these by rate. The first
        rate and no measures if none is finished; the other arm's rate and no measures with `same_rate_as`.
    """
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
    # nan is replaced, because comparisons with it would let a rate without a measure come out best.
    best = max(swept, key=lambda rate: -math.inf if math.isnan(swept[rate]) else sign * swept[rate])
    return float(best), swept


def collect(plan: ExperimentPlan) -> list[ArmResult]:
    """Read the results of all arms; they have the runs that are trained and measured."""
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
