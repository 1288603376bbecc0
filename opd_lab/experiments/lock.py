"""(i) TCOD: do curricula over turns help where the teacher is lost, and only there?"""

from functools import partial
from typing import Any

from opd_lab.experiment import Arm, Claim, Experiment, Fires, Premise
from opd_lab.experiments.common import QUICK, episodes_recipe, lasting

_DIGITS, _TURNS = 6, 11
_STEPS, _ROWS = 40, 32
_RAMP = 0.6
"""Share of a curriculum's turns that is spent before its depth is the greatest."""
_SWEEP = (5e-4, 1.5e-3, 5e-3)
_EXACT = {"name": "opd", "payload": "gather", "k": 64}


def _curriculum(deepest: int) -> dict[str, Any]:
    """A curriculum whose depth rises by one every `every` steps, up to `deepest`, with as many turns in all as vanilla.

    Returns:
        every; turns, the greatest depth; and steps, the number of training steps.
    """
    turns = _STEPS * _TURNS
    every = round(_RAMP * turns / (deepest * (deepest + 1) / 2))
    return {"every": every, "turns": deepest, "steps": every * deepest + round((1 - _RAMP) * turns / deepest)}


def _tcod(order: str, deepest: int, **more: Any) -> dict[str, Any]:
    plan = _curriculum(deepest)
    method = {"name": "tcod", "order": order, "every": plan["every"], "turns": deepest, **more}
    return {"methods": [method], **lasting(plan["steps"])}


def _fixed(depth: int) -> dict[str, Any]:
    method = {"name": "tcod", "order": "fixed", "start": depth}
    return {"methods": [method], **lasting(_STEPS * _TURNS // depth)}


_WHOLE = {"methods": [{"name": "tcod", "order": "fixed", "start": 0}]}
"""Overrides for whole episodes: no curriculum, but its metrics."""
_OFTEN = {
    **_WHOLE,
    **lasting(_curriculum(_TURNS)["steps"]),
    "rollout.prompts_per_step": round(_ROWS * _STEPS / _curriculum(_TURNS)["steps"]),
}
"""Overrides for whole episodes in smaller batches, with as many updates as F2B for the same number of tokens."""
_CUT = (Fires("turns", "<", float(_DIGITS)),)
_WISE = {"teachers.default": "wise"}

ARMS = (
    Arm("vanilla", "OPD on whole episodes", _WHOLE, _SWEEP),
    Arm("often", "OPD on whole episodes, as many updates as F2B", _OFTEN, same_rate_as="vanilla"),
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
        "fixed_2", "a fixed horizon of a third of the digits", _fixed(_DIGITS // 3), same_rate_as="vanilla", fires=_CUT
    ),
    Arm("fixed_3", "a fixed horizon of half the digits", _fixed(_DIGITS // 2), same_rate_as="vanilla", fires=_CUT),
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
        _SWEEP,
    ),
    Arm(
        "grpo",
        "GRPO on success, groups of 8",
        {"objective": [{"name": "grpo"}], "rollout.prompts_per_step": _ROWS // 8, "rollout.samples_per_prompt": 8},
        _SWEEP,
    ),
    Arm(
        "f2b_sequence",
        "the released settings' confound: F2B with a mean per episode, vanilla with one over tokens",
        {**_tcod("f2b", _TURNS), "objective.0.aggregation": "sequence_mean"},
        same_rate_as="vanilla",
        fires=_CUT,
    ),
    Arm("vanilla_wise", "OPD on whole episodes, wise teacher", {**_WHOLE, **_WISE}, _SWEEP),
    Arm("often_wise", "as many updates as F2B, wise teacher", {**_OFTEN, **_WISE}, same_rate_as="vanilla_wise"),
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
        "fixed_3_wise",
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
    _blind("F2B wins more than vanilla with as many updates under the blind teacher", "f2b", "often"),
    Claim(
        "F2B wins more than vanilla with as many updates under the wise teacher",
        "f2b_wise",
        "often_wise",
        "accuracy_at_tokens",
        premise="recovers",
    ),
    *(
        _blind(
            f"{name} falls less than vanilla under the blind teacher", arm, "vanilla", measure="fall", direction="less"
        )
        for arm, name in _CURRICULA.items()
    ),
    _blind("F2B wins more than a fixed horizon of a third", "f2b", "fixed_2"),
    _blind("F2B wins more than a fixed horizon of a half", "f2b", "fixed_3"),
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

_RECIPE = episodes_recipe(
    steps=_STEPS,
    rows=_ROWS,
    length=42,
    objective=_EXACT,
    teachers={"reference": "base"},
    prompts=96,
    turns=_TURNS,
    turn_tokens=2,
)

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
    evaluated=("base",),
    arms=ARMS,
    claims=CLAIMS,
    worlds=(0, 1),
    seeds=(10, 11, 12),
    premises=(
        Premise(
            "drift",
            "after four turns of the student the blind teacher wins at most half of what can be won, and the "
            "divergence from it on the student's states rises threefold from the first third of the turns to the last",
            "opd_lab.takeover_premise:measure",
            {"teacher": "blind", "lost": 0.5, "rise": 3.0, "prompts": 256},
        ),
        Premise(
            "recovers",
            "wherever it takes over from the student, the wise teacher wins nine in ten of what can be won",
            "opd_lab.takeover_premise:measure",
            {"teacher": "wise", "kept": 0.9, "prompts": 256},
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
    changes=(
        "before any arm ran: in the first worlds (eight digits, twelve turns, a base that opened nine in ten by greedy "
        "answers) the premise `drift` was absent: `blind` won 0.69 and 0.55 of what could be won after four turns, and "
        "the divergence rose 3.7 and 2.3 times. From letter states it won none of 149 episodes, so it is as blind as "
        "can be; the student slipped too seldom (right in 0.89 and 0.79 of its turns), and an early slip lost the "
        "episode for any teacher. Hence six digits, eleven turns, 0.85 by greedy answers",
        "before any arm ran, tried and not taken: a base that learnt at half the rate (0.57 after four turns in world "
        "0), and a base that was stopped, asked every five steps, as soon as it opened one in five at temperature 1 "
        "(0.28 and 0.41, but the divergence rose only 2.6 and 2.5 times). The two halves of the rule pull against each "
        "other: a student that slips more has drifted within the first third already",
        "before any arm ran, for its cost: 40 steps of 32 episodes instead of 150 of 64, evaluations of 96 episodes "
        "instead of 256, no pass@64, rates around those of a short run",
        "after the runs of world 0, in which F2B won more than vanilla under both teachers: the arms `often`, because "
        "F2B has half as many updates again for the same tokens",
        "after all runs: accuracy at equal tokens is no longer smoothed, by which the run that ended first lagged "
        "behind. F2B and B2F had won more than vanilla under the wise teacher, which is not shown since; F2B and "
        "TurnOPD had not been shown to differ",
    ),
    quick={**QUICK, "eval.prompts": 8, "methods.0.every": 1},
    note=(
        "Accuracy is the share of episodes that end in success within the limit of turns. A shorter horizon makes "
        "kl_by_turn smaller by itself: compare divergences on the two fixed sets of states of the premises."
    ),
)
