"""A2TGPO's clip (arXiv 2605.06200): turns that add more to the belief in the right answer get a wider clip range.

    eps_k   eps (1 + beta tanh(z_k)),   z_k the normalised gain of turn k (advantage `a2tgpo`)
    loss_t  -min(rho_t A_t, clip(rho_t, 1 - eps_k low, 1 + eps_k high) A_t)

The clip range follows the gains, whichever advantage gives the credit; with beta 0 it is PPO's. The abstract says that
the range adapts to the gain; the tanh and beta 0.5 are ours. Evidence: inferred.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from opd.errors import ConfigError
from opd_zoo.advantages.a2tgpo import gains_of
from opd_zoo.advantages.turns import spread
from student.data.token_batch import TokenBatch
from student.plugin.terms import TermOutput
from student.rl.losses.credit import ByRow
from student.rl.losses.policy_gradient import ClippedSettings, PolicyGradient
from student.rl.losses.settings import advantage_field

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from student.data.outcome import Outcome
    from student.data.row import Row
    from student.rl.advantages.base import Credit


class A2tgpoSettings(ClippedSettings):
    """Settings of A2TGPO's clip."""

    advantage: dict[str, Any] | list[dict[str, Any]] = advantage_field(name="a2tgpo")
    beta: float = Field(
        0.5, ge=0, le=1, description="How much the gain of a turn widens or narrows its clip range; 0 is PPO's clip."
    )


class A2tgpoLoss(PolicyGradient[A2tgpoSettings]):
    """The clipped loss with a wider clip for turns that contribute more (A2TGPO)."""

    evidence: ClassVar[str] = "inferred"
    of_ratio: ClassVar[bool] = True

    def __init__(self, settings: A2tgpoSettings) -> None:
        super().__init__(settings)
        if settings.clip_low is None or settings.clip_high is None or settings.dual_clip is not None:
            raise ConfigError("objective a2tgpo needs clip_low and clip_high, and does not support dual_clip.")
        self._gains: ByRow[Credit] = ByRow()

    def _estimate(self, rows: Sequence[Row], outcomes: Sequence[Outcome], places: Sequence[int]) -> None:
        super()._estimate(rows, outcomes, places)
        able = [outcome for outcome in outcomes if self._counts(outcome)]
        found = zip(able, gains_of(able, self.chain.first.groups(able)), strict=True)
        gains = {id(one): spread(one, z) for one, z in found}
        self._gains = ByRow({id(r): (r, gains.get(id(outcomes[p]), 0.0)) for r, p in zip(rows, places, strict=True)})

    def surrogate(self, log_ratio: Tensor, advantage: Tensor, live: Tensor, batch: TokenBatch) -> TermOutput:
        """Loss per position; metrics clipped_share and clip_width (mean of 1 + beta tanh z)."""
        import torch

        s = self.settings
        gains = [self._gains.of(row) for row in batch.rows]
        width = 1 + s.beta * batch.of_tokens([0.0 if z is None else z for z in gains]).to(live.dtype).tanh()
        ratio = log_ratio.exp()
        low, high = 1 - (s.clip_low or 0.0) * width, 1 + (s.clip_high or 0.0) * width
        clipped = torch.minimum(torch.maximum(ratio, low.clamp(min=0.0)), high)
        bites = batch.mask & (clipped * advantage < ratio * advantage)
        count = batch.mask.sum()
        metrics: dict[str, Any] = {
            "clipped_share": (bites.sum(), count),
            "clip_width": ((width * batch.mask).sum(), count),
        }
        return TermOutput(-torch.minimum(ratio * advantage, clipped * advantage), metrics=metrics)
