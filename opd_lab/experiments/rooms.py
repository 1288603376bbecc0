"""(k) TCOD at ten actions and more: rooms, keys and side rooms, under a teacher that comes back from them."""

from functools import partial
from typing import Any

from opd_lab.experiment import Arm, Claim, Experiment, Fires, Premise
from opd_lab.experiments.common import QUICK, episodes_recipe, lasting

_DEPTH, _TURNS = 10, 14
_STEPS, _ROWS = 60, 16
_RATES = (3e-4, 1e-3)
_EVERY = 3
_RISE = _EVERY * (_TURNS - 1)
"""Number of steps in which F2B's depth rises to all turns, by one every `_EVERY` steps."""
_F2B_STEPS = _STEPS + _RISE // 2
"""Number of F2B's steps, which together have as many turns as `_STEPS` steps of whole episodes."""


def _tcod(**more: Any) -> dict[str, Any]:
    return {"methods": [{"name": "tcod", **more}]}


ARMS = (
    Arm("vanilla", "OPD on whole episodes", _tcod(order="fixed", start=0), _RATES),
    Arm(
        "f2b",
        "TCOD, first turns first",
        {**_tcod(order="f2b", every=_EVERY, turns=_TURNS), **lasting(_F2B_STEPS)},
        _RATES,
        fires=(Fires("turns", "<", _DEPTH / 2),),
    ),
    Arm(
        "adaptive",
        "TCOD, depth by the divergence of the deepest turn",
        {**_tcod(order="f2b", adaptive=True, turns=_TURNS), **lasting(_F2B_STEPS)},
        _RATES,
        fires=(Fires("turns", "<", _DEPTH / 2),),
    ),
    Arm(
        "fixed_5",
        "a fixed horizon of half the actions that are needed",
        {**_tcod(order="fixed", start=_DEPTH // 2), **lasting(_STEPS * _TURNS // (_DEPTH // 2))},
        _RATES,
        fires=(Fires("turns", "<", _DEPTH / 2 + 1),),
    ),
    Arm(
        "sft",
        "SFT on the problems' shortest paths, which know the house",
        {"objective": [{"name": "sft"}], "methods": [{"name": "expert_rows", "share": 1.0, "source": "path"}]},
        _RATES,
        fires=(Fires("expert_share", ">", 0.0),),
    ),
)

_knows = partial(Claim, premise="knows")

CLAIMS = (
    _knows("F2B wins more than whole episodes", "f2b", "vanilla", "accuracy_at_tokens"),
    _knows("F2B falls less than whole episodes", "f2b", "vanilla", "fall", "less"),
    _knows("Adaptive depth wins more than whole episodes", "adaptive", "vanilla", "accuracy_at_tokens"),
    _knows("F2B wins more than a fixed horizon of half the actions", "f2b", "fixed_5", "accuracy_at_tokens"),
    _knows("Whole episodes win more than SFT on shortest paths", "vanilla", "sft", "accuracy_at_tokens"),
    _knows("F2B wins more than SFT on shortest paths", "f2b", "sft", "accuracy_at_tokens"),
    _knows("Whole episodes win more than the base", "vanilla", "model:base", "accuracy"),
    _knows("F2B wins more than the base", "f2b", "model:base", "accuracy"),
    _knows("Adaptive depth wins more than the base", "adaptive", "model:base", "accuracy"),
    _knows("A fixed horizon of half the actions wins more than the base", "fixed_5", "model:base", "accuracy"),
)

_RECIPE = episodes_recipe(
    steps=_STEPS,
    rows=_ROWS,
    length=176,
    objective={"name": "opd", "payload": "gather", "k": 64},
    prompts=64,
    turns=_TURNS,
    turn_tokens=3,
)

EXPERIMENT = Experiment(
    name="rooms",
    letter="k",
    title="TCOD at ten actions and more, under a teacher that comes back from side rooms",
    question=(
        "A house whose shortest path has ten actions, half of its doors locked, with side rooms and keys that open "
        "nothing. The student learnt shortest paths, which know the house; the teacher also knows the way back from "
        "a side room. Does F2B win more than whole episodes, and does either win more than the shortest paths?"
    ),
    tasks=("rooms",),
    world="rooms",
    recipe=_RECIPE,
    served=("teacher",),
    evaluated=("base",),
    arms=ARMS,
    claims=CLAIMS,
    worlds=(0, 1),
    seeds=(10, 11, 12),
    premises=(
        Premise(
            "knows",
            "wherever it takes over from the student (at once, after three turns, after six), the teacher wins at "
            "least half of what perfect play, which knows the house, could still win",
            "opd_lab.takeover_premise:measure",
            {"teacher": "teacher", "kept": 0.5, "prompts": 64, "depths": (0, 3, 6), "astray": "side rooms"},
        ),
    ),
    decision=(
        f"Equal sampled turns: whole episodes and SFT have {_STEPS} steps of {_ROWS} episodes, F2B {_F2B_STEPS}, so "
        "more updates; success is read off where both arms have sampled the same number of tokens. Every arm has a "
        "rate swept of its own, on a run seed of its own in the first world. F2B helps at this depth if it wins more "
        "than whole episodes. Whether anything is learnt at all is asked by the claims against the base."
    ),
    changes=(
        "before any arm ran, in trials of whole episodes in world 0: at a rate of 3e-3 success ended within ten steps "
        "and did not return within twenty; at 1e-3 the divergence fell to a third within sixteen, and "
        "a trial of F2B at that rate was stopped after nine",
        "before any arm ran, for its cost: no sweep, no fixed horizon, no adaptive depth and no GRPO; 18 steps instead "
        "of 24, evaluations of 16 episodes instead of 24",
        "after the runs of whole episodes, F2B and SFT, of which none is shown to differ from the base, and which took "
        "less time than was set aside: the arms `adaptive` and `fixed_5` with two claims each",
        "after all 30 runs of that form, in which no arm is shown to beat the base: 60 steps instead of 18, swept "
        "rates, evaluations of 64 episodes, and a depth that rises every third step; everything was run again",
        "after all runs: accuracy at equal tokens is no longer smoothed, by which the run that ended first lagged "
        "behind. F2B had won more than SFT, which is not shown since",
    ),
    quick={**QUICK, "eval.prompts": 8, "methods.0.every": 1},
    note=(
        "Accuracy is the share of episodes that end with the lamp within 14 turns. Shortest paths know which of two "
        "open doors leads on, and no student can; a path that looks into a side room and comes back has two turns more."
    ),
)
