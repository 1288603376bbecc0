"""(a) On-policy distillation against learning from a teacher's answers, from a verifier, or without either."""

from typing import Any

from opd_lab.experiment import Arm, Claim, Experiment
from opd_lab.experiments.common import QUICK, RATES, claims_about, recipe

_STEPS = 100
_EXACT = {"name": "opd", "payload": "hidden"}


def _imitates(how: str, **term: Any) -> dict[str, Any]:
    """Overrides of an arm that learns from a file of the teacher's answers, chosen by `how`."""
    return {
        "objective": [term or {"name": "sft"}],
        "methods": [{"name": "expert_rows", "share": 1.0, "source": "file", "missing": "drop"}],
        "methods.0.file": f"{{answers:{how}}}",
    }


ARMS = (
    Arm("opd", "OPD, exact reverse KL", {}, RATES),
    Arm("opd_cold", "OPD, exact, teacher's temperature 0.5", {"objective.0.teacher_temperature": 0.5}, RATES),
    Arm("opd_sampled", "OPD, sampled log-ratio (the papers' form)", {"objective.0.payload": "sampled"}, RATES),
    Arm("sft_greedy", "SFT on the teacher's greedy answers", _imitates("greedy"), RATES),
    Arm("sft", "SFT on the teacher's answers drawn at T = 1", _imitates("sampled"), RATES),
    Arm(
        "grpo",
        "GRPO on the verifier, groups of 8",
        {"objective": [{"name": "grpo"}], "rollout.prompts_per_step": 8, "rollout.samples_per_prompt": 8},
        (1.5e-4, 5e-4, 1.5e-3),
    ),
    Arm("sft_verified", "SFT on the teacher's verified answers, up to 4 draws", _imitates("verified"), RATES),
    Arm("sft_best", "SFT on the teacher's best of 4 answers", _imitates("best"), RATES),
    Arm(
        "offline_kd",
        "offline KD: forward KL, exact, on the teacher's answers drawn at T = 1",
        _imitates("sampled", **_EXACT, divergence="forward_kl"),
        RATES,
    ),
    Arm(
        "tail_null",
        "null: one negative advantage for the student's unlikely tokens, no teacher",
        {"objective": [{"name": "tail_null"}]},
        (1e-4, 3e-4, 1e-3),
    ),
    Arm(
        "opsa",
        "null: the same by entropy (OPSA), no teacher",
        {"objective": [{"name": "tail_null", "form": "entropy", "low": -1.0}]},
        (1e-4, 3e-4, 1e-3),
    ),
    Arm(
        "sft_then_opd",
        "SFT on greedy answers for the first half, then OPD",
        {
            "objective": [{"name": "sft"}, {**_EXACT, "rows": "sampled"}],
            "methods": [{"name": "expert_rows", "cold_steps": _STEPS // 2, "source": "file"}],
            "methods.0.file": "{answers:greedy}",
        },
        RATES,
    ),
)

CLAIMS = (
    Claim("OPD is more accurate than SFT on greedy answers", "opd", "sft_greedy", "accuracy", "more"),
    Claim("OPD is more accurate than SFT on greedy answers, greedy", "opd", "sft_greedy", "greedy", "more"),
    Claim("OPD has a higher pass@64 than SFT on greedy answers", "opd", "sft_greedy", "pass64", "more"),
    Claim("OPD with a colder teacher beats SFT on greedy answers", "opd_cold", "sft_greedy", "accuracy", "more"),
    Claim("OPD with a colder teacher beats OPD", "opd_cold", "opd", "accuracy", "more"),
    Claim("OPD is more accurate than SFT on answers drawn at T = 1", "opd", "sft", "accuracy", "more"),
    Claim("OPD is more accurate than GRPO", "opd", "grpo", "accuracy", "more"),
    Claim("OPD is more accurate than its sampled form", "opd", "opd_sampled", "accuracy", "more"),
    Claim("Sampled OPD is more accurate than GRPO", "opd_sampled", "grpo", "accuracy", "more"),
    Claim("Sampled OPD beats SFT on answers drawn at T = 1", "opd_sampled", "sft", "accuracy", "more"),
    Claim("SFT on greedy answers passes the teacher", "sft_greedy", "model:teacher", "accuracy", "more"),
    Claim("SFT on greedy answers passes the teacher, greedy", "sft_greedy", "model:teacher", "greedy", "more"),
    Claim("SFT on greedy answers keeps the teacher's pass@64", "sft_greedy", "model:teacher", "pass64", "more"),
    Claim("OPD keeps the base's pass@64", "opd", "model:base", "pass64", "more"),
    Claim("SFT on verified answers beats SFT on greedy ones", "sft_verified", "sft_greedy", "accuracy", "more"),
    Claim("SFT on the best of 4 beats SFT on greedy answers", "sft_best", "sft_greedy", "accuracy", "more"),
    Claim("OPD is more accurate than offline KD", "opd", "offline_kd", "accuracy", "more"),
    Claim("OPD is more accurate than the null without a teacher", "opd", "tail_null", "accuracy", "more"),
    Claim("OPD is more accurate than OPSA, which has no teacher", "opd", "opsa", "accuracy", "more"),
    Claim("SFT then OPD is more accurate than OPD", "sft_then_opd", "opd", "accuracy", "more"),
    Claim("OPD reaches GRPO's accuracy with fewer FLOPs", "opd", "grpo", "flops_to", "less"),
)


_HEADLINES = ("opd", "opd_cold", "opd_sampled", "sft_greedy", "sft", "grpo")
"""Arms that are repeated on the second family."""


def _experiment(
    name: str, letter: str, world: str, task: str, length: int, family: str, arms: tuple[Arm, ...] = ARMS
) -> Experiment:
    return Experiment(
        name=name,
        letter=letter,
        title=f"On-policy distillation, imitation, reinforcement: {family}",
        question=(
            "A teacher was reinforced from the student itself. What makes the most of it with the same number of "
            "trained tokens: distilling it on the student's answers, imitating its own answers, or repeating the "
            "reinforcement?"
        ),
        tasks=(task,),
        world=world,
        recipe=recipe(steps=_STEPS, rows=64, length=length, objective=_EXACT),
        served=("teacher",),
        evaluated=("base", "teacher"),
        answers_of="teacher",
        arms=arms,
        claims=claims_about(CLAIMS, arms),
        decision=(
            f"{_STEPS} steps of 64 answers for every arm, rates swept on a run seed of their own in the first world; "
            "judged on the last weights. Not run to the plateau: claims are about this number of tokens."
        ),
        quick={**QUICK, "rollout.prompts_per_step": 4},
        note=(
            "Tokens are those trained on. What the teacher drew for verified and best answers stands in its own "
            "column; its own training is in none. An accuracy at temperature 1 rewards whatever sharpens: read it with "
            "the greedy accuracy and pass@64 beside it."
        ),
    )


SUMS = _experiment("baselines", "a1", "sums", "addition", 16, "two-digit sums")
SORTING = _experiment(
    "baselines_sorting",
    "a2",
    "sorting",
    "sorting",
    20,
    "letters in order",
    tuple(arm for arm in ARMS if arm.name in _HEADLINES),
)
