"""Shared parts of the experiments on reinforcement learning: world, base recipe, off-policy settings and a short form.

The world is that of the modes (`opd_lab/worlds/modes.yaml`). Its base model answers running sums in three ways,
which a mark in the prompt selects. Between a tenth and two thirds of its answers are right, so that there is something
to reinforce from the first step.
"""

from random import Random
from typing import Any, ClassVar

from opd.config import Settings
from opd.tasks.prompt import Prompt
from opd.tasks.source import Labels
from opd.tasks.verdict import Verdict
from opd_lab.experiment import Arm, Fires, Premise
from opd_lab.experiments.common import QUICK, recipe

WORLD = "modes"
LENGTH = 14
"""Maximum tokens of an answer in the medium way."""
KINDS = ("long", "medium", "short")
"""The three kinds of prompts; answers in the long way are cut at `LENGTH`."""
LABELLED: dict[str, Any] = {f"prompts.mix.{place}.domain": kind for place, kind in enumerate(KINDS)}
"""Recipe keys that label the prompts of each kind by domain, for samplers that use it."""
STEPS, GROUPS, GROUP = 60, 8, 8
"""Steps, prompts per step and answers per prompt of every arm."""
OFF_POLICY: dict[str, Any] = {"train.minibatches": 4, "train.max_staleness": 2}
"""Overrides for four updates per step, on answers sampled with the weights of two steps before."""
RATES_ON, RATES_OFF = (1.5e-4, 5e-4, 1.5e-3), (5e-5, 1.5e-4, 5e-4)
"""Learning rates of sweeps, with one update per step and with four."""


CREDIT = Premise(
    "credit",
    "at least two thirds of the base's groups of 8 have right and wrong answers",
    "opd_lab.groups_premise:measure",
    {"mixed": 0.67},
)
_PLAIN = {"name": "policy_gradient", "ratio": "none", "aggregation": "sequence_mean"}
"""The loss that all policy losses are equal to on policy."""


def reinforce(*, objective: dict[str, Any] = _PLAIN, length: int = LENGTH) -> dict[str, Any]:
    """The base recipe: groups of answers that a verifier judges, an objective of one term, and no teacher scores."""
    base = recipe(steps=STEPS, rows=GROUPS, length=length, objective=dict(objective))
    return base | {"rollout": base["rollout"] | {"samples_per_prompt": GROUP}}


def off_policy(fires: Fires, **term: Any) -> Arm:
    """The arm with which off-policy arms are compared: GRPO off policy, with `term` as settings of its objective."""
    overrides = {"objective": [{"name": "grpo", **term}], **OFF_POLICY}
    return Arm("off", "GRPO off policy, clip 0.2", overrides, RATES_OFF, fires=(fires,))


class Parity:
    """The task of the short form: an answer is right if its last character is an even digit.

    The student of the test world, which is hardly trained, gives both right and wrong answers to it. So groups have
    advantages other than 0, and mechanisms that depend on them can be seen to act.
    """

    Options: ClassVar[type[Settings]] = Settings

    def __init__(self, options: Settings) -> None:
        self.options = options

    def draw(self, random: Random) -> Prompt:
        """Draw a prompt with a random number, which has no effect on what is right."""
        return Prompt.make(f"{random.randrange(10**4)}=", answer="even", domain="parity", extra={"solution": "2"})

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """Judge an answer by its last character."""
        return Verdict.of(completion[-1:] in tuple("02468"), "the answer does not end in an even digit")

    def labels(self) -> Labels:
        """One domain and no teacher."""
        return frozenset({(None, "parity")})

    def close(self) -> None:
        """Nothing to release."""


_PARITY = {"task": f"{__name__}:{Parity.__name__}"}
QUICK_ONE: dict[str, Any] = QUICK | {
    "prompts": _PARITY,
    "rollout.prompts_per_step": 4,
    "rollout.samples_per_prompt": 4,
    "train.learning_rate": 3e-3,
}
"""The short form with one kind of prompts; its learning rate makes ratios differ from 1 within its few steps."""
QUICK_KINDS: dict[str, Any] = QUICK_ONE | {
    "prompts": {"mix": [_PARITY | {"domain": kind, "mark": kind[0]} for kind in KINDS]},
}
"""The short form with three kinds of prompts."""
