"""A critic for any method whose advantage bootstraps (gae): linear value heads on the student's own hidden states.

    V(s_t) = min over the heads of  w h_t + b,   h_t the student's hidden state before token t, without gradient
             or with `softness` a their soft minimum   -a log mean exp(-(w h_t + b) / a)                       (SAFE)
    each head fitted with the updates of a step to V + A (the lambda-return of advantage gae) by AdamW, on the rows of
    all ranks

The features are those of the weights that the rows were scored with, or with `features: initial` those of the first
weights, which never change. Each step fits the heads on the rows of that step alone. In the first `warm_up` steps only
the critic learns and the student is not updated; from step `fits_until` on the heads are frozen. Taking the minimum of
several heads (a double critic) counters overestimated values.

SAFE's code fits the soft minimum itself to the returns. Here each head is fitted alone, so the soft minimum lies below
the mean of the heads, as the minimum does.

The critic has no backbone of its own: it costs one forward pass over the rows, but it cannot adapt the features, as the
critics of Tulu 3 and ArCHer do. The heads are fitted right after the last update of a step, before anything can
interrupt the step. Rows that were sampled ahead (`train.max_staleness`) are valued with the student's present features,
while their returns are those of the policy that sampled them, so the values lag as the rows do. Sources: GAE, arXiv
1506.02438; the shared backbone is ours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from opd.errors import ConfigError
from opd.wire.types import PayloadSpec
from student.data.needs import Needs
from student.data.outcome import reward_of
from student.data.streams import stream
from student.plugin.traits import Traits
from student.rl.advantages.gae import credit_of, returns_of
from student.rl.fitted import FittedCritic, FittedSettings
from student.rl.value_head import adamw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.row import Row
    from student.plugin.controllers import Services
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe


class CriticSettings(FittedSettings):
    """Settings of the critic."""

    heads: int = Field(1, ge=1, le=8, description="Number of value heads; V is their minimum.")
    softness: float = Field(
        0.0, ge=0, description="Temperature of a soft minimum over the heads; 0 is the plain minimum."
    )
    features: Literal["student", "initial"] = Field(
        "student",
        description="Model whose hidden states the heads read: the student as it is, or with its initial weights.",
    )
    fits_until: int | None = Field(
        None, ge=1, description="Step from which the heads are frozen; null never freezes them."
    )
    weight_decay: float = Field(0.01, ge=0, description="AdamW's decoupled weight decay of the heads.")
    seed: int = Field(
        0, ge=0, description="Seed of the initial weights of the second and further heads; the first starts from 0."
    )


class Critic(FittedCritic[CriticSettings]):
    """Value heads on the student's features, for advantage gae.

    Its state is heads, AdamW's moments, the number of AdamW steps, the step and unreported metrics.
    """

    evidence: ClassVar[str] = "text"

    @property
    def traits(self) -> Traits:
        until = self.settings.fits_until
        late = {} if until is None else {"the freeze of its heads (fits_until)": until}
        return Traits(works_ahead=True, gives=("values",), begins=late)

    def __init__(self, settings: CriticSettings) -> None:
        super().__init__(settings)
        self._discount = (1.0, 0.95)
        self._cache: list[tuple[Row, NDArray[np.float32]]] = []
        # [heads, H + 1]: weights, then the bias. Created in the first fit, when the width H is known.
        self.heads: NDArray[np.float64] | None = None
        self.moments: NDArray[np.float64] | None = None
        self.moved = 0

    def needs(self) -> Needs:
        """Hidden states of the student or of its first weights, read in process, and rewards."""
        return Needs(reward="any", models=frozenset({self.settings.features}))

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse a critic whose values nothing reads, a softness with one head, and a warm-up that never ends.

        Raises:
            ConfigError: naming the advantage to use, or the setting to change.
        """
        chains = [chain for term in terms if (chain := getattr(term, "chain", None)) is not None]
        readers = [part for chain in chains for part in chain.reading("values")]
        if self.settings.softness and self.settings.heads == 1:
            raise ConfigError(
                f"method critic has softness {self.settings.softness:g} but only one head, whose soft minimum is the "
                "head itself; set heads to 2 or more, or remove softness."
            )
        smoothed = [part.settings for part in readers if hasattr(part.settings, "lam_gae")]
        self.check_warm_up(recipe)
        # A reader without GAE's lambda wants the values of whole answers: no discount, no smoothing.
        self._discount = (smoothed[0].discount, smoothed[0].lam_gae) if smoothed else (1.0, 1.0)

    def compose(self, rows: list[Row]) -> list[Row]:
        """Read the features of the rows and set their values."""
        found = self.services.read(rows, PayloadSpec.hidden(), model=self.settings.features)
        self._cache = []
        for row, scores in zip(rows, found, strict=True):
            features = np.asarray(scores.hidden, np.float32)
            self._cache.append((row, features))
            row.critic = replace(row.critic, values=self.value(features))
        return rows

    def value(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """[T] float32 values of states with features [T, H]; zeros before the first fit."""
        if self.heads is None:
            return np.zeros(len(features), np.float32)
        return self._least(_predict(self.heads, features)).astype(np.float32)

    def _least(self, found: NDArray[np.float64]) -> NDArray[np.float64]:
        """[N] the minimum over the heads of [heads, N] numbers, soft if `softness` is set."""
        least: NDArray[np.float64] = found.min(0)
        if soft := self.settings.softness:
            # Exponents relative to the minimum are at most 0, so none overflows.
            least = least - soft * np.log(np.exp((least - found) / soft).mean(0))
        return least

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metrics critic_warm_up, critic_loss and critic_explained.

        critic_loss is the mean squared error of V, the (soft) minimum over the heads, before the step's fit, and
        critic_explained the share of the variance of the returns that it explains. critic_warm_up is 1 during the
        warm-up, else 0.
        """
        return super().after_update(step, services)

    def fit(self, services: Services) -> dict[str, float]:
        """Fit the heads to the rows of all ranks; returns the metrics for `after_update`."""
        cache, self._cache = self._cache, []
        warm_up = {"critic_warm_up": float(self.warming_up)}
        if self.settings.fits_until is not None and self._now >= self.settings.fits_until:
            return warm_up
        features, targets = self._data(cache)
        parts = services.gather((len(targets), features.shape[1], float(targets.sum()), float((targets**2).sum())))
        count, width = sum(part[0] for part in parts), max(part[1] for part in parts)
        if not count:
            return {}
        # Work on copies and keep them only after the last step: if an exchange between ranks fails on the way, the
        # critic is still the one in the checkpoint.
        heads, moments, moved = self._ready(width)
        s, first = self.settings, 0.0
        for number in range(s.fits):
            gaps = _predict(heads, features.reshape(len(targets), width)) - targets
            padded = np.concatenate([features.reshape(len(targets), width), np.ones((len(targets), 1))], 1)
            # Ranks exchange sums and all take the same float64 step, so the heads stay equal bit for bit.
            # The (soft) minimum of the gaps is the gap of the (soft) minimum, since the targets are the same.
            told = services.gather((gaps @ padded, float((self._least(gaps) ** 2).sum())))
            gradient = sum(part[0] for part in told) / count
            first = sum(part[1] for part in told) / count if number == 0 else first
            moved += 1
            heads, moments = adamw(heads, moments, gradient, moved, s.learning_rate, s.weight_decay)
        self.heads, self.moments, self.moved = heads, moments, moved
        mean = sum(part[2] for part in parts) / count
        variance = sum(part[3] for part in parts) / count - mean**2
        explained = {"critic_explained": 1.0 - first / variance} if variance > 1e-12 else {}
        return warm_up | {"critic_loss": first} | explained

    def _data(
        self, cache: Sequence[tuple[Row, NDArray[np.float32]]]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """[N, H] features and [N] returns at this rank's trained positions, of rows with a reward."""
        features: list[NDArray[np.float64]] = [np.zeros((0, 0))]
        targets: list[NDArray[np.float64]] = [np.zeros(0)]
        for row, found in cache:
            reward = reward_of(row)
            if reward is None or not row.loss_mask.any():
                continue
            returns = returns_of(row, credit_of(row, reward, *self._discount))
            features.append(found[row.loss_mask].astype(np.float64))
            targets.append(returns[row.loss_mask].astype(np.float64))
        if len(features) > 1:
            features = features[1:]
        return np.concatenate(features), np.concatenate(targets)

    def _ready(self, width: int) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
        """Copies of heads and moments, initialised before the first fit, and the number of AdamW steps so far."""
        if self.heads is None or self.moments is None:
            shape = (self.settings.heads, width + 1)
            heads = 0.01 * stream(self.settings.seed, "critic").standard_normal(shape)
            heads[0] = 0.0
            return heads, np.zeros((2, *shape)), self.moved
        return self.heads.copy(), self.moments.copy(), self.moved

    def state_dict(self) -> dict[str, Any]:
        """Heads, moments, the number of AdamW steps, the step, and metrics that are not reported yet."""
        return {
            "heads": self.heads,
            "moments": self.moments,
            "moved": self.moved,
            "fitted": self._told,
            "now": self._now,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.heads, self.moments, self.moved = state["heads"], state["moments"], int(state["moved"])
        self._told = dict(state["fitted"])
        self._now = int(state["now"])


def _predict(heads: NDArray[np.float64], features: NDArray[Any]) -> NDArray[np.float64]:
    """[heads, N] float64 values of features [N, H]."""
    found: NDArray[np.float64] = heads[:, :-1] @ features.astype(np.float64).T + heads[:, -1:]
    return found
