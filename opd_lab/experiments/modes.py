"""(h) ORBIT: does fusing the teachers of three thinking budgets give one student that has all three modes?"""

from functools import partial
from typing import Any

from opd_lab.experiment import ROUTED, Arm, Claim, Experiment, Fires, Premise
from opd_lab.experiments.common import QUICK, RATES, recipe

_STEPS = 60
_ROWS = 64
_WHOLE = 5
"""Number of rollouts of the three stages (3 x 40 steps x 128 rows) and the fusion, divided by that of the fusion."""
_RL_RATES = (1.5e-4, 5e-4, 1.5e-3)
MODES: dict[str, dict[str, Any]] = {
    "long": {"budget": 28, "prefix": "L"},
    "between": {"budget": 21, "prefix": "LM", "weight": 0, "teacher": "medium"},
    "medium": {"budget": 14, "prefix": "M"},
    "short": {"budget": 7, "prefix": "S"},
}
"""Budgets and marks of the modes in the world. `between` has the marks of two modes at once and is never trained."""
TRAINED = tuple(name for name, mode in MODES.items() if mode.get("weight", 1))
_EXACT = {"name": "opd", "payload": "gather", "k": 64}
_JOINT: dict[str, Any] = {
    "objective": [{"name": "rloo", "aggregation": "token_mean"}],
    "rewards": [{"name": "dler"}],
    "rollout.prompts_per_step": _ROWS // 8,
    "rollout.samples_per_prompt": 8,
}

ARMS = (
    Arm("orbit", "ORBIT: OPD from the merge", {}, RATES),
    Arm("opd_base", "OPD from the base", {}, same_rate_as="orbit", student="base"),
    Arm(
        "adaptive",
        "ORBIT, more rows where a mode lags",
        {"methods": [{"name": "modes"}]},
        same_rate_as="orbit",
        fires=(Fires("mode/lag/long", "<", 1.0),),
    ),
    Arm(
        "sft",
        "SFT from the merge on the mode teachers' answers drawn at T = 1",
        {
            "objective": [{"name": "sft"}],
            "methods": [{"name": "expert_rows", "share": 1.0, "source": "file"}],
            "methods.0.file": "{answers:sampled}",
        },
        RATES,
    ),
    Arm(
        "dial",
        "lambda dial from the base: G-OPD with the short teacher and the long one as reference, lambda 0, 0.5, 1",
        {
            "objective": [
                {**_EXACT, "name": "gopd", "domain_reward_scale": {"long": 0.0, "medium": 0.5, "short": 1.0}}
            ],
            "teachers.reference": "long",
            **{f"modes.{name}.teacher": "short" for name in MODES},
            # Each model reads the mark that it was trained under.
            "contexts": {"short": {"prompt": "S{{ unmarked }}"}, "reference": {"prompt": "L{{ unmarked }}"}},
        },
        same_rate_as="orbit",
        student="base",
    ),
    Arm("joint", "joint RL from the base with the modes' rewards, equal steps", _JOINT, _RL_RATES, student="base"),
    Arm(
        "joint_whole",
        "joint RL from the base with the rollouts of all stages",
        {**_JOINT, "train.steps": _WHOLE * _STEPS, "eval.every": _WHOLE * _STEPS // 6},
        same_rate_as="joint",
        student="base",
    ),
)


_claim = partial(Claim, premise="modes")

CLAIMS = (
    *(
        _claim(
            f"ORBIT keeps 95 % of its teacher's accuracy in mode {name}",
            "orbit",
            f"model:{ROUTED}",
            f"mode/accuracy/{name}",
            share=0.95,
        )
        for name in TRAINED
    ),
    *(
        _claim(
            f"ORBIT's mode {name} takes 1.5 times the tokens of the next",
            "orbit",
            "value:1.5",
            f"mode/neighbour_ratio/{name}",
        )
        for name in TRAINED[:-1]
    ),
    _claim("ORBIT is more accurate than joint RL at equal tokens", "orbit", "joint", "accuracy_at_tokens"),
    _claim("ORBIT is more accurate than joint RL with the rollouts of all stages", "orbit", "joint_whole", "accuracy"),
    _claim("ORBIT is more accurate than the merge alone", "orbit", "model:merge", "accuracy"),
    _claim("ORBIT is more accurate than the base, which knows the marks a little", "orbit", "model:base", "accuracy"),
    _claim("ORBIT is more accurate than OPD from the base", "orbit", "opd_base", "accuracy"),
    _claim("ORBIT is more accurate than SFT on the mode teachers' answers", "orbit", "sft", "accuracy"),
    _claim("ORBIT has a larger hypervolume than the lambda dial", "orbit", "dial", "mode/hypervolume"),
    _claim("Rows where a mode lags make ORBIT more accurate", "adaptive", "orbit", "accuracy"),
    _claim(
        "ORBIT's tokens under the marks of long and medium lie nearer to medium than to long",
        "orbit",
        "value:0.5",
        "mode/interpolation/between",
        direction="less",
    ),
)

EXPERIMENT = Experiment(
    name="modes",
    letter="h",
    title="ORBIT: one student with three thinking budgets",
    question=(
        "A base that can write every total of a running sum, all but the first five or none was reinforced in three "
        "stages, each at half of the budget and under a mark of its own. Does distilling the three from their merge "
        "give one student that is as accurate as each in its mode, and keeps the modes apart?"
    ),
    tasks=("running_sum",),
    world="modes",
    student="merge",
    recipe=recipe(
        steps=_STEPS,
        rows=_ROWS,
        length=28,
        objective=_EXACT,
        modes=MODES,
        # Every prompt is asked in four modes. With more prompts, a run would evaluate longer than it trains.
        eval={"every": _STEPS // 6, "prompts": 96, "temperature": 1.0},
    ),
    served=("long", "medium", "short"),
    routes={name: name for name in TRAINED},
    evaluated=("base", "merge", *TRAINED, ROUTED),
    answers_of=ROUTED,
    arms=ARMS,
    claims=CLAIMS,
    seeds=(10, 11, 12),
    premises=(
        Premise(
            "modes",
            "between neighbouring budgets the wider mode's teacher is at least 10 points more accurate and writes at "
            "least 1.5 times the tokens",
            "opd_lab.modes_premise:measure",
            {"points": 0.10, "ratio": 1.5},
        ),
    ),
    decision=(
        f"{_STEPS} steps of {_ROWS} answers, a third in each mode, rates swept where an arm says so; judged on the last"
        " weights, an answer over its mode's budget is wrong. ORBIT is shown if every mode keeps 95 % of its teacher's "
        "accuracy, neighbours differ by 1.5 times in tokens, and it beats joint RL at equal tokens."
    ),
    quick={**QUICK, "rollout.prompts_per_step": 6, "eval.prompts": 16},
    note=(
        "Accuracy is the mean over the trained modes. What the stages cost stands above the table; "
        "`joint_whole` spends as much on rollouts as they and the fusion together."
    ),
)
