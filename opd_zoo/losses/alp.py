"""ALP: a policy gradient whose importance ratio has the student under Gaussian noise in the numerator.

    rho = pi(y | h_l + sigma_l eps_l for every layer l) / mu(y),   eps_l ~ N(0, I),   sigma_l learnt, in updates alone
    loss = the clipped loss on rho, one ratio for old weights and for the engine's other numerics together

mu is the policy that sampled. The noise flattens the student's distribution, and with it the tail of the ratios. Only
updates have noise; sampling, evaluation and every pass without a gradient do not. Other terms of the objective also
read the student under noise. The noise sizes sigma_l are trained by the loss with the student's optimizer, at their own
learning rate, which follows the schedule of the weights' learning rate.

Sources: arXiv 2603.19470 (abstract) and the released code of its multi-turn experiments (noise before each layer's
first norm, a size for each layer in log space, ratios by response, bounds 0.5 and 4). There sequences on different
ranks share noise, because the seed of a layer is the rank's seed plus the layer's number; here no two sequences do. Its
scripts start from sizes of 1e-6, its model settings from 1e-2.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from opd.errors import ConfigError
from opd_zoo.losses.layer_noise import LayerNoise
from student.data.token_batch import TokenBatch
from student.plugin.terms import TermOutput
from student.rl.losses.policy_gradient import PolicyGradient
from student.rl.losses.ratios import Ratio
from student.rl.losses.settings import ClippedSettings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor
    from transformers import PreTrainedModel

    from student.data.hooks import Reading
    from student.model.model import Student
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe


class AlpSettings(ClippedSettings):
    """Settings of ALP."""

    ratio: Ratio = Field("sequence", description="Unit over which the importance ratio is taken.")
    clip_low: float | None = Field(0.5, gt=0, le=1, description="Clips the ratio at 1 - clip_low; null does not clip.")
    clip_high: float | None = Field(3.0, gt=0, description="Clips the ratio at 1 + clip_high; null does not clip.")
    noise: float = Field(
        1e-2, gt=0, description="Initial noise size sigma of every layer, in units of the hidden states."
    )
    noise_rate: float = Field(5e-4, ge=0, description="Learning rate of log sigma; 0 keeps the noise sizes fixed.")


class Alp(PolicyGradient[AlpSettings]):
    """The clipped loss of a student with noise of learnt size in every layer (ALP).

    Its noise sizes are in the checkpoint with the optimizer's moments.
    """

    evidence: ClassVar[str] = "text and code"
    bounds = ()  # under noise the ratio differs from 1 even in the first update, so the clips can act

    def __init__(self, settings: AlpSettings) -> None:
        super().__init__(settings)
        self._seed = 0
        self._noise: LayerNoise | None = None

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse a ratio that is not to the policy that sampled, and a second ALP term.

        Raises:
            ConfigError: naming the settings to leave out.
        """
        super().check(recipe, terms)
        if self.settings.ratio == "none" or self.settings.ratio_to == "old":
            raise ConfigError(
                f"term {self.settings.name!r} has noise in the ratio to the policy that sampled; remove ratio: none "
                "and ratio_to: old."
            )
        if sum(entry.get("name") == self.settings.name for entry in recipe.objective) > 1:
            raise ConfigError(
                f"the objective has term {self.settings.name!r} twice, but a pass can have one noise only; remove one "
                "of them."
            )
        self._seed = recipe.seed

    def remarks(self, recipe: Recipe, terms: Sequence[Term]) -> list[str]:
        """Also a remark that other terms of the objective read the student under noise."""
        found = super().remarks(recipe, terms)
        if len(recipe.objective) > 1:
            found.append(f"all terms of the objective read the student under the noise of term {self.settings.name!r}")
        return found

    def module(self, student: Student) -> tuple[LayerNoise, float]:
        """The noise module and the learning rate of its sizes."""
        self._noise = LayerNoise(student.lm, self.settings.noise)
        return self._noise, self.settings.noise_rate

    def around(self, lm: PreTrainedModel, reading: Reading) -> AbstractContextManager[None]:
        """Add noise to the forward passes of updates only."""
        if self._noise is None or reading.kind != "update":
            return nullcontext()
        return self._noise.on(reading, self._seed)

    def surrogate(self, log_ratio: Tensor, advantage: Tensor, live: Tensor, batch: TokenBatch) -> TermOutput:
        """The clipped loss per position; also metric noise_size, the mean of sigma over layers."""
        output = super().surrogate(log_ratio, advantage, live, batch)
        metrics: dict[str, Any] = dict(output.metrics)
        if self._noise is not None:
            metrics["noise_size"] = (self._noise.log_sizes.detach().exp().mean(), 1.0)
        return TermOutput(output.loss, metrics=metrics)
