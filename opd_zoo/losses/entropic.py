"""EntroPIC: a PI controller that holds the student's entropy at a target through the weight of confident tokens.

    e = H - target,   alpha = clip(k_p e + k_i sum of earlier e, -1, 1)
    loss_t = clipped loss - alpha rho_t |A_t|   on tokens with pi(y_t) > confident,   the clipped loss elsewhere

On confident tokens good answers weigh 1 + alpha and bad ones 1 - alpha. Entropy below the target makes alpha negative,
so that confident good tokens are strengthened less and confident bad ones are weakened more.

Which entropies it can hold (ours; exact in the limit of confident tokens, for rewards of 0 and 1, on policy): suppose
that a wrong token at some position lowers the success rate r by delta. That position is in equilibrium at
alpha = -delta / (2 r (1 - r)), so any entropy can be held while delta < 2 r (1 - r), that is where one token decides
little and the rest of the answer much. Where one wrong token fails the whole answer, as in a step of a sum, or where
every answer is right, the entropy falls even at alpha = -1; no controller of weights of at most 2 can change that, and
k_i does not help. Watch entropic_alpha, and use entropy_bonus where it stays at -1. While the entropy is above the
target the errors add up to a sum that has to be worked off below it.

The released code, yk7333/EntroPIC, differs in three ways. It measures H on the current micro-batch of one rank; here H
is the mean over the last step's trained tokens on all ranks, so it acts one step later. It adds to the sum at every
micro-batch; here once per step. It divides its extra loss by the number of confident tokens, where the main loss has
that of all tokens, which equals this loss with alpha divided by their share (confident_share, near 1). The
proportional part alone is enough on policy; the sum is for off-policy updates. Sources: arXiv 2511.15248 and that code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from opd.errors import ConfigError
from student.data.token_batch import TokenBatch, have
from student.plugin.terms import TermOutput, measured
from student.rl.losses.policy_gradient import ClippedSettings, PolicyGradient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from student.data.report import StepReport
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe


class EntropicSettings(ClippedSettings):
    """Settings of EntroPIC."""

    target: float = Field(0.1, ge=0, description="Target of the mean entropy, in nats per token.")
    k_p: float = Field(1.0, ge=0, description="Gain of the latest error (proportional part of the controller).")
    k_i: float = Field(0.01, ge=0, description="Gain of the sum of earlier errors (integral part).")
    confident: float = Field(0.95, gt=0, lt=1, description="Probability above which a token counts as confident.")
    unwind: bool = Field(False, description="Leave errors out of the sum while alpha is at a bound (ours).")


class Entropic(PolicyGradient[EntropicSettings]):
    """The clipped loss with a controller that holds the entropy at a target (EntroPIC).

    Its state is the sum of errors and the last error.
    """

    evidence: ClassVar[str] = "text and code"

    def __init__(self, settings: EntropicSettings) -> None:
        super().__init__(settings)
        self.error = 0.0
        self.total = 0.0

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse a controller with both gains 0, which would do nothing.

        Raises:
            ConfigError: with the settings to raise.
        """
        super().check(recipe, terms)
        if not self.settings.k_p and not self.settings.k_i:
            raise ConfigError(
                "objective 'entropic' with k_p 0 and k_i 0 does not control the entropy; raise one of them."
            )

    @property
    def alpha(self) -> float:
        """The controller's weight for the current step, from -1 to 1."""
        return min(1.0, max(-1.0, self.settings.k_p * self.error + self.settings.k_i * self.total))

    def surrogate(self, log_ratio: Tensor, advantage: Tensor, live: Tensor, batch: TokenBatch) -> TermOutput:
        """Loss per position; metrics clipped_share, entropic_alpha and confident_share."""
        usual = super().surrogate(log_ratio, advantage, live, batch)
        confident = batch.mask & (live.detach().exp() > self.settings.confident)
        count = batch.mask.sum()
        gain = (live if self.settings.ratio == "none" else log_ratio.exp()) * advantage.abs()
        loss = have(usual.loss, "loss") - self.alpha * gain * confident
        metrics: dict[str, Any] = {"entropic_alpha": (self.alpha * count, count)}
        return TermOutput(loss, metrics=usual.metrics | metrics | {"confident_share": (confident.sum(), count)})

    def observe(self, report: StepReport) -> None:
        """Update the errors with the step's mean entropy."""
        super().observe(report)
        entropy = measured(self, report, "student_entropy")
        if entropy is None:
            return
        if not (self.settings.unwind and abs(self.alpha) >= 1.0):
            self.total += self.error
        self.error = entropy - self.settings.target

    def state_dict(self) -> dict[str, Any]:
        """The sum of errors and the last error, besides the state of the advantages."""
        return {**super().state_dict(), "error": self.error, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state)
        self.error, self.total = float(state["error"]), float(state["total"])
