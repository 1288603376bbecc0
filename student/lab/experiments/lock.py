"""(i) TCOD: do curricula over turns help where the teacher is lost, and only there?"""

from functools import partial
from typing import Any

from student.lab.experiment import Arm, Claim, Experiment, Fires, Premise
from student.lab.experiments.common import QUICK, RATES, recipe

_DIGITS, _TURNS = 8, 12
_STEPS, _ROWS = 150, 64
_RAMP = 0.6
"""Share of an arm's turns that is spent before its depth is the greatest."""
_EXACT = {"name": "opd", "payload": "gather", "k": 64}


def _curriculum(deepest: int) -> dict[str, Any]:
    """Steps that see as many turns as vanilla's, when the depth rises by one every so many steps up to `deepest`."""
    turns = _STEPS * _TURNS
    every = round(_RAMP * turns / (deepest * (deepest + 1) / 2))
    return {"every": every, "turns": deepest, "steps": every * deepest + round((1 - _RAMP) * turns / deepest)}


def _lasting(steps: int) -> dict[str, Any]:
    return {"train.steps": steps, "eval.every": max(1, steps // 10)}


def _tcod(order: str, deepest: int, **more: Any) -> dict[str, Any]:
    plan = _curriculum(deepest)
    method = {"name": "tcod", "order": order, "every": plan["every"], "turns": deepest, **more}
    return {"methods": [method], **_lasting(plan["steps"])}


def _fixed(depth: int) -> dict[str, Any]:
    method = {"name": "tcod", "order": "fixed", "start": depth}
    return {"methods": [method], **_lasting(_STEPS * _TURNS // depth)}


_WHOLE = {"methods": [{"name": "tcod", "order": "fixed", "start": 0}]}
"""Whole episodes: no curriculum, only its metrics."""
_CUT = (Fires("turns", "<", float(_DIGITS)),)
_WISE = {"teachers.default": "wise"}

ARMS = (
    Arm("vanilla", "OPD on whole episodes", _WHOLE, RATES),
    Arm("f2b", "TCOD, first turns first", _tcod("f2b", _TURNS), same_rate_as="vanilla", fires=_CUT),
    Arm("b2f", "TCOD, last turns first", _tcod("b2f", _DIGITS), same_rate_as="vanilla", fires=_CUT),
    Arm(
        "adaptive",
        "TCOD, depth by the divergence of the deepest turn",
        _tcod("f2b", _TURNS, adaptive=True),
        same_rate_as="vanilla",
        fires=_CUT,
    ),
    Arm(
        "fixed_2",
        "a fixed horizon of a quarter of the digits",
        _fixed(_DIGITS // 4),
        same_rate_as="vanilla",
        fires=_CUT,
    ),
    Arm("fixed_4", "a fixed horizon of half of the digits", _fixed(_DIGITS // 2), same_rate_as="vanilla", fires=_CUT),
    Arm(
        "turnopd",
        "TurnOPD",
        {
            "objective": [
                {**_EXACT, "aggregation": "token_mean", "weight": {"from": 1, "to": 0, "steps": _STEPS}},
                {**_EXACT, "aggregation": "turn_mean", "weight": {"from": 0, "to": 1, "steps": _STEPS}},
            ],
            "methods": [{"name": "turnopd", "longest": _TURNS}],
        },
        same_rate_as="vanilla",
        fires=(Fires("turn_depth", ">", 0.0),),
    ),
    Arm(
        "reference_kl",
        "OPD on whole episodes, held near the base",
        {**_WHOLE, "objective": [_EXACT, {"name": "reference_kl", "payload": "gather", "weight": 0.1}]},
        same_rate_as="vanilla",
    ),
    Arm(
        "gold",
        "OPD with a quarter of the episodes given: the problems' own paths",
        {
            "objective": [{**_EXACT, "rows": "sampled"}, {"name": "sft"}],
            "methods": [{"name": "expert_rows", "share": 0.25, "source": "path"}],
        },
        same_rate_as="vanilla",
        fires=(Fires("expert_share", ">", 0.0),),
    ),
    Arm(
        "sft",
        "SFT on the problems' paths, which are what both teachers play where they play without a slip",
        {"objective": [{"name": "sft"}], "methods": [{"name": "expert_rows", "share": 1.0, "source": "path"}]},
        RATES,
    ),
    Arm(
        "grpo",
        "GRPO on success, groups of 8",
        {"objective": [{"name": "grpo"}], "rollout.prompts_per_step": _ROWS // 8, "rollout.samples_per_prompt": 8},
        (1.5e-4, 5e-4, 1.5e-3),
    ),
    Arm(
        "f2b_sequence",
        "the released settings' confound: F2B with a mean per episode, vanilla with one over tokens",
        {**_tcod("f2b", _TURNS), "objective.0.aggregation": "sequence_mean"},
        same_rate_as="vanilla",
        fires=_CUT,
    ),
    Arm("vanilla_wise", "OPD on whole episodes, wise teacher", {**_WHOLE, **_WISE}, RATES),
    Arm(
        "f2b_wise",
        "first turns first, wise teacher",
        {**_tcod("f2b", _TURNS), **_WISE},
        same_rate_as="vanilla_wise",
        fires=_CUT,
    ),
    Arm(
        "b2f_wise",
        "last turns first, wise teacher",
        {**_tcod("b2f", _DIGITS), **_WISE},
        same_rate_as="vanilla_wise",
        fires=_CUT,
    ),
    Arm(
        "adaptive_wise",
        "depth by divergence, wise teacher",
        {**_tcod("f2b", _TURNS, adaptive=True), **_WISE},
        same_rate_as="vanilla_wise",
        fires=_CUT,
    ),
    Arm(
        "fixed_4_wise",
        "half of the digits, wise teacher",
        {**_fixed(_DIGITS // 2), **_WISE},
        same_rate_as="vanilla_wise",
        fires=_CUT,
    ),
)

_CURRICULA = {"f2b": "F2B", "b2f": "B2F", "adaptive": "Adaptive depth"}


_blind = partial(Claim, measure="accuracy_at_tokens", premise="drift")

CLAIMS = (
    *(
        _blind(f"{name} wins more than vanilla under the blind teacher", arm, "vanilla")
        for arm, name in _CURRICULA.items()
    ),
    *(
        Claim(
            f"{name} wins more than vanilla under the wise teacher",
            f"{arm}_wise",
            "vanilla_wise",
            "accuracy_at_tokens",
            premise="recovers",
        )
        for arm, name in _CURRICULA.items()
    ),
    *(
        _blind(
            f"{name} falls less than vanilla under the blind teacher", arm, "vanilla", measure="fall", direction="less"
        )
        for arm, name in _CURRICULA.items()
    ),
    _blind("F2B wins more than a fixed horizon of a quarter", "f2b", "fixed_2"),
    _blind("F2B wins more than a fixed horizon of a half", "f2b", "fixed_4"),
    _blind("F2B wins more than TurnOPD", "f2b", "turnopd"),
    _blind("F2B wins more than vanilla held near the base", "f2b", "reference_kl"),
    _blind("F2B wins more than vanilla with a quarter of gold", "f2b", "gold"),
    _blind("Vanilla wins more than SFT on gold paths", "vanilla", "sft"),
    _blind("Vanilla wins more than GRPO", "vanilla", "grpo"),
    _blind("F2B with the released aggregation wins more than vanilla", "f2b_sequence", "vanilla"),
    _blind("The released aggregation alone makes F2B win more", "f2b_sequence", "f2b"),
    Claim(
        "The wise teacher makes vanilla win more than the blind one",
        "vanilla_wise",
        "vanilla",
        "accuracy_at_tokens",
    ),
)

_RECIPE = recipe(steps=_STEPS, rows=_ROWS, length=46, objective=_EXACT, teachers={"reference": "base"})
_RECIPE["rollout"]["episodes"] = {"turns": _TURNS, "turn_tokens": 2, "isolation": "none"}

EXPERIMENT = Experiment(
    name="lock",
    letter="i",
    title="TCOD: curricula over turns, under a blind teacher and a wise one",
    question=(
        "A wrong answer at the lock leads to states that perfect runs never visit. Teacher `blind` never saw them, "
        "teacher `wise` knows the way back. TCOD says that curricula over turns help because the teacher is wrong "
        "where the student has drifted: do they help under `blind`, and not under `wise`?"
    ),
    tasks=("lock",),
    world="lock",
    recipe=_RECIPE,
    served=("blind", "wise", "base"),
    evaluated=("base", "blind", "wise"),
    arms=ARMS,
    claims=CLAIMS,
    worlds=(0, 1),
    seeds=(10, 11, 12),
    premises=(
        Premise(
            "drift",
            "after four turns of the student the blind teacher wins at most half of what can be won, and the "
            "divergence from it on the student's states rises threefold from the first third of the turns to the last",
            "student.lab.lock_premise:measure",
            {"teacher": "blind", "lost": 0.5, "rise": 3.0},
        ),
        Premise(
            "recovers",
            "wherever it takes over from the student, the wise teacher wins nine in ten of what can be won",
            "student.lab.lock_premise:measure",
            {"teacher": "wise", "kept": 0.9},
        ),
    ),
    decision=(
        f"Equal sampled tokens: vanilla has {_STEPS} steps of {_ROWS} episodes, the others as many steps as give as "
        "many turns, and success is read off where both arms have sampled the same number of tokens. Rates are swept "
        "for vanilla under each teacher, and for arms without one. TCOD's account is shown if a curriculum wins more "
        "than vanilla under the blind teacher and not under the wise one; refuted if under neither; something else "
        "than drift is at work if under both. A curriculum stabilises if it falls less than vanilla. All arms average "
        "the loss in the same way, except the arm that repeats the released settings' confound."
    ),
    quick={**QUICK, "eval.prompts": 8, "methods.0.every": 1},
    note=(
        "Accuracy is the share of episodes that end in success within the limit of turns. A shorter horizon makes "
        "kl_by_turn smaller by itself: compare divergences on the two fixed sets of states of the premises."
    ),
)
