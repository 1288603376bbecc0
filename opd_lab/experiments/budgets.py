"""(b3) Several teachers: does a domain with long answers crowd out one with short answers, and does balancing help?"""

from opd_lab.experiment import ROUTED, Arm, Claim, Experiment
from opd_lab.experiments.common import QUICK, recipe

_RATES = (5e-4, 1.5e-3)


def _arm(name: str, title: str, **settings: str) -> Arm:
    return Arm(name, title, {f"objective.0.{key}": value for key, value in settings.items()}, _RATES)


EXPERIMENT = Experiment(
    name="budgets",
    letter="b3",
    title="Two teachers with unequal token budgets",
    question=(
        "Sums take about 10 tokens, restated sums 40; each has a teacher of its own, and the student sees as many "
        "prompts of both. A mean over tokens gives the short domain a fifth of the gradient. What do the two domains "
        "gain when each has half (arXiv 2608.19098 finds that unequal budgets eat most of the gain)?"
    ),
    tasks=("addition", "restate"),
    world="unequal",
    recipe=recipe(steps=120, rows=64, length=48, objective={"name": "opd", "payload": "hidden"}),
    served=("addition", "restate"),
    routes={"addition": "addition", "restate": "restate"},
    evaluated=("base", ROUTED),
    arms=(
        _arm("tokens", "mean over tokens", aggregation="token_mean"),
        _arm("balanced", "mean over tokens within each domain", aggregation="balanced", strata="domain"),
        _arm("sequences", "mean over answers", aggregation="sequence_mean"),
    ),
    claims=(
        Claim("Balanced domains gain more than a mean over tokens", "balanced", "tokens", "accuracy", "more"),
        Claim("Balanced domains gain more on the short one", "balanced", "tokens", "domain/addition", "more"),
        Claim(
            "Balanced domains keep 95 % of the accuracy on the long one",
            "balanced",
            "tokens",
            "domain/restate",
            "more",
            share=0.95,
        ),
        Claim("A mean over answers gains more than one over tokens", "sequences", "tokens", "accuracy", "more"),
        Claim("Balanced domains gain more than a mean over answers", "balanced", "sequences", "accuracy", "more"),
    ),
    decision=(
        "120 steps of 64 answers for every arm, rates 5e-4 and 1.5e-3 swept for each on a run seed of its own in the "
        "first world; judged on the last weights. Accuracy is that of both domains together, which have as many "
        "held-out prompts each. Not run to the plateau: claims are about this number of tokens."
    ),
    quick=QUICK,
)
