"""What the experiments on reinforcement share: their world, base recipe, ways off policy, and the short form's problem.

The world is that of the modes (`student/lab/worlds/modes.yaml`): its base answers running sums in three ways, asked by
a mark, rightly in a tenth to two thirds of its answers, so that there is something to reinforce from the first step on.
"""

from random import Random
from typing import Any, ClassVar

from opd.config import Settings
from opd.tasks.prompt import Prompt
from opd.tasks.source import Labels
from opd.tasks.verdict import Verdict
from student.lab.experiment import Arm, Fires, Premise
from student.lab.experiments.common import QUICK, recipe

WORLD = "modes"
LENGTH = 14
"""Tokens that an answer in the medium way takes at most."""
KINDS = ("long", "medium", "short")
"""The three kinds of prompts; at this length an answer in the long way is cut."""
LABELLED: dict[str, Any] = {f"prompts.mix.{place}.domain": kind for place, kind in enumerate(KINDS)}
"""Recipe keys that label the prompts of each kind, for samplers that go by it."""
STEPS, GROUPS, GROUP = 60, 8, 8
"""Of every arm: steps, prompts a step, answers to a prompt."""
OFF_POLICY: dict[str, Any] = {"train.minibatches": 4, "train.max_staleness": 2}
"""Four updates a step on answers that weights of two steps before have sampled."""
RATES_ON, RATES_OFF = (1.5e-4, 5e-4, 1.5e-3), (5e-5, 1.5e-4, 5e-4)
"""Of sweeps: with one update a step, and with four."""


CREDIT = Premise(
    "credit",
    "at least two thirds of the base's groups of 8 have right and wrong answers",
    "student.lab.groups_premise:measure",
    {"mixed": 0.67},
)
_PLAIN = {"name": "policy_gradient", "ratio": "none", "aggregation": "sequence_mean"}
"""On policy all losses are this one."""


def reinforce(*, objective: dict[str, Any] = _PLAIN, length: int = LENGTH) -> dict[str, Any]:
    """The base recipe: groups of answers, an objective of one term, a verifier, no teacher's numbers."""
    base = recipe(steps=STEPS, rows=GROUPS, length=length, objective=dict(objective))
    return base | {"rollout": base["rollout"] | {"samples_per_prompt": GROUP}}


def off_policy(fires: Fires, **term: Any) -> Arm:
    """GRPO off policy, the arm that the others of a family are beside; `term` are settings of its objective."""
    overrides = {"objective": [{"name": "grpo", **term}], **OFF_POLICY}
    return Arm("off", "GRPO off policy, clip 0.2", overrides, RATES_OFF, fires=(fires,))


class Parity:
    """The short form's problem: any answer whose last character is an even digit is right.

    The test world's student, which has hardly been trained, is right in some of its answers and wrong in others, so
    that groups of them have credit and what acts on credit can be seen to act.
    """

    Options: ClassVar[type[Settings]] = Settings

    def __init__(self, options: Settings) -> None:
        self.options = options

    def draw(self, random: Random) -> Prompt:
        """A number, with which the answer has nothing to do."""
        return Prompt.make(f"{random.randrange(10**4)}=", answer="even", domain="parity", extra={"solution": "2"})

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """Look at the last character."""
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
"""The short form with one kind of prompts; at this rate ratios leave 1 within its few steps."""
QUICK_KINDS: dict[str, Any] = QUICK_ONE | {
    "prompts": {"mix": [_PARITY | {"domain": kind, "mark": kind[0]} for kind in KINDS]},
}
"""The short form with three kinds."""
