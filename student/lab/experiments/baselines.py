"""(a) On-policy distillation against fine-tuning on the teacher's answers, and against reinforcement learning."""

from student.lab.experiment import Arm, Claim, Experiment
from student.lab.experiments.common import QUICK, RATES, recipe

_STEPS = 100

EXPERIMENT = Experiment(
    name="baselines",
    letter="a",
    title="On-policy distillation, fine-tuning on teacher answers, reinforcement learning",
    question=(
        "A teacher was reinforced from the student itself. What reaches its level with the fewest sampled tokens: "
        "distilling it on the student's answers, imitating its own answers, or repeating the reinforcement?"
    ),
    tasks=("addition",),
    recipe=recipe(steps=_STEPS, rows=64, length=16, objective={"name": "opd", "payload": "hidden"}),
    served=("addition",),
    evaluated=("base", "addition"),
    answers_of="addition",
    arms=(
        Arm("opd", "OPD, exact reverse KL", {}, RATES),
        Arm("opd_sampled", "OPD, sampled log-ratio (the papers' form)", {"objective.0.payload": "sampled"}, RATES),
        Arm(
            "sft",
            "fine-tuning on the teacher's answers",
            {
                "objective": [{"name": "sft"}],
                "methods": [{"name": "expert_rows", "share": 1.0, "source": "file"}],
                "methods.0.file": "{answers}",
            },
            (1e-4, *RATES),
        ),
        Arm(
            "grpo",
            "GRPO on the verifier, groups of 8",
            {"objective": [{"name": "grpo"}], "rollout.prompts_per_step": 8, "rollout.samples_per_prompt": 8},
            (5e-5, 1.5e-4, 5e-4, 1.5e-3),
        ),
    ),
    claims=(
        Claim("OPD is better than SFT on teacher answers, per token", "opd", "sft", "accuracy_at_tokens", "more"),
        Claim("OPD is better than GRPO, per token", "opd", "grpo", "accuracy_at_tokens", "more"),
        Claim("Sampled OPD is better than GRPO, per token", "opd_sampled", "grpo", "accuracy_at_tokens", "more"),
        Claim("OPD reaches GRPO's accuracy with fewer FLOPs", "opd", "grpo", "flops_to", "less"),
    ),
    quick={**QUICK, "rollout.prompts_per_step": 4},
    note=(
        "The student begins by restating results, as another task of its world asks, and runs into the length limit; "
        "all arms can unlearn that. The teacher's answers count as sampled tokens when they are trained on, with the "
        "FLOPs of writing them."
    ),
)
