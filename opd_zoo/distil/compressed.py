"""Sampled distillation with the log-ratio compressed, so that no single token dominates a step.

    clip   A = clamp(log T(y) - log S(y), -limit, limit)
    log    A = sign(d) log(1 + |d|),  d = log T(y) - log S(y)

Both keep sign and order; log has slope 1 at 0. The expected reward is then not minus the reverse KL: clip adds bias
only through the rare tokens beyond its limit, log is a different objective everywhere. If the teacher does not use the
student's end token, each response has one token with d about -25; use `teachers.map_stops` against that, not this.

After arXiv 2607.13399; evidence: the forms in one detailed digest, no code, no published limit (10 touched 0.3 % of
the tokens in one audit), so this is not a reproduction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from opd_zoo.distil.token_reward import TokenReward, TokenRewardSettings

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from student.data.token_batch import TokenBatch


class CompressedSettings(TokenRewardSettings):
    """Settings of the compressed reward."""

    form: Literal["clip", "log"] = Field(
        "clip", description="How the log-ratio is compressed: clip clamps it, log takes the logarithm of its size."
    )
    limit: float = Field(10.0, gt=0, description="With form clip: largest |log-ratio| in nats.")


class Compressed(TokenReward[CompressedSettings]):
    """Sampled distillation with the log-ratio clipped or compressed logarithmically."""

    def reward(self, student: Tensor, teacher: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Any]]:
        """See the module; metric clipped_share of form clip."""
        ratio = teacher - student
        if self.settings.form == "log":
            return compress(ratio), {}
        limit = self.settings.limit
        beyond = (batch.mask & (ratio.abs() > limit)).sum()
        return ratio.clamp(-limit, limit), {"clipped_share": (beyond, batch.mask.sum())}


def compress(ratio: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """sign(d) log(1 + |d|)."""
    return ratio.sign() * ratio.abs().log1p()
