"""PCL: chooses prompts whose value, predicted by a model that learns along with the policy, is nearest to a target.

    pool    k times the prompts of a step,   chosen   those with the smallest |V(x) - tau|
    after the updates V(x) moves towards the mean reward of the answers to each chosen prompt

V is a linear head on the student's hidden state after the prompt, so prompts that were never answered have a value too,
and the pool costs one forward pass over its prompts; the paper trains a second model of the policy's size. Before the
first fit V is tau for every prompt. All ranks use the states that rank 0 read. Source: arXiv 2510.01135 (text; the
head, its optimizer and its rate are ours).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from opd.tasks.encode import encode_prompt
from opd.wire.types import PayloadSpec, ScoreItem
from opd_zoo.samplers.base import Sampler, SamplerSettings
from student.data.needs import STUDENT, Needs, merge
from student.rl.value_head import adamw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opd.tasks.prompt import Prompt
    from student.data.plan import StepPlan
    from student.data.report import StepReport


class PclSettings(SamplerSettings):
    """Settings of PCL."""

    tau: float = Field(0.5, ge=0, le=1, description="Value to aim for.")
    fits: int = Field(16, ge=1, description="Number of steps of the head's optimizer after each step of the run.")
    learning_rate: float = Field(3e-3, gt=0, description="Learning rate of the head.")


class Pcl(Sampler[PclSettings]):
    """Chooses prompts whose value, predicted from the student's states, is nearest to a target (PCL).

    Its state is the head with its moments, and the last step's features.
    """

    evidence = "text"
    remembers = False

    def __init__(self, settings: PclSettings) -> None:
        super().__init__(settings)
        # [H + 1]: weights, then the bias. Created in the first fit, when the width H is known.
        self.head: NDArray[np.float64] | None = None
        self.moments: NDArray[np.float64] | None = None
        self.moved = 0
        # Outcomes do not hold the prompts' texts, so their features are saved for a run that resumes after an update.
        self._features: dict[str, NDArray[np.float32]] = {}

    def needs(self) -> Needs:
        """Also the student, read in process."""
        return merge([super().needs(), Needs(models=frozenset({STUDENT}))])

    def knows(self, prompt: Prompt) -> bool:
        """Whether the head was ever fitted; it needs no history of the prompt itself."""
        return self.head is not None

    def choose(
        self, pool: Sequence[Prompt], count: int, rng: np.random.Generator, plan: StepPlan
    ) -> list[tuple[Prompt, float]]:
        """The prompts of the step; keeps the features of the chosen ones for `observe`."""
        features = self._read(pool)
        if plan.step != self._planned:
            self._features = {}
        self._features |= {prompt.uid: found for prompt, found in zip(pool, features, strict=True)}
        chosen = super().choose(pool, count, rng, plan)
        self._features = {prompt.uid: self._features[prompt.uid] for prompt, _ in chosen}
        return chosen

    def scores(self, pool: Sequence[Prompt], rng: np.random.Generator) -> list[float]:
        """Minus the distance of each prompt's value from the target."""
        return [-abs(self.value(self._features[prompt.uid]) - self.settings.tau) for prompt in pool]

    def value(self, features: NDArray[np.float32]) -> float:
        """V of a prompt from its features [H]."""
        return self.settings.tau if self.head is None else float((_with_one(features[None]) @ self.head)[0])

    def _read(self, pool: Sequence[Prompt]) -> NDArray[np.float32]:
        """[N, H] float32 hidden states after the prompts, as rank 0 read them."""
        ids = [encode_prompt(prompt, self.services.tokenizer) for prompt in pool]
        # A response of one token, which only marks where the prompt ends.
        items = [ScoreItem(np.array([*found, found[-1]], np.uint32), len(found)) for found in ids]
        states = [scores.hidden for scores in self.services.read(items, PayloadSpec.hidden(), model=STUDENT)]
        found = np.stack([np.asarray(state, np.float32)[0] for state in states])
        # Ranks may differ in the last bits, and must choose the same prompts.
        return np.asarray(self.services.gather(found)[0], np.float32)

    def observe(self, report: StepReport) -> None:
        """Fit the head to the mean success of the step's prompts."""
        rewards: dict[str, list[float]] = {}
        for outcome in report.outcomes:
            value = self.success(outcome)
            if value is not None and outcome.uid in self._features:
                rewards.setdefault(outcome.uid, []).append(value)
        if not rewards:
            return
        uids = sorted(rewards)
        inputs = _with_one(np.stack([self._features[uid] for uid in uids]))
        targets = np.array([math.fsum(rewards[uid]) / len(rewards[uid]) for uid in uids])
        if self.head is None or self.moments is None:
            self.head = np.zeros(inputs.shape[1])
            self.head[-1], self.moments = self.settings.tau, np.zeros((2, inputs.shape[1]))
        for _ in range(self.settings.fits):
            self.moved += 1
            slope = inputs.T @ (inputs @ self.head - targets) / len(targets)
            self.head, self.moments = adamw(self.head, self.moments, slope, self.moved, self.settings.learning_rate)

    def state_dict(self) -> dict[str, Any]:
        """The head, its moments, the number of AdamW steps, and the features."""
        found = {"head": self.head, "moments": self.moments, "moved": self.moved}
        return found | {"features": dict(self._features)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.head, self.moments, self.moved = state["head"], state["moments"], int(state["moved"])
        self._features = {str(uid): np.asarray(value, np.float32) for uid, value in state["features"].items()}


def _with_one(features: NDArray[np.float32]) -> NDArray[np.float64]:
    """[N, H + 1] float64 features with a 1 for the bias."""
    return np.concatenate([features.astype(np.float64), np.ones((len(features), 1))], 1)
