"""GPS: a small generative model predicts the success of unseen prompts from the results of others.

    observe   q(z | prompts and rates of the step) by an encoder, p(z | steps before) by a recurrent prior
              one step of Adam on   - E log p(rates | z, prompts) + KL(q || p)
    predict   g = mean over M draws of z ~ p of the decoder's success rate
    choose    greedily by   - (g - target)^2 + lambda D
              D   distance from what is chosen already, plus the distance from the mean of the last steps

The paper's model has about 20M parameters and reads WordLlama embeddings. This one has about 30k and reads signed
hashes of character n-grams, which need no model, so it generalises over wording and length but not over meaning. Here
Adam takes `fits` steps. lambda, M and the widths are ours. Source: arXiv 2602.01970 (text; no code is public).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from opd.tasks.messages import message_text
from opd_zoo.samplers.base import Sampler, SamplerSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opd.tasks.prompt import Prompt
    from opd_zoo.samplers.gps_model import GpsModel
    from student.data.plan import StepPlan
    from student.data.report import StepReport

_WIDTH = 64


class GpsSettings(SamplerSettings):
    """Settings of GPS."""

    target: float = Field(0.5, ge=0, le=1, description="Success rate to aim for.")
    diversity: float = Field(0.1, ge=0, description="lambda, the weight of the prompts' distances from each other.")
    draws: int = Field(16, ge=1, description="M, the number of draws of the latent per prediction.")
    learning_rate: float = Field(3e-3, gt=0, description="Learning rate of the model's Adam.")
    fits: int = Field(4, ge=1, description="Number of steps of Adam after each step of the run; the paper has 1.")


class Gps(Sampler[GpsSettings]):
    """Chooses prompts whose success rate, predicted by a small generative model, is nearest to a target (GPS).

    Its state is the model and the mean of recent prompts.
    """

    evidence = "text"
    remembers = False

    def __init__(self, settings: GpsSettings) -> None:
        super().__init__(settings)
        self._model: GpsModel | None = None
        self._seen = 0
        self._recent: NDArray[np.float32] = np.zeros(_WIDTH, np.float32)
        # Outcomes do not hold the prompts' texts, so their features are saved for a run that resumes after an update.
        # A step that is planned again fills them anew.
        self._features: dict[str, NDArray[np.float32]] = {}

    @property
    def model(self) -> GpsModel:
        """The model, created on first use."""
        if self._model is None:
            from opd_zoo.samplers.gps_model import GpsModel

            self._model = GpsModel(_WIDTH, self.settings.seed, self.settings.learning_rate)
        return self._model

    def knows(self, prompt: Prompt) -> bool:
        """Whether the model was ever fitted; it needs no history of the prompt itself."""
        return self._seen > 0

    def choose(
        self, pool: Sequence[Prompt], count: int, rng: np.random.Generator, plan: StepPlan
    ) -> list[tuple[Prompt, float]]:
        """The prompts of the step; the score is -(g - target)^2, minus the pool's mean."""
        features = np.stack([features_of(prompt) for prompt in pool])
        rates = self.model.predict(features, self.settings.draws, int(rng.integers(2**31)))
        near = -((rates - self.settings.target) ** 2)
        far = np.linalg.norm(features - self._recent, axis=1) if self._seen else np.zeros(len(pool))
        least = np.full(len(pool), np.inf)
        chosen: list[int] = []
        for _ in range(count):
            # Distance to the nearest prompt chosen so far, so that the next one adds something new.
            apart = np.where(np.isinf(least), 0.0, least) + far
            worth = near + self.settings.diversity * apart
            worth[chosen] = -np.inf
            best = int(worth.argmax())
            chosen.append(best)
            least = np.minimum(least, np.linalg.norm(features - features[best], axis=1))
        if plan.step != self._planned:
            self._features = {}
        self._features |= {self.arm(pool[i]): features[i] for i in chosen}
        return [(pool[i], float(near[i] - near.mean())) for i in sorted(chosen)]

    def observe(self, report: StepReport) -> None:
        """Fit the model to the success rates of the step."""
        results = {arm: groups for arm, groups in self.results(report.outcomes).items() if arm in self._features}
        if not results:
            return
        arms = sorted(results)
        features = np.stack([self._features[arm] for arm in arms])
        values = [[value for group in results[arm] for value in group] for arm in arms]
        rates = np.array([math.fsum(v) / len(v) for v in values], np.float32)
        self.model.fit(features, rates, self.settings.fits, seed=self._seen)
        self._recent = (0.5 * self._recent + 0.5 * features.mean(0) if self._seen else features.mean(0)).astype(
            np.float32
        )
        self._seen += 1

    def state_dict(self) -> dict[str, Any]:
        """The model with its optimizer, the number of fitted steps, recent prompts, and the step's features."""
        model = None if self._model is None else self._model.state_dict()
        return {"model": model, "seen": self._seen, "recent": self._recent, "features": dict(self._features)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._seen, self._recent = int(state["seen"]), np.asarray(state["recent"], np.float32)
        self._features = {str(arm): np.asarray(value, np.float32) for arm, value in state["features"].items()}
        self._model = None
        if state["model"] is not None:
            self.model.load_state_dict(state["model"])


def features_of(prompt: Prompt) -> NDArray[np.float32]:
    """[64] float32, unit length: signed hashes of a prompt's character 1- to 3-grams; last its log length."""
    text = prompt.text if prompt.messages is None else "\n".join(map(message_text, prompt.messages))
    text = f" {text} "
    found = np.zeros(_WIDTH, np.float32)
    # Hash each distinct n-gram once: long prompts repeat most of theirs.
    grams = Counter(text[start : start + size] for size in (1, 2, 3) for start in range(len(text) - size + 1))
    for gram, count in grams.items():
        code = int.from_bytes(hashlib.blake2b(gram.encode(), digest_size=4).digest(), "little")
        found[code % (_WIDTH - 1)] += count if code >> 31 else -count
    found /= max(float(np.linalg.norm(found)), 1e-6)
    found[-1] = math.log1p(len(text)) / 10.0
    return found / np.float32(np.linalg.norm(found))
