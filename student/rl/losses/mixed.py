"""Policy losses on rows of two kinds: those that the student sampled as it is trained, and those it did not.

    mixed_context   sampled rows: the clipped loss;   hinted rows: loss = -r / (r + gamma) A,   never clipped
        denominator hint   r = pi(y_t | x) / mu(y_t | x, hint), 1 for an empty hint          (LTE, Guide)
        denominator one    r = pi(y_t | x)                                          (ICPO, Critique-GRPO)
    rl_plus         sampled rows: loss = -rho A, unclipped
                    given rows:   loss = -r A (1 - sg(pi))^power,   r = 2 pi / (pi_old + (pi_old + 1) / 2)

The gradient of the shaped ratio is gamma r / (r + gamma)^2 grad log pi: unlikely tokens get more than by r itself. In
rl_plus pi_old is the student when the rows were scored, so given rows need no log-probs of their own; they come from
method expert_rows and count in the mean of their group. Learning from rows of both kinds is `rows: all`, the default
here. Sources: ICPO, arXiv 2510.26519, Guide, 2506.13923, RL-PLUS, 2508.00222, each with its released code; LTE,
2510.26109 (text). LTE's gamma is not stated; 0.1 is ICPO's code's, whose paper is noted with 0.01. Guide's is the 0.9
quantile of the ratios, and at least 1e-4 (`quantile`): here over the hinted tokens of the step on all ranks, when they
were scored; its code has those of the micro-batch in hand, padding among them. LTE counts the tokens of hinted rows by
themselves: aggregation balanced, strata context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from opd.wire.types import PayloadKind, PayloadSpec
from student.controllers import CONTROLLERS
from student.learning.terms import TermOutput, TokenBatch, have
from student.rl.losses.policy_gradient import ClippedSettings, PolicyGradient, PolicyGradientSettings
from student.rl.losses.settings import advantage_field
from student.rollout.strategy import STRATEGIES
from student.scoring.needs import STUDENT, Needs, SignalNeed, merge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Bool
    from torch import Tensor

    from student.data.outcome import Outcome
    from student.data.row import Row
    from student.recipe import Recipe

_LARGEST = 20.0
"""Bound of a log-ratio, nats, as in ICPO's code."""
_LEAST = 1e-4
"""Least gamma by quantile, as in Guide's code."""


class OfTwoKinds(PolicyGradient):
    """The base: the ratio of the settings, its clip and its weights are of the rows that the student sampled."""

    def compared(self, batch: TokenBatch) -> Bool[Tensor, " n"]:
        """Not of other rows, which may have been sampled under another prompt, or by no policy."""
        return batch.mask & batch.of_rows([row.on_policy for row in batch.rows])

    def remarks(self, recipe: Recipe) -> list[str]:
        """Also that nothing gives other rows."""
        giving = STRATEGIES.load(str(recipe.rollout.strategy["name"])).gives_rows
        if giving or any(CONTROLLERS.load(str(entry["name"])).gives_answers for entry in recipe.methods):
            return super().remarks(recipe)
        return [
            *super().remarks(recipe),
            f"term {self.settings.name!r} learns from no hinted or given row, because neither rollout.strategy nor "
            "methods give any, and is the loss of sampled rows alone",
        ]


class MixedContextSettings(ClippedSettings):
    """Settings of the mixed loss; the clip is of sampled rows."""

    rows: Literal["all", "sampled", "expert"] = "all"
    gamma: float = Field(0.1, gt=0, description="Ratio at which a hinted token has half of the largest gain.")
    quantile: float | None = Field(
        None, gt=0, lt=1, description="gamma is this quantile of the step's hinted ratios (Guide: 0.9); null: constant."
    )
    denominator: Literal["hint", "one"] = Field("hint", description="What the ratio of hinted rows is over.")


class MixedContext(OfTwoKinds):
    """The mixed loss; see the module for the formula."""

    settings_type = MixedContextSettings
    settings: MixedContextSettings
    evidence: ClassVar[str] = "text and code"

    @property
    def reads_behaviour(self) -> bool:
        """Of other rows with denominator hint."""
        return self.settings.denominator == "hint"

    def __init__(self, settings: MixedContextSettings) -> None:
        super().__init__(settings)
        self._gamma = settings.gamma

    def needs(self) -> Needs:
        """For a quantile also the student's log-probs when rows are scored."""
        read = (SignalNeed(STUDENT, PayloadSpec.sampled()),) if self.settings.quantile is not None else ()
        return merge([super().needs(), Needs(signals=read)])

    def assess(self, rows: Sequence[Row], outcomes: Sequence[Outcome], places: Sequence[int]) -> None:
        """Also find gamma; a step without hinted tokens has the constant one."""
        super().assess(rows, outcomes, places)
        if self.settings.quantile is None:
            return
        from student.learning.ranks import told

        mine = [np.zeros(0), *(self._ratios(row) for row in rows if self.selects(row) and not row.on_policy)]
        found = np.concatenate(told(np.concatenate(mine)))
        # Sorted before, so that it does not depend on how rows are spread over ranks.
        level = float(np.quantile(np.sort(found), self.settings.quantile)) if len(found) else self.settings.gamma
        self._gamma = max(_LEAST, level)

    def _ratios(self, row: Row) -> NDArray[np.float64]:
        """R of the trained tokens of a hinted row, when it was scored."""
        read = row.log_probs(STUDENT)
        gap = np.asarray(read, np.float64)[row.loss_mask]
        if self.settings.denominator == "hint":
            gap = gap - row.behaviour_logp[row.loss_mask]
        return np.exp(gap.clip(-_LARGEST, _LARGEST))

    def surrogate(self, log_ratio: Tensor, advantage: Tensor, live: Tensor, batch: TokenBatch) -> TermOutput:
        """See the module; metrics clipped_share, hinted_tokens (share) and shaped_gain, its mean over them."""
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
    """Settings of RL-PLUS; its own advantage is the group's mean without a deviation."""

    rows: Literal["all", "sampled", "expert"] = "all"
    aggregation: str = "constant"
    power: float = Field(0.5, ge=0, description="gamma: how much likely tokens of given answers count less.")
    advantage: dict[str, Any] | list[dict[str, Any]] = advantage_field(name="group_mean", scale="none")


class RlPlus(OfTwoKinds):
    """RL-PLUS; see the module for the formula."""

    settings_type = RlPlusSettings
    settings: RlPlusSettings
    evidence: ClassVar[str] = "text and code"
    bounds: ClassVar[tuple[str, ...]] = ()
    unread: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "dual_clip")

    @property
    def reads_behaviour(self) -> bool:
        """Not of given rows."""
        return False

    def needs(self) -> Needs:
        """Also the student's log-probs when rows are scored."""
        return merge([super().needs(), Needs(signals=(SignalNeed(STUDENT, PayloadSpec.sampled()),))])

    def surrogate(self, log_ratio: Tensor, advantage: Tensor, live: Tensor, batch: TokenBatch) -> TermOutput:
        """See the module; metrics given_tokens (share) and exploration, the mean factor on them."""
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
