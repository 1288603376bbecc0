"""(d) Rollout windows: ADWIN and its rivals, where the tail follows from the prefix and where it does not."""

from dataclasses import replace
from typing import Any

from opd_lab.experiment import Arm, Claim, Experiment, Fires, Premise
from opd_lab.experiments.common import QUICK, RATES, claims_about, recipe

_WINDOW_RATES = (3e-4, 1e-3)
"""Learning rates of windows, for which the best rate of full rollouts is too high."""

_PREFIX = "prefix"
_CLAIMS = (
    Claim(
        "ADWIN needs fewer tokens than full rollouts, its probes counted",
        "adwin",
        "full",
        "tokens_to",
        "less",
        premise=_PREFIX,
    ),
    Claim(
        "ADWIN needs 4.1 times fewer tokens than full rollouts, as published",
        "adwin",
        "full",
        "tokens_to",
        "less",
        factor=4.1,
        premise=_PREFIX,
    ),
    Claim(
        "ADWIN needs fewer FLOPs than full rollouts, its probes counted",
        "adwin",
        "full",
        "flops_to",
        "less",
        premise=_PREFIX,
    ),
    Claim("ADWIN ends as accurate as full rollouts or better", "adwin", "full", "accuracy", "more"),
    Claim("ADWIN needs fewer tokens than a fixed half", "adwin", "fixed50", "tokens_to", "less"),
    Claim("ADWIN ends as accurate as a fixed half or better", "adwin", "fixed50", "accuracy", "more"),
    Claim("A fixed quarter ends less accurate than full rollouts", "fixed25", "full", "accuracy", "less"),
    Claim(
        "The cross-fitted criterion ends more accurate than the published one",
        "adwin_cross",
        "adwin",
        "accuracy",
        "more",
    ),
    Claim(
        "A fixed half ends more accurate than a random quarter of the tokens", "fixed50", "random", "accuracy", "more"
    ),
    Claim("Effective lengths need fewer tokens than full rollouts", "effective", "full", "tokens_to", "less"),
    Claim("Effective lengths end as accurate as full rollouts or better", "effective", "full", "accuracy", "more"),
    Claim(
        "Under the teacher that is lost after mistakes ADWIN ends more accurate than full rollouts",
        "adwin_strict",
        "full_strict",
        "accuracy",
        "more",
        premise="prefix_strict",
    ),
    Claim(
        "Under that teacher ADWIN needs fewer tokens than full rollouts",
        "adwin_strict",
        "full_strict",
        "tokens_to",
        "less",
        premise="prefix_strict",
    ),
)


def _premise(name: str, teacher: str) -> Premise:
    return Premise(
        name,
        f"before training, the gradient of an answer's first quarter under {teacher!r} points where the whole one does "
        "(cross-fitted cosine at least 0.7; that of as many random tokens is 1 but for noise)",
        "opd_lab.windows_premise:measure",
        {"least": 0.7, "teacher": teacher},
    )


_CHANGES = (
    "after the runs: the premise asked for a cosine above that of as many random tokens as well, which nothing can "
    "have but by noise, because their gradient is the whole one's on average",
)


def _arms(length: int, candidates: list[int], steps: int) -> tuple[Arm, ...]:
    """The arms: full rollouts, ADWIN in three forms, and its rivals."""
    adwin: dict[str, Any] = {
        "name": "adwin",
        "windows": candidates,
        "rows": 64,
        "every": 5,
        "delay": 5,
        "null_every": 5,
    }
    shorter = (Fires("window", "<", float(length)),)

    def arm(key: str, title: str, fires: tuple[Fires, ...] = shorter, **method: Any) -> Arm:
        return Arm(key, title, {"methods": [method]}, _WINDOW_RATES, fires=fires)

    return (
        Arm("full", "full rollouts", {}, RATES),
        arm("adwin", "ADWIN, published criterion", (), **adwin),
        arm("adwin_largest", "ADWIN, fallback: the largest candidate", **adwin, fallback="largest"),
        arm("adwin_cross", "ADWIN, cross-fitted criterion", (), **adwin, criterion="cross_fitted"),
        arm("fixed25", "first quarter (TOPD)", name="fixed_window", fraction=0.25),
        arm("fixed50", "first half (TOPD)", name="fixed_window", fraction=0.5),
        arm("staircase", "staircase (POPD)", name="staircase", first=length // 4, rise=length // 4, every=steps // 5),
        arm("linear", "linear", name="linear_window", first=length // 8, until=0.5),
        arm(
            "random",
            "a random quarter of the tokens, the null of every window",
            (),
            name="random_tokens",
            share=0.25,
        ),
        arm(
            "effective",
            "effective length: cut where answers repeat themselves",
            name="effective_length",
            first=length // 4,
            repeated=8,
        ),
        arm("prune", "overlap drift (Prune-OPD)", (), name="prune_opd", k=1, threshold=0.5, smoothing=4, shortest=4),
    )


def _experiment(
    name: str,
    letter: str,
    task: str,
    what: str,
    length: int,
    candidates: list[int],
    steps: int,
    *,
    rows: int = 64,
    chosen: tuple[str, ...],
    strict: bool = False,
    **more: Any,
) -> Experiment:
    """An experiment with the arms `chosen`; `strict` adds two with the teacher that never saw a mistake."""
    arms = tuple(arm for arm in _arms(length, candidates, steps) if arm.name in chosen)
    premises = [_premise(_PREFIX, "teacher")]
    if strict:
        arms += tuple(_under_strict(arm) for arm in arms if arm.name in ("full", "adwin"))
        premises.append(_premise("prefix_strict", "strict"))
    return Experiment(
        name=name,
        letter=letter,
        title=f"Rollout windows where {what}",
        question=f"How many tokens does each window need to the accuracy of full rollouts, on a task where {what}?",
        tasks=(task,),
        recipe=recipe(
            steps=steps,
            rows=rows,
            length=length,
            objective={"name": "opd", "payload": "hidden", "aggregation": "constant"},
        ),
        **{"world": "tails", "served": ("teacher",), "evaluated": ("base", "teacher"), **more},
        arms=arms,
        claims=claims_about(_CLAIMS, arms),
        premises=tuple(premises),
        quick={**QUICK, "methods.0.delay": 1, "methods.0.every": 2},
        decision=(
            f"{steps} steps of {rows} answers, every arm with a rate swept of its own; costs are read off at 95 % of "
            "the gain of full rollouts, accuracies from the last weights."
        ),
        note=(
            "All arms average with `aggregation: constant`. The windows of "
            "ADWIN and Prune-OPD may stay at full length: that is a finding, not a failure, so it need not fire."
        ),
    )


def _under_strict(arm: Arm) -> Arm:
    """The same arm with the teacher that is lost after mistakes, at the rate chosen with the other teacher."""
    return replace(
        arm,
        name=f"{arm.name}_strict",
        title=f"{arm.title}, teacher lost after mistakes",
        overrides={**arm.overrides, "teachers.default": "strict"},
        learning_rates=(),
        same_rate_as=arm.name,
    )


RESTATE = _experiment(
    "windows_restate",
    "d1",
    "restate",
    "the tail follows from the prefix",
    40,
    [5, 10, 20],
    120,
    chosen=(
        "full",
        "adwin",
        "adwin_largest",
        "adwin_cross",
        "fixed25",
        "fixed50",
        "staircase",
        "linear",
        "random",
        "prune",
    ),
    changes=(
        "after the runs: the premise was written and measured, and two claims about final accuracy were added that "
        "windows_parts had from the start",
        *_CHANGES,
    ),
)
PARTS = _experiment(
    "windows_parts",
    "d2",
    "parts",
    "a prefix says nothing about what follows, outside the range that ADWIN states",
    24,
    [4, 8, 12],
    120,
    chosen=("full", "adwin", "fixed50", "random"),
    changes=_CHANGES,
)
LONG = _experiment(
    "windows_long",
    "d3",
    "running_sum",
    "one skill is used over and over",
    64,
    [2, 4, 8, 16],
    80,
    rows=32,
    chosen=("full", "adwin", "fixed50", "random", "effective"),
    strict=True,
    world="long",
    served=("teacher", "strict"),
    evaluated=("base", "teacher", "strict"),
    changes=(
        "before any arm was judged: 20 terms instead of 40, whose base and teacher, trained as planned in two worlds, "
        "had 0.02 and 0.03, and 0.03 and 0.21, of the answers right when sampling; ADWIN's fallback is left to (d1)",
    ),
)
