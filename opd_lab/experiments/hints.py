"""(j) Teachers that see more: does what a hinted self writes mislead a student without the hint (arXiv 2607.05184)?"""

from typing import Any

from opd_lab.experiment import Arm, Claim, Experiment, Fires, Premise
from opd_lab.experiments.common import QUICK, recipe

_STEPS, _GROUPS, _GROUP, _LENGTH = 60, 8, 8, 28
_RATES = (1.5e-4, 5e-4, 1.5e-3)
_HINT = {"prompt": "{{ answer }};{{ prompt }}", "max_tokens": 64}
"""The context of a hinted teacher: the result before the prompt, as in the world's told tasks."""
_READ = (Fires("hinted_share", ">", 0.0),)
_OPSD = {"teachers.default": "initial", "contexts": {"teacher": _HINT}}


def _both(key: str, title: str, overrides: dict[str, Any], **more: Any) -> tuple[Arm, Arm]:
    """The same arm for the terse model and for the careful one, in this order."""
    return (
        Arm(f"{key}_terse", f"{title}; told, it answers at once", overrides, _RATES, student="terse", **more),
        Arm(f"{key}_careful", f"{title}; told, it writes its work", overrides, _RATES, student="careful", **more),
    )


_ARMS = (
    *_both("opsd", "OPSD: the student at its start, told the result, teaches", _OPSD, fires=_READ),
    *_both(
        "rlsd",
        "RLSD: the verifier says which way, the told student how far",
        {
            "objective": [{"name": "rlsd", "role": "initial", "share": 0.5}],
            "contexts": {"initial": _HINT},
        },
        fires=(*_READ, Fires("rlsd_moved", ">", 0.0)),
    ),
    *_both("grpo", "GRPO, no hint", {"objective": [{"name": "grpo"}]}),
)

EXPERIMENT = Experiment(
    name="hints",
    letter="j",
    title="A teacher that is told the result",
    question=(
        "Told the result, a model is right whatever it writes. One goes on to write its work, as the student has to; "
        "the other answers at once, which the student cannot. Learning from oneself with a hint is reported to cost "
        "reasoning models up to 17 % of their accuracy: is it the way of writing that costs, and does a verifier's "
        "sign prevent it?"
    ),
    tasks=("sums",),
    world="hints",
    student="terse",
    recipe=recipe(steps=_STEPS, rows=_GROUPS, length=_LENGTH, objective={"name": "opd", "payload": "gather", "k": 16}),
    served=("terse",),
    evaluated=("terse", "careful"),
    arms=_ARMS,
    claims=(
        Claim(
            "OPSD costs accuracy where the told self answers at once", "opsd_terse", "model:terse", "accuracy", "less"
        ),
        Claim("OPSD gains accuracy where the told self writes its work", "opsd_careful", "model:careful", "accuracy"),
        Claim(
            "OPSD's answers are shorter where the told self answers at once",
            "opsd_terse",
            "opsd_careful",
            "metric/response_length",
            "less",
        ),
        Claim(
            "OPSD wins more than GRPO where the told self writes its work", "opsd_careful", "grpo_careful", "accuracy"
        ),
        Claim("RLSD keeps accuracy where the told self answers at once", "rlsd_terse", "model:terse", "accuracy"),
        Claim(
            "RLSD wins more than GRPO where the told self writes its work", "rlsd_careful", "grpo_careful", "accuracy"
        ),
        Claim(
            "RLSD wins less than GRPO where the told self answers at once",
            "rlsd_terse",
            "grpo_terse",
            "accuracy",
            "less",
        ),
    ),
    premises=(
        Premise(
            "told",
            "told the result, both models are right in at least 0.2 more of their answers",
            "opd_lab.hint_premise:measure",
            {"told": {"terse": "told_at_once", "careful": "told"}, "gain": 0.2},
        ),
    ),
    decision=(
        f"{_STEPS} steps of {_GROUPS * _GROUP} answers, {_GROUP} to a prompt, for every arm; rates are swept for "
        "each by accuracy; judged on the last weights, which never see a hint. The reported danger is shown if OPSD "
        "loses accuracy with the terse self, and its account (the way of writing, not the knowledge) if it does not "
        "with the careful one."
    ),
    quick=QUICK | {"rollout.prompts_per_step": 4, "rollout.samples_per_prompt": 4},
)
EXPERIMENT.recipe["rollout"]["samples_per_prompt"] = _GROUP
