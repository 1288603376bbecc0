"""Results of an experiment: every seed of every arm, the chosen learning rates, and the verdict on each claim."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from student.lab.curve import Curve, Sizes, read_curve
from student.lab.evaluate import Levels, read_greedy
from student.lab.experiment import Arm, Claim, Experiment
from student.lab.plan import Plan
from student.lab.runs import Run, times
from student.lab.stats import Interval, bootstrap, bootstrap_ratio

LEAST_GAIN = 0.02
"""Accuracy that a rival must have gained before the cost of reaching it means anything."""


@dataclass(frozen=True, slots=True)
class SeedResult:
    """One finished run.

    Attributes:
        seed: its seed.
        curve: what it learnt and spent.
        totals: sums of all cost/* metrics, tokens.
        cpu_seconds, wall_seconds: of the student's process.
        fired: whether everything that the arm's mechanism must show was seen.
        greedy: accuracy of greedy answers at the end; nan where not measured.
    """

    seed: int
    curve: Curve
    totals: dict[str, float]
    cpu_seconds: float
    wall_seconds: float
    fired: bool
    greedy: float = math.nan

    def final(self, measure: str) -> float:
        """Final accuracy, reverse_kl or greedy accuracy."""
        return self.greedy if measure == "greedy" else self.curve.final(measure)


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm: its learning rate and its seeds; `swept` maps each rate tried to its measure on the tuning seed."""

    name: str
    title: str
    rate: float
    swept: dict[str, float] = field(default_factory=dict)
    seeds: list[SeedResult] = field(default_factory=list)

    def by_seed(self) -> dict[int, SeedResult]:
        """Seed to result."""
        return {result.seed: result for result in self.seeds}


def sizes(plan: Plan) -> Sizes:
    """Parameters of student, teacher and reference, from the world; several teachers are of one size."""
    experiment = plan.experiment
    reference = (experiment.recipe.get("teachers") or {}).get("reference")
    teachers = [name for name in experiment.served if name != reference] or ["base"]
    return Sizes(
        plan.cast.model("base").parameters,
        plan.cast.model(teachers[0]).parameters,
        plan.cast.model(reference or "base").parameters,
    )


def read_seed(plan: Plan, arm: Arm, run: Run) -> SeedResult:
    """The result of a finished run."""
    records, spent = run.records(), times(run)
    totals: dict[str, float] = {}
    for record in records:
        for name, value in record.items():
            if name.startswith("cost/"):
                totals[name] = totals.get(name, 0.0) + value
    fired = all(fires.seen(records) for fires in arm.fires)
    curve = read_curve(records, run.summary(), sizes(plan))
    greedy = read_greedy(run)
    return SeedResult(
        run.seed, curve, totals, spent["cpu"], spent["wall"], fired, math.nan if greedy is None else greedy
    )


def choose_rate(plan: Plan, arm: Arm) -> tuple[float, dict[str, float]]:
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
    best = max(swept, key=lambda rate: -math.inf if math.isnan(swept[rate]) else sign * swept[rate])
    return float(best), swept


def collect(plan: Plan) -> list[ArmResult]:
    """What is finished of an experiment."""
    arms = []
    for arm in plan.experiment.arms:
        rate, swept = choose_rate(plan, arm)
        runs = [plan.run(arm, seed, rate) for seed in plan.seeds]
        seeds = [read_seed(plan, arm, run) for run in runs if run.done]
        arms.append(ArmResult(arm.name, arm.title, rate, swept, seeds))
    return arms


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judged claim.

    Attributes:
        claim: its text.
        outcome: "holds", "does not hold", "not shown" (the interval contains no effect), "failed" (a mechanism never
            fired) or "incomplete".
        interval: of the difference or ratio, arm against rival.
        ratio: whether the interval is of a ratio.
        seeds: the paired differences or ratios.
        why: for failures.
    """

    claim: str
    outcome: str
    interval: Interval | None = None
    ratio: bool = False
    seeds: tuple[float, ...] = ()
    why: str = ""


def judge(experiment: Experiment, claim: Claim, arms: Sequence[ArmResult], models: Levels) -> Verdict:
    """The verdict on a claim; `models` has the levels of evaluated models by name and seed."""
    found = {arm.name: arm for arm in arms}
    mine = found[claim.arm]
    rival = found.get(claim.rival)
    level = models.get(claim.rival.removeprefix("model:"), {}) if rival is None else rival.by_seed()
    common = [result for result in mine.seeds if result.seed in level]
    if len(common) < 2 or (rival is not None and len(rival.seeds) < len(mine.seeds)):
        return Verdict(claim.text, "incomplete")
    idle = [arm.name for arm in (mine, rival) if arm is not None and not all(r.fired for r in arm.seeds)]
    if idle:
        return Verdict(claim.text, "failed", why=f"the mechanism of {' and '.join(idle)} never fired")
    if rival is None:
        levels = models[claim.rival.removeprefix("model:")]
        pairs = [(r.final(claim.measure), float(getattr(levels[r.seed], claim.measure))) for r in common]
    else:
        pairs = [_pair(claim, r, rival.by_seed()[r.seed]) for r in common]
    return _decide(claim, pairs)


def _pair(claim: Claim, one: SeedResult, other: SeedResult) -> tuple[float, float]:
    measure, mine, rival = claim.measure, one.curve, other.curve
    if measure in ("accuracy", "greedy", "reverse_kl"):
        return one.final(measure), other.final(measure)
    if measure.endswith("_at_tokens"):
        tokens = min(mine.tokens[-1], rival.tokens[-1])
        name = measure.removesuffix("_at_tokens")
        return mine.at(name, tokens), rival.at(name, tokens)
    gain = rival.final("accuracy") - rival.accuracy[0]
    if gain < LEAST_GAIN:
        return math.nan, math.nan
    level = rival.accuracy[0] + claim.level * gain
    cost = measure.removesuffix("_to")
    return mine.cost_to(level, cost), rival.cost_to(level, cost)


def _decide(claim: Claim, pairs: list[tuple[float, float]]) -> Verdict:
    ratio = claim.measure.endswith("_to")
    if any(math.isnan(value) for pair in pairs for value in pair):
        why = f"{claim.rival} gained too little accuracy to be reached" if ratio else "the measure is missing"
        return Verdict(claim.text, "not shown", why=why, ratio=ratio)
    if any(math.isinf(top) or math.isinf(bottom) for top, bottom in pairs):
        missed = [i for i, (top, _) in enumerate(pairs) if math.isinf(top)]
        if len(missed) == len(pairs):
            return Verdict(claim.text, "does not hold", why="no seed of the arm reached the level", ratio=True)
        pairs = [pair for pair in pairs if not any(map(math.isinf, pair))]
        if missed or len(pairs) < 2:
            why = f"{len(missed)} of the seeds never reached the level"
            return Verdict(claim.text, "not shown", why=why, ratio=True, seeds=tuple(a / b for a, b in pairs))
    if ratio:
        interval = bootstrap_ratio([a for a, _ in pairs], [b for _, b in pairs])
        seeds = tuple(a / b for a, b in pairs)
    else:
        seeds = tuple(a - b for a, b in pairs)
        interval = bootstrap(seeds)
    neutral = 1.0 / claim.factor if ratio else 0.0
    above, below = interval.low > neutral, interval.high < neutral
    wanted, opposite = (above, below) if claim.direction == "more" else (below, above)
    outcome = "holds" if wanted else "does not hold" if opposite else "not shown"
    return Verdict(claim.text, outcome, interval, ratio, seeds)


def to_json(plan: Plan, arms: Sequence[ArmResult], verdicts: Sequence[Verdict], models: Levels) -> dict[str, Any]:
    """Everything of an experiment as JSON values."""
    world = plan.cast.world
    return {
        "experiment": plan.experiment.name,
        "form": plan.form,
        "world": {"preset": world.preset, "seed": world.seed, "key": world.key},
        "seeds": list(plan.seeds),
        "planned_runs": len(plan.experiment.arms) * len(plan.seeds),
        "finished_runs": sum(len(arm.seeds) for arm in arms),
        "sizes": asdict(sizes(plan)),
        "models": {name: {str(seed): asdict(level) for seed, level in found.items()} for name, found in models.items()},
        "arms": [asdict(arm) for arm in arms],
        "claims": [asdict(verdict) for verdict in verdicts],
    }
