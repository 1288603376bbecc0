"""Policy losses on two kinds of rows: those that the student sampled as it is trained, and hinted or given ones.

    mixed_context   sampled rows: the clipped loss;   hinted rows: loss = -r / (r + gamma) A,   never clipped
        denominator hint   r = pi(y_t | x) / mu(y_t | x, hint), 1 for an empty hint          (LTE, Guide)
        denominator one    r = pi(y_t | x)                                          (ICPO, Critique-GRPO)
    rl_plus         sampled rows: loss = -rho A, unclipped
                    given rows:   loss = -r A (1 - sg(pi))^power,   r = 2 pi / (pi_old + (pi_old + 1) / 2)

The gradient of the shaped ratio is gamma r / (r + gamma)^2 grad log pi, so unlikely tokens have a larger gradient than
with r itself. In rl_plus pi_old is the student when the rows were scored, so given rows need no log-probs of the policy
that wrote them; they come from method expert_rows and count in the mean of their group. By default `rows: all` learns
from both kinds. Sources: ICPO, arXiv 2510.26519, Guide, 2506.13923, RL-PLUS, 2508.00222, each with its released code;
LTE, 2510.26109 (text). LTE does not state its gamma; 0.1 is from ICPO's code, while notes on ICPO's paper have 0.01.
Guide's gamma is the 0.9 quantile of the ratios, and at least 1e-4 (`quantile`). Here the quantile is over the hinted
tokens of the step on all ranks, when they were scored; its code takes it over the current micro-batch, padding
included. LTE averages the tokens of hinted rows separately: aggregation balanced, strata context.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from opd.wire.types import PayloadKind, PayloadSpec
from student.data.needs import STUDENT, Needs, SignalNeed, merge
from student.data.token_batch import TokenBatch, have
from student.plugin.terms import TermOutput
from student.plugin.traits import Traits
from student.rl.losses.policy_gradient import ClippedSettings, PolicyGradient, PolicyGradientSettings
from student.rl.losses.settings import PolicyGradientSettings_co, advantage_field

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Bool
    from torch import Tensor

    from student.data.outcome import Outcome
    from student.data.row import Row

_LARGEST = 20.0
"""Bound of the absolute log-ratio, nats, as in ICPO's code."""
_LEAST = 1e-4
"""Least gamma that a quantile can give, as in Guide's code."""


class OfTwoKinds(PolicyGradient[PolicyGradientSettings_co]):
    """Base of losses on two kinds of rows: ratio, clip and importance weights apply to sampled rows only."""

    @property
    def traits(self) -> Traits:
        return replace(super().traits, wants_given_rows=True)

    def compared(self, batch: TokenBatch) -> Bool[Tensor, " n"]:
        """[N] trained positions of sampled rows: others come from another prompt, or from no policy."""
        return batch.mask & batch.of_rows([row.on_policy for row in batch.rows])


class MixedContextSettings(ClippedSettings):
    """Settings of the mixed loss; the clip applies to sampled rows."""

    rows: Literal["all", "sampled", "expert"] = "all"
    gamma: float = Field(
        0.1, gt=0, description="gamma, the ratio at which the gain of a hinted token is half of its maximum."
    )
    quantile: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Set gamma to this quantile of the step's hinted ratios (0.9 in Guide); null uses the "
        "constant gamma.",
    )
    denominator: Literal["hint", "one"] = Field(
        "hint", description="Denominator of the ratio of hinted rows: the probability under the hint, or one."
    )


class MixedContext(OfTwoKinds[MixedContextSettings]):
    """The clipped loss on sampled rows, a shaped ratio on hinted ones (ICPO, Guide, LTE)."""

    evidence: ClassVar[str] = "text and code"

    @property
    def traits(self) -> Traits:
        # Hinted rows need the log-probs under which they were sampled only with denominator `hint`.
        return replace(super().traits, reads=("behaviour",) if self.settings.denominator == "hint" else ())

    def __init__(self, settings: MixedContextSettings) -> None:
        super().__init__(settings)
        self._gamma = settings.gamma

    def needs(self) -> Needs:
        """With a quantile also the student's log-probs when the rows are scored."""
        read = (SignalNeed(STUDENT, PayloadSpec.sampled()),) if self.settings.quantile is not None else ()
        return merge([super().needs(), Needs(signals=read)])

    def assess(self, rows: Sequence[Row], outcomes: Sequence[Outcome], places: Sequence[int]) -> None:
        """Also set gamma from the quantile; in a step without hinted tokens it is the constant."""
        super().assess(rows, outcomes, places)
        if self.settings.quantile is None:
            return
        from student.model.ranks import from_all_ranks

        mine = [np.zeros(0), *(self._ratios(row) for row in rows if self.selects(row) and not row.on_policy)]
        found = np.concatenate(from_all_ranks(np.concatenate(mine)))
        # Sorted first, so that the result does not depend on how rows are spread over ranks.
        level = float(np.quantile(np.sort(found), self.settings.quantile)) if len(found) else self.settings.gamma
        self._gamma = max(_LEAST, level)

    def _ratios(self, row: Row) -> NDArray[np.float64]:
        """Ratios r of the trained tokens of a hinted row, with the log-probs from when it was scored."""
        read = row.log_probs(STUDENT)
        gap = np.asarray(read, np.float64)[row.loss_mask]
        if self.settings.denominator == "hint":
            gap = gap - row.behaviour_logp[row.loss_mask]
        return np.exp(gap.clip(-_LARGEST, _LARGEST))

    def surrogate(self, log_ratio: Tensor, advantage: Tensor, live: Tensor, batch: TokenBatch) -> TermOutput:
        """Loss per position.

        Metrics clipped_share, hinted_tokens (share), shaped_gain (mean r / (r + gamma) over hinted tokens), and gamma
        with a quantile.
        """
        import torch

        other = batch.mask & ~self.compared(batch)
        usual = super().surrogate(log_ratio, advantage, live, batch)
        over = torch.zeros_like(live) if self.settings.denominator == "one" else batch.behaviour_logp.to(live.dtype)
        gap = torch.where(other, live - over, torch.zeros_like(live)).clamp(-_LARGEST, _LARGEST)
        gain = gap.exp() / (gap.exp() + self._gamma)
        zero = torch.zeros_like(live)
        metrics: dict[str, Any] = {
            "hinted_tokens": (other.sum(), batch.mask.sum()),
            "shaped_gain": (torch.where(other, gain.detach(), zero).sum(), other.sum()),
        }
        if self.settings.quantile is not None:
            metrics["gamma"] = (self._gamma * other.sum(), other.sum())
        clipped, count = usual.metrics.get("clipped_share", (zero.sum(), batch.mask.sum()))
        metrics["clipped_share"] = (clipped, count)
        return TermOutput(torch.where(other, -gain * advantage, have(usual.loss, "loss")), metrics=metrics)


class RlPlusSettings(PolicyGradientSettings):
    """Settings of RL-PLUS; its default advantage is the reward minus the group's mean, not scaled."""

    rows: Literal["all", "sampled", "expert"] = "all"
    aggregation: str = "constant"
    power: float = Field(0.5, ge=0, description="gamma: the larger, the less the likely tokens of given answers count.")
    advantage: dict[str, Any] | list[dict[str, Any]] = advantage_field(name="group_mean", scale="none")


class RlPlus(OfTwoKinds[RlPlusSettings]):
    """Learns given answers with a ratio to a mixture, unlikely tokens first (RL-PLUS)."""

    evidence: ClassVar[str] = "text and code"
    bounds: ClassVar[tuple[str, ...]] = ()
    unread: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "dual_clip")

    @property
    def traits(self) -> Traits:
        return replace(super().traits, reads=())  # given rows use the student's old log-probs

    def needs(self) -> Needs:
        """Also the student's log-probs when the rows are scored."""
        return merge([super().needs(), Needs(signals=(SignalNeed(STUDENT, PayloadSpec.sampled()),))])

    def surrogate(self, log_ratio: Tensor, advantage: Tensor, live: Tensor, batch: TokenBatch) -> TermOutput:
        """Loss per position; metrics given_tokens (share) and exploration (mean (1 - pi)^power on them)."""
        import torch

        given = batch.mask & ~self.compared(batch)
        zero = torch.zeros_like(live)
        old = have(batch.signal(PayloadKind.SAMPLED, STUDENT).sampled, "old log-probs").to(live.dtype)
        before = torch.where(given, old, zero).exp()
        now = torch.where(given, live, zero).exp()
        factor = (1.0 - now.detach()).clamp(min=0.0) ** self.settings.power
        gain = 2.0 * now / (before + (before + 1.0) / 2.0) * factor
        usual = log_ratio.exp() if self.settings.ratio != "none" else live
        shown = torch.where(given, factor, zero).sum()
        return TermOutput(
            -torch.where(given, gain, usual) * advantage,
            metrics={"given_tokens": (given.sum(), batch.mask.sum()), "exploration": (shown, given.sum())},
        )
