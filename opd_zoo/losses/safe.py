"""SAFE: the clipped loss with a penalty on the KL to the reference above a moving threshold.

    short   <- 0.9 short + 0.1 KL,         KL the mean sg(rho_t) (log pi - log pi_ref) of a step
    limit    = clip((base + PID(velocity of the reward - 0.001)) * phase, 0.1, 0.6)
    penalty  = 0.1 (short - limit)^2 max(0.5, floor / (H + 0.1))   where short > limit, 0 elsewhere
    loss_t   = clipped loss + d penalty / d short * sg(rho_t) (log pi(y_t) - log pi_ref(y_t))^2 / 2

phase is 1.5 in the first 50 steps, and then depends on the mean reward of the last 50 steps: 1.2 while it rises (by
over 0.01 on the 50 before), 1.0 when it is above 0.7 and steady (deviation below 0.02), 0.8 otherwise. The released
code adds the penalty to the loss as a plain number, which has no gradient and so no effect. Here its slope weighs the
squared log-ratio, whose gradient is that of the sampled KL, and the ratio rho corrects for rows of older weights.
`form: asymmetric` is the authors' other controller: 0.1 max(0, KL - base)^2 plus 5 max(0, m)^2 with m the mean change
of the KL over 50 steps. The soft minimum of two critics is method critic (heads 2, softness 0.3); the step size that
shrinks with a predicted KL is not offered. Source: the released code of arXiv 2602.04651, ryyzn9/SAFE.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from opd.wire.types import PayloadKind, PayloadSpec
from student.data.needs import REFERENCE, Needs, SignalNeed, merge
from student.data.token_batch import TokenBatch, have
from student.plugin.terms import TermOutput, measured
from student.rl.losses.policy_gradient import ClippedSettings, PolicyGradient

if TYPE_CHECKING:
    from torch import Tensor

    from student.data.report import StepReport

_WINDOW, _MOMENTUM = 50, 5.0
_PHASES = {"warm_up": 1.5, "climbing": 1.2, "plateau": 0.8, "converged": 1.0}


class SafeSettings(ClippedSettings):
    """Settings of SAFE."""

    form: Literal["gated", "asymmetric"] = Field("gated", description="Which of the authors' two controllers is used.")
    base: float = Field(0.3, gt=0, description="Initial threshold of the KL, in nats per token.")
    strength: float = Field(0.1, gt=0, description="Factor of the squared excess over the threshold.")
    floor: float = Field(2.0, gt=0, description="Entropy in nats per token below which the penalty grows.")


class Safe(PolicyGradient[SafeSettings]):
    """The clipped loss with a penalty on the KL above a moving threshold (SAFE).

    Its state is the controller's.
    """

    evidence: ClassVar[str] = "text and code"

    def __init__(self, settings: SafeSettings) -> None:
        super().__init__(settings)
        self.short = self.integral = self.error = 0.0
        self.entropy, self.limit = settings.floor, settings.base
        self.smoothed: float | None = None
        self.rewards: list[float] = []
        self.kls: list[float] = []

    def needs(self) -> Needs:
        """Also the reference's log-probs of the response tokens."""
        return merge([super().needs(), Needs(signals=(SignalNeed(REFERENCE, PayloadSpec.sampled()),))])

    @property
    def slope(self) -> float:
        """Derivative of the penalty with respect to the KL."""
        found = 2.0 * self.settings.strength * max(0.0, self.short - self.limit)
        if self.settings.form == "gated":
            return found * max(0.5, self.settings.floor / (self.entropy + 0.1))
        change = (self.kls[-1] - self.kls[0]) / _WINDOW if len(self.kls) == _WINDOW else 0.0
        return found + 2.0 * _MOMENTUM * max(0.0, change) / _WINDOW

    def surrogate(self, log_ratio: Tensor, advantage: Tensor, live: Tensor, batch: TokenBatch) -> TermOutput:
        """Loss per position; metrics clipped_share, safe_kl (nats), safe_slope and safe_limit (nats)."""
        import torch

        usual = super().surrogate(log_ratio, advantage, live, batch)
        known = have(batch.signal(PayloadKind.SAMPLED, REFERENCE).sampled, "reference's log-probs").to(live.dtype)
        gap = torch.where(batch.mask, live - known, torch.zeros_like(live))
        ratio, count = log_ratio.detach().exp(), batch.mask.sum()
        metrics: dict[str, Any] = {
            "safe_kl": ((ratio * gap.detach()).sum(), count),
            "safe_slope": (self.slope * count, count),
            "safe_limit": (self.limit * count, count),
        }
        loss = have(usual.loss, "loss") + self.slope * ratio * gap**2 / 2.0
        return TermOutput(loss, metrics=usual.metrics | metrics)

    def observe(self, report: StepReport) -> None:
        """Move the threshold by the step's KL, entropy and mean reward."""
        super().observe(report)
        kl, entropy = (measured(self, report, key) for key in _READ)
        # Replayed answers were sampled by other weights, so they say nothing about how fast these improve.
        rewards = [o.reward for o in report.outcomes if o.reward is not None and o.origin != "replay"]
        if kl is None or not rewards:
            return
        mean = math.fsum(rewards) / len(rewards)
        self.entropy = self.entropy if entropy is None else entropy
        self.rewards = [*self.rewards, mean][-2 * _WINDOW :]
        if self.settings.form == "asymmetric":
            self.short, self.kls = kl, [*self.kls, kl][-_WINDOW:]
            return
        self.short = 0.9 * self.short + 0.1 * kl
        moved = (self.settings.base + self._pid(mean)) * _PHASES[self.phase]
        self.limit = min(0.6, max(0.1, moved))

    @property
    def phase(self) -> str:
        """The stage of the run by its rewards: warm_up, climbing, converged or plateau."""
        if len(self.rewards) < _WINDOW:
            return "warm_up"
        recent, before = self.rewards[-_WINDOW:], self.rewards[-2 * _WINDOW : -_WINDOW]
        mean = math.fsum(recent) / len(recent)
        old = math.fsum(before) / len(before) if len(before) == _WINDOW else mean
        if mean > old + 0.01:
            return "climbing"
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in recent) / len(recent))
        return "converged" if deviation < 0.02 and mean > 0.7 else "plateau"

    def _pid(self, reward: float) -> float:
        """The controller's addition to the threshold; 0 in the first step, which has no velocity."""
        if self.smoothed is None:
            self.smoothed = reward
            return 0.0
        old, self.smoothed = self.smoothed, 0.95 * self.smoothed + 0.05 * reward
        error = self.smoothed - old - 0.001
        self.integral = min(1.0, max(-1.0, self.integral + error))
        found = 0.3 * error + 0.01 * self.integral + 0.05 * (error - self.error)
        self.error = error
        return found

    def state_dict(self) -> dict[str, Any]:
        """State of the controller, besides that of the advantages."""
        return {**super().state_dict(), "safe": {name: getattr(self, name) for name in _STATE}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state)
        for name, value in state["safe"].items():
            setattr(self, name, value)


_READ = ("safe_kl", "student_entropy")
_STATE = ("short", "integral", "error", "entropy", "limit", "smoothed", "rewards", "kls")
