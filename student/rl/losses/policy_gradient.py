"""A policy gradient on the credit of each token: the base class of every policy loss, and a loss in its own right.

    outcomes of all ranks -> advantage chain -> credit per row or token -> surrogate(log rho, A, log pi) -> loss

    loss_t = -min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t),   rho = pi / mu at the grain `ratio`:
      token, turn, sequence (the geometric mean of the response: GSPO, arXiv 2507.18071), or prefix (the product so far)
    none       loss_t = -A_t log pi(y_t)                                                            (REINFORCE)

With `dual_clip` c the loss of a token with A < 0 is at most c |A| (arXiv 1912.09729). mu is the policy that sampled
(`ratio_to: behaviour`), or the student when the rows were scored (`old`); the two differ where an engine samples with
other numerics or older weights. On policy, with one update per batch of rows, rho is 1, nothing is clipped, and all
grains have the gradient A grad log pi; train.minibatches or train.epochs make more updates.

Rows whose reward is unknown are in no statistics and no loss. `aggregation` says how tokens are averaged: sequence_mean
as in GRPO's paper, token_mean as in DAPO, constant as in Dr. GRPO. For a KL penalty add term reference_kl.

To write another loss, name a function in `loss`, or subclass and override `surrogate`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from opd.errors import ConfigError, PluginError, short
from opd.registry import function_at
from opd.wire.types import PayloadKind, PayloadSpec
from student.data.needs import SCORES, STUDENT, Needs, SignalNeed, merge
from student.data.token_batch import TokenBatch, have
from student.plugin.terms import TermOutput
from student.plugin.traits import Traits
from student.rl.losses.credit import CreditTerm
from student.rl.losses.ratios import at_grain
from student.rl.losses.settings import ClippedSettings, PolicyGradientSettings, PolicyGradientSettings_co

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Bool, Float
    from torch import Tensor

    from student.plugin.terms import Term
    from student.settings.recipe import Recipe


__all__ = ["ClippedSettings", "PolicyGradient", "PolicyGradientSettings"]


class PolicyGradient(CreditTerm[PolicyGradientSettings_co]):
    """A policy gradient with any advantage, importance ratio and clip."""

    evidence: ClassVar[str] = "text and code"
    bounds: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "dual_clip")
    """Settings that bound the ratio, and so have no effect while it is 1."""
    unread: ClassVar[tuple[str, ...]] = ()
    """Settings of the policy gradient that this loss does not read, and refuses where they are set."""
    of_ratio: ClassVar[bool] = False
    """Whether all of the gradient flows through the ratio, so that with ratio none there is no gradient."""

    def __init__(self, settings: PolicyGradientSettings_co) -> None:
        super().__init__(settings)
        path = settings.loss
        self._loss = None if path is None else function_at(path, "log_ratio", "advantage", "logp", "mask")

    @property
    def traits(self) -> Traits:
        s, why = self.settings, ""
        if s.ratio == "none":
            why = "with ratio none it has no importance weight; set ratio: token"
        elif s.ratio_to == "old":
            why = (
                "with ratio_to old its ratio is to the student when the rows were scored, not to the policy that "
                "sampled; set ratio_to: behaviour"
            )
        divides = s.ratio != "none" and s.ratio_to == "behaviour"
        weighs = s.importance_cap is not None or s.importance_band is not None
        return replace(
            super().traits,
            learns_from_stale_rows=not why,
            reads=("behaviour",) if divides or weighs else (),
            why={"learns_from_stale_rows": why},
            # The fall of the entropy is the first sign of a collapse.
            shown={"reward": "reward", "student_entropy": "entropy"},
        )

    def surrogate(
        self,
        log_ratio: Float[Tensor, " n"],
        advantage: Float[Tensor, " n"],
        live: Float[Tensor, " n"],
        batch: TokenBatch,
    ) -> TermOutput:
        """The loss per position; subclasses override this one method.

        Args:
            log_ratio: [N] log rho at the grain of the setting `ratio`, nats, with gradient; 0 outside of `compared`,
                and with ratio none.
            advantage: [N] credit, without gradient.
            live: [N] log pi of the response tokens, nats, with gradient.
            batch: the micro-batch: rows, mask, weights and signals.

        Returns:
            [N] loss per position, and metrics that show whether the mechanism acted: here clipped_share.
        """
        import torch

        if self.settings.ratio == "none":
            return TermOutput(-advantage * live)
        ratio = log_ratio.exp()
        clipped, dual = self.settings.bounded(ratio), self.settings.dual_clip
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        # Counts tokens where the clip decides. A ratio out of range that has moved against its advantage does not
        # count: the minimum leaves it unclipped.
        bites = batch.mask & (clipped * advantage < ratio * advantage)
        if dual is not None:
            bounded = torch.maximum(gain, dual * advantage)
            bites = bites | (batch.mask & (advantage < 0) & (bounded > gain))
            # For A > 0 the clip already bounds the gain from above; for A < 0 nothing else bounds the loss.
            gain = torch.where(advantage < 0, bounded, gain)
        return TermOutput(-gain, metrics={"clipped_share": (bites.sum(), batch.mask.sum())})

    def _of_function(self, log_ratio: Tensor, advantage: Tensor, live: Tensor, mask: Tensor) -> TermOutput | None:
        """The loss of the function that the setting `loss` names; None if it names none."""
        if self._loss is None:
            return None
        loss = self._loss(log_ratio, advantage, live, mask)
        if getattr(loss, "shape", None) != mask.shape:
            raise PluginError(
                f"loss {self.settings.loss!r} returned {short(loss)} for {len(mask)} positions; it must return a "
                "tensor with one number per position."
            )
        return TermOutput(loss)

    def needs(self) -> Needs:
        """Rewards, the student's log-probs of the response tokens, and the needs of the advantages."""
        old = (SignalNeed(STUDENT, PayloadSpec.sampled()),) if self.settings.ratio_to == "old" else ()
        return merge([Needs(signals=old, reward="any", student=frozenset({SCORES})), self.chain.needs()])

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """Loss per position.

        Metrics advantage_magnitude, known_share (rows with credit), ratio, student_entropy (nats), and the surrogate's.
        """
        import torch

        scores = have(batch.student.scores, "scores")
        live = scores.sampled
        found = [self.credit(row) for row in batch.rows]
        # `selects` masks rows without credit; the 0 only keeps credit aligned with positions.
        credit = [0.0 if value is None else value for value in found]
        chosen = float(sum(value is not None for value in found))
        advantage = self.chain.shape(batch.of_tokens(credit).to(live.dtype), batch)
        log_ratio = self._log_ratio(batch, live)
        output = self._of_function(log_ratio, advantage, live, batch.mask) or self.surrogate(
            log_ratio, advantage, live, batch
        )
        if not isinstance(output, TermOutput):
            raise PluginError(
                f"{type(self).__name__} returned a {type(output).__name__}; surrogate must return a TermOutput."
            )
        zero, count = torch.zeros_like(live.detach()), batch.mask.sum()
        metrics: dict[str, Any] = {
            "advantage_magnitude": (sum(float(np.abs(value).mean()) for value in credit), chosen),
            "known_share": (chosen, float(len(batch.rows))),
            "student_entropy": (torch.where(batch.mask, scores.entropy.detach(), zero).sum(), count),
        }
        if self.settings.ratio != "none":
            compared = self.compared(batch)
            metrics["ratio"] = (torch.where(compared, log_ratio.detach().exp(), zero).sum(), compared.sum())
        output = self._corrected(output, batch)
        return TermOutput(output.loss, output.total, metrics | self.chain.metrics() | output.metrics)

    def _log_ratio(self, batch: TokenBatch, live: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """[N] log rho at the grain `ratio`, nats, with gradient; 0 outside of `compared`."""
        import torch

        if self.settings.ratio == "none":
            return torch.zeros_like(live)
        # Masked before the grain is applied: tokens of the environment have no behaviour log-prob (NaN), and one NaN
        # would spoil the product or mean over its whole row.
        gap = live - self.denominator(batch).to(live.dtype)
        tokens = torch.where(self.compared(batch), gap, torch.zeros_like(live))
        return at_grain(tokens, batch, self.settings.ratio)

    def compared(self, batch: TokenBatch) -> Bool[Tensor, " n"]:
        """[N] trained positions to which the ratio of the settings applies; a subclass may exclude some rows."""
        return batch.mask

    def denominator(self, batch: TokenBatch) -> Float[Tensor, " n"]:
        """[N] log mu of the response tokens, nats, by `ratio_to`; undefined where masked."""
        if self.settings.ratio_to == "behaviour":
            return batch.behaviour_logp
        return have(batch.signal(PayloadKind.SAMPLED, STUDENT).sampled, "old log-probs")

    def _corrected(self, output: TermOutput, batch: TokenBatch) -> TermOutput:
        """Weight each token by old / behaviour, which turns an expectation under mu into one under the old student.

        Bias: with `importance_cap` tokens above the cap count less than they should; with `importance_band` tokens
        outside the band do not count at all. The weight has no gradient.
        """
        cap, band = self.settings.importance_cap, self.settings.importance_band
        if cap is None and band is None:
            return output
        from opd.maths.head_tail import importance_weight, truncation

        compared = self.compared(batch)
        weight = importance_weight(self.denominator(batch), batch.behaviour_logp, cap, compared)
        found = {} if cap is None else truncation(weight, cap)
        if band is not None:
            kept = (weight >= 1.0 / band) & (weight <= band)
            weight = weight * kept
            found["importance_dropped"] = (~kept).to(weight.dtype)
        loss = have(output.loss, "loss per position") * weight
        found = {"importance_weight": weight} | found
        shown = {name: ((value * compared).sum(), compared.sum()) for name, value in found.items()}
        return TermOutput(loss, None, output.metrics | shown)

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse settings that have no effect.

        Raises:
            ConfigError: with the setting to change.
        """
        self._check_settings()
        if self.settings.skip_degenerate and self.chain.traits.learns_from_equal:
            raise ConfigError(
                f"term {self.settings.name!r} has skip_degenerate, which drops the groups that advantage "
                f"{self.chain.first.settings.name!r} is meant to learn from; remove one of the two."
            )
        self.chain.check(recipe, terms)

    def _check_settings(self) -> None:
        """Refuse settings that have no effect, and settings that cancel each other.

        Raises:
            ConfigError: with the setting to change.
        """
        # A formula of its own leaves no place for a function, and a function none for the bounds of the formula.
        own_formula = type(self).surrogate is not PolicyGradient.surrogate
        unread = [*self.unread, "loss"] if own_formula else [*self.unread]
        unread += [name for name in self.bounds if self.settings.loss and name in self.settings.model_fields_set]
        passed = [name for name in unread if getattr(self.settings, name, None) not in (None, False)]
        if passed:
            bounds = "" if self.settings.loss else " and ".join(self.bounds)
            own = f"; it is bounded by {bounds}" if bounds else ""
            raise ConfigError(
                f"term {self.settings.name!r} has {' and '.join(passed)}, which its loss does not use{own}; remove "
                f"{' and '.join(passed)}, or use another loss."
            )
        if self.of_ratio and self.settings.ratio == "none":
            raise ConfigError(
                f"the gradient of term {self.settings.name!r} comes from the ratio, so with ratio none it would learn "
                "nothing; remove ratio: none, or use objective policy_gradient."
            )
        weights = {name: getattr(self.settings, name) for name in ("importance_cap", "importance_band")}
        given = {name: value for name, value in weights.items() if value is not None}
        for name, value in given.items():
            if self.settings.ratio_to != "old":
                raise ConfigError(
                    f"term {self.settings.name!r} has {name} {value:g}, but its ratio is to the behaviour policy, "
                    f"which already makes that correction; set ratio_to: old, or {name}: null."
                )
        if len(given) > 1:
            raise ConfigError(
                f"term {self.settings.name!r} has importance_cap and importance_band, which make the same correction "
                "in two ways; set one of them to null."
            )
