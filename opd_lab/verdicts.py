"""Judges claims from paired replicates.

    holds            the whole 95 % t interval is on the claim's side, and so is the mean of every world
    does not hold    both are on the other side, or no replicate of the arm reached the level of a cost
    not shown        neither of these
    premise absent   it does not hold or is not shown, and the method's premise was measured to be absent
    failed           the mechanism of an arm never acted
    incomplete       replicates are missing

If not all arms of a claim are at their plateau, the verdict is about a number of tokens, which it states. An arm whose
accuracy falls at the end is not at its plateau.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from opd_lab.evaluate import Levels
from opd_lab.experiment import VALUE, Claim, Replicate
from opd_lab.premises import MeasuredPremise
from opd_lab.results import ArmResult, SeedResult
from student.data.intervals import Interval, paired_ratio, t_interval

LEAST_GAIN = 0.02
"""Accuracy that a rival must have gained for the cost of reaching a level of it to be meaningful."""

Pairs = dict[Replicate, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class JudgedClaim:
    """The verdict on a claim.

    Attributes:
        claim: text of the claim.
        outcome: see the module.
        scope: "at the plateau", or the number of tokens at which it was judged; empty if it was not.
        interval: interval of arm minus rival, or of arm / rival; None if it could not be computed.
        ratio: whether the interval is of a ratio.
        pairs: the paired differences or ratios, by name of their replicate.
        why: reason for an outcome without interval.
    """

    claim: str
    outcome: str
    scope: str = ""
    interval: Interval | None = None
    ratio: bool = False
    pairs: dict[str, float] = field(default_factory=dict)
    why: str = ""


def judge(
    claim: Claim,
    arms: Sequence[ArmResult],
    models: Levels,
    replicates: Sequence[Replicate],
    premises: Sequence[MeasuredPremise] = (),
) -> JudgedClaim:
    """Judge a claim.

    Args:
        claim: the claim.
        arms: results of the arms, as far as they are finished.
        models: levels of evaluated models.
        replicates: the replicates that both sides must have.
        premises: the measured premises.
    """
    found = {arm.name: arm for arm in arms}
    mine, rival = found[claim.arm], found.get(claim.rival)
    values = _rival_values(claim, models, replicates)
    theirs: Mapping[Replicate, object] = values if rival is None else rival.by_replicate()
    if len(replicates) < 2 or not all(r in mine.by_replicate() and r in theirs for r in replicates):
        return JudgedClaim(claim.text, "incomplete")
    # Checked before any number is read, because an arm whose mechanism never acted does not differ from a plain one.
    idle = [arm.name for arm in (mine, rival) if arm is not None and not all(r.fired for r in arm.seeds)]
    if idle:
        return JudgedClaim(claim.text, "failed", why=f"the mechanism of {' and '.join(idle)} never fired")
    pairs: Pairs = {}
    for replicate in replicates:
        one = mine.by_replicate()[replicate]
        if rival is None:
            pairs[replicate] = (one.final(claim.measure), values[replicate])
        else:
            pairs[replicate] = _pair(claim, one, rival.by_replicate()[replicate])
    scope = _scope([arm for arm in (mine, rival) if arm is not None])
    verdict = _decide(claim, pairs, scope)
    # A claim that holds although its premise is absent still holds. Otherwise it has not been tested.
    absent = [p for p in premises if p.name == claim.premise and not p.present]
    if absent and verdict.outcome in ("does not hold", "not shown"):
        return JudgedClaim(
            claim.text, "premise absent", scope, verdict.interval, verdict.ratio, verdict.pairs, verdict.why
        )
    return verdict


def _rival_values(claim: Claim, models: Levels, replicates: Sequence[Replicate]) -> dict[Replicate, float]:
    """The measure of a rival that is a number or a model, by replicate; empty if the rival is an arm."""
    if claim.rival.startswith(VALUE):
        return dict.fromkeys(replicates, float(claim.rival.removeprefix(VALUE)))
    return {r: level.get(claim.measure) for r, level in models.get(claim.rival.removeprefix("model:"), {}).items()}


def _scope(arms: Sequence[ArmResult]) -> str:
    if all(arm.at_plateau for arm in arms):
        return "at the plateau"
    tokens = np.mean([seed.curve.tokens[-1] for arm in arms for seed in arm.seeds])
    return f"at {tokens / 1e3:.0f}k tokens"


def _pair(claim: Claim, one: SeedResult, other: SeedResult) -> tuple[float, float]:
    measure, mine, rival = claim.measure, one.curve, other.curve
    if measure.endswith("_at_tokens"):
        tokens = min(mine.tokens[-1], rival.tokens[-1])
        name = measure.removesuffix("_at_tokens")
        return mine.at(name, tokens), rival.at(name, tokens)
    if not measure.endswith("_to"):
        return one.final(measure), other.final(measure)
    gain = rival.final("accuracy") - rival.accuracy[0]
    if gain < LEAST_GAIN:
        return math.nan, math.nan
    level = rival.accuracy[0] + claim.level * gain
    cost = measure.removesuffix("_to")
    return mine.cost_to(level, cost), rival.cost_to(level, cost)


def _decide(claim: Claim, pairs: Pairs, scope: str) -> JudgedClaim:
    ratio = claim.measure.endswith("_to")
    if any(math.isnan(value) for pair in pairs.values() for value in pair):
        why = f"{claim.rival} gained too little accuracy to be reached" if ratio else "the measure is missing"
        return JudgedClaim(claim.text, "not shown", scope, why=why, ratio=ratio)
    missed = sum(math.isinf(mine) for mine, _ in pairs.values())
    theirs = sum(math.isinf(rival) for _, rival in pairs.values())
    if missed == len(pairs):
        why = "no replicate of the arm reached the level"
        return JudgedClaim(claim.text, "does not hold", scope, why=why, ratio=True)
    # A level that was never reached has no cost, and leaving out its replicate would favour the side that missed it.
    if missed or theirs:
        who = [f"{count} of {len(pairs)} replicates of {name}" for name, count in _missing(claim, missed, theirs)]
        why = f"{' and '.join(who)} never reached the level and kept it"
        kept = {r.name: a / b for r, (a, b) in pairs.items() if math.isfinite(a) and math.isfinite(b)}
        return JudgedClaim(claim.text, "not shown", scope, why=why, ratio=True, pairs=kept)
    found = {r: a / b if ratio else a - claim.share * b for r, (a, b) in pairs.items()}
    if ratio:
        interval = paired_ratio([a for a, _ in pairs.values()], [b for _, b in pairs.values()])
    else:
        interval = t_interval(list(found.values()))
    outcome = _outcome(claim, interval, by_world(found, ratio=ratio))
    return JudgedClaim(claim.text, outcome, scope, interval, ratio, {r.name: value for r, value in found.items()})


def _missing(claim: Claim, arm: int, rival: int) -> list[tuple[str, int]]:
    """The sides of a claim that missed a level, and how often. A rival, too, may reach its level and lose it again."""
    return [(name, count) for name, count in ((claim.arm, arm), (f"{claim.rival} itself", rival)) if count]


def by_world(values: Mapping[Replicate, float], *, ratio: bool) -> dict[int, float]:
    """The mean over the replicates of each world, by its seed; geometric for ratios."""
    worlds: dict[int, list[float]] = {}
    for replicate, value in values.items():
        worlds.setdefault(replicate.world, []).append(math.log(value) if ratio else value)
    return {w: math.exp(np.mean(v)) if ratio else float(np.mean(v)) for w, v in worlds.items()}


def _outcome(claim: Claim, interval: Interval, worlds: Mapping[int, float]) -> str:
    neutral = 1.0 / claim.factor if claim.measure.endswith("_to") else 0.0
    above = interval.low > neutral and all(mean > neutral for mean in worlds.values())
    below = interval.high < neutral and all(mean < neutral for mean in worlds.values())
    wanted, opposite = (above, below) if claim.direction == "more" else (below, above)
    return "holds" if wanted else "does not hold" if opposite else "not shown"
