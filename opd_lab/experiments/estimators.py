"""(f) Estimators of the same reverse KL: what a token is worth when the teacher tells more about it."""

from opd_lab.experiment import Arm, Claim, Experiment
from opd_lab.experiments.common import QUICK, RATES, recipe


def _arm(name: str, title: str, **settings: object) -> Arm:
    return Arm(name, title, {f"objective.0.{key}": value for key, value in settings.items()}, RATES)


EXPERIMENT = Experiment(
    name="estimators",
    letter="f",
    title="Estimators of the reverse KL",
    question=(
        "All payloads estimate the gradient of the same reverse KL. How much does the student learn from the same "
        "number of sampled tokens?"
    ),
    tasks=("addition",),
    recipe=recipe(steps=100, rows=64, length=16, objective={"name": "opd"}),
    served=("teacher",),
    evaluated=("base", "teacher"),
    decision=(
        "100 steps of 64 answers for every arm, rates swept on a run seed of their own; judged on the last weights, "
        "reverse KL on the last evaluations. Claims are about this number of tokens unless both are at the plateau."
    ),
    arms=(
        _arm("sampled", "log-ratio of the sampled token (k1 as policy gradient)", payload="sampled"),
        _arm("gather4", "exact on the student's top 4, sampled beyond", payload="gather", k=4),
        _arm("gather16", "exact on the student's top 16, sampled beyond", payload="gather", k=16),
        _arm("exact", "exact over the vocabulary", payload="hidden"),
    ),
    claims=(
        Claim(
            "Top-16 gather learns more per token than the sampled log-ratio",
            "gather16",
            "sampled",
            "accuracy_at_tokens",
            "more",
        ),
        Claim(
            "Exact learns more per token than the sampled log-ratio", "exact", "sampled", "accuracy_at_tokens", "more"
        ),
        Claim(
            "Top-16 gather ends at a lower reverse KL than the sampled log-ratio",
            "gather16",
            "sampled",
            "reverse_kl",
            "less",
        ),
        Claim("Exact ends at a lower reverse KL than top-4 gather", "exact", "gather4", "reverse_kl", "less"),
        Claim("Exact ends at a lower reverse KL than top-16 gather", "exact", "gather16", "reverse_kl", "less"),
        Claim(
            "Exact needs fewer FLOPs than the sampled log-ratio to its level", "exact", "sampled", "flops_to", "less"
        ),
    ),
    quick=QUICK,
    note=(
        "On the student's own samples the loss k2 = (log S - log T)^2 / 2 has the same gradient, token by token, as k1 "
        "taken as a policy gradient, so the first arm stands for both."
    ),
)
