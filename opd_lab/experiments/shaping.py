"""(f2) Shaped rewards: what becomes of sampled distillation when the log-ratio of a token is bounded or weighted."""

from typing import Any

from opd_lab.experiment import Arm, Claim, Experiment, Fires
from opd_lab.experiments.common import QUICK, recipe

_RATES = (5e-4, 1.5e-3)
"""Learning rates on both sides of 1e-3, the best rate of the sampled form at this number of tokens."""
_CLIP = 2.0
"""Limit of the log-ratio in nats. None is published; at 10, hardly any token of a tiny model would be clipped."""


def _arm(key: str, title: str, fires: tuple[Fires, ...] = (), **term: Any) -> Arm:
    return Arm(key, title, {"objective": [term]}, _RATES, fires=fires)


def _against_opd(text: str, arm: str) -> tuple[Claim, ...]:
    return (
        Claim(f"{text} is more accurate than the plain log-ratio", arm, "opd", "accuracy", "more"),
        Claim(f"{text} is more accurate than the plain log-ratio, greedy", arm, "opd", "greedy", "more"),
    )


EXPERIMENT = Experiment(
    name="shaping",
    letter="f2",
    title="Shaped rewards of sampled tokens",
    question=(
        "Sampled distillation rewards a token with log T - log S. Papers bound that reward, compress it, weight it by "
        "place, or extrapolate it where both models agree. Does any of it pay, at equal mean weight and with a "
        "learning rate of its own?"
    ),
    tasks=("addition",),
    recipe=recipe(steps=100, rows=64, length=16, objective={"name": "opd"}, teachers={"reference": "base"}),
    served=("teacher", "base"),
    evaluated=("base", "teacher"),
    arms=(
        _arm("opd", "log-ratio: OPD", name="opd", payload="sampled"),
        _arm(
            "clip",
            f"clipped at {_CLIP:g} nats (after 2607.13399)",
            (Fires("clipped_share", ">", 0.0),),
            name="compressed",
            form="clip",
            limit=_CLIP,
        ),
        _arm("log", "compressed by its logarithm (after 2607.13399)", name="compressed", form="log"),
        _arm("tide", "TIDE", (Fires("deficit_share", ">", 0.0),), name="tide"),
        _arm("iw", "IW-OPD, mean weight 1", name="iw_opd", normalise=True),
        _arm("iw_released", "IW-OPD as released", (Fires("mean_weight", ">", 1.1),), name="iw_opd"),
        _arm("exopd", "ExOPD, lambda 1.25", name="gopd", payload="sampled", reward_scale=1.25),
        _arm(
            "gated",
            "lambda 1.25 where both agree (after REOPD)",
            (Fires("gate", ">", 0.0),),
            name="gated_exopd",
            gamma=0.25,
        ),
    ),
    claims=(
        *_against_opd("Clipping", "clip"),
        *_against_opd("The logarithm", "log"),
        *_against_opd("TIDE", "tide"),
        *_against_opd("IW-OPD at mean weight 1", "iw"),
        Claim("IW-OPD as released is more accurate than at mean weight 1", "iw_released", "iw", "accuracy", "more"),
        *_against_opd("Extrapolation where both agree", "gated"),
        Claim("Extrapolation where both agree beats it everywhere", "gated", "exopd", "accuracy", "more"),
        Claim("ExOPD on sampled tokens is more accurate than OPD", "exopd", "opd", "accuracy", "more"),
    ),
    decision=(
        "100 steps of 64 answers for every arm, rates 5e-4 and 1.5e-3 swept for each on a run seed of its own in the "
        "first world; judged on the last weights. Not run to the plateau: claims are about this number of tokens."
    ),
    quick=QUICK,
    note=(
        "TIDE alone has more of the teacher, its 16 most likely tokens. IW-OPD as released raises the mean weight, and "
        "with it the learning rate, by up to half; `iw` divides that out."
    ),
)
