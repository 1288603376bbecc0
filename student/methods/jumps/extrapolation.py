"""The target T^lambda R^(1 - lambda) with a lambda per position, and guards that bound the extrapolation.

    log target = log T + (lambda - 1) g(log T - log R)

Guards (none is in the paper); each changes the target only where it applies:

    gap_clip      g clips log T - log R to +-c, so that the few tokens that dominate at lambda = 1.5 no longer do.
    flip_cap      Let m be the teacher's mode among the candidates, r a rival, a_T = log T(m)/T(r) and
                  a_R = log R(m)/R(r). If a_R > a_T > 0 the target prefers r to m once lambda > a_R / (a_R - a_T),
                  because the teacher, though it prefers m, has moved towards r. The position's lambda is at most
                  `flip_cap` times the smallest such value, and at least 1.
    plain_tokens  g = 0 for these ids, so that format is copied from the teacher and not extrapolated.

Source of the base form: G-OPD, arXiv 2602.12125; of the danger on format tokens: ListOPD, arXiv 2605.08737.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from opd import maths
from opd.config import Settings
from student.data.token_batch import SignalTokens, TokenBatch, have
from student.methods.distil.token_set import TokenSetSettings, among

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor


class Guards(Settings):
    """Bounds on what lambda may do."""

    gap_clip: float | None = Field(
        None, gt=0, description="Largest |log T - log R| in nats that is extrapolated; null does not clip it."
    )
    flip_cap: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Limit a position's lambda to this share of the value at which the target's most likely token "
        "would no longer be the teacher's; null sets no limit.",
    )
    plain_tokens: TokenSetSettings | None = Field(None, description="Tokens whose lambda stays 1.")

    @property
    def active(self) -> bool:
        """Whether any guard is on."""
        return self.gap_clip is not None or self.flip_cap is not None or self.plain_tokens is not None


def flip_limit(teacher: Float[Tensor, "n k"], reference: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
    """[N] the smallest lambda at which the target's mode among the candidates is not the teacher's; inf if none.

    Args:
        teacher: [N, K] log-probs.
        reference: [N, K] log-probs at the same ids.
    """
    import torch

    mode = teacher.argmax(-1, keepdim=True)
    ours, theirs = teacher.gather(-1, mode) - teacher, reference.gather(-1, mode) - reference
    flips = (ours > 0) & (theirs > ours) & theirs.isfinite()
    limit = torch.where(flips, theirs / (theirs - ours).clamp(min=1e-12), torch.inf)
    return limit.min(-1).values


class Extrapolation:
    """Applies lambda and guards to the signals of a micro-batch.

    Args:
        guards: settings of the guards.
        plain_ids: ids that keep lambda = 1.
        scale: [N] lambda per position.
    """

    def __init__(self, guards: Guards, plain_ids: frozenset[int], scale: Float[Tensor, " n"]) -> None:
        self.guards, self.plain_ids = guards, plain_ids
        self.scale = scale.float()

    def target(
        self, teacher: Float[Tensor, " n *k"], reference: Float[Tensor, " n *k"], ids: Int[Tensor, " n *k"] | None
    ) -> Float[Tensor, " n *k"]:
        """Log-weights of the unnormalised target, nats; -inf where either side is."""
        return maths.adjusted_log_probs(teacher, self.proxy(teacher, reference, ids), 2.0)

    def proxy(
        self, teacher: Float[Tensor, " n *k"], reference: Float[Tensor, " n *k"], ids: Int[Tensor, " n *k"] | None
    ) -> Float[Tensor, " n *k"]:
        """A stand-in for the reference: with lambda = 2 it yields the guarded target at each position's own lambda."""
        import torch

        # log T + (lambda - 1) g = 2 log T - (log T - (lambda - 1) g), which `opd.maths` computes for lambda = 2 and the
        # reference log T - (lambda - 1) g. So its formulas, which take one lambda, work for a lambda per position.
        gap = teacher - reference
        if self.guards.gap_clip is not None:
            gap = gap.clamp(-self.guards.gap_clip, self.guards.gap_clip)
        if self.plain_ids and ids is not None:
            gap = torch.where(among(ids, self.plain_ids), torch.zeros_like(gap), gap)
        excess = (self.scale - 1.0).reshape(-1, *(1,) * (teacher.ndim - 1))
        excluded = teacher.isneginf() | reference.isneginf()
        return torch.where(excluded, -torch.inf, teacher - excess * gap)

    def payload(
        self, batch: TokenBatch, teacher: SignalTokens, reference: SignalTokens
    ) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
        """Target log-probs at the candidates, at the response token and in the tail, and metrics.

        They are normalised as in `opd.maths.adjusted_payload`.

        Args:
            batch: the batch, with candidates.
            teacher: payload gather.
            reference: payload gather at the same ids.
        """
        values = have(teacher.values, "log-probs"), have(reference.values, "reference's log-probs")
        sampled = have(teacher.sampled, "log-probs"), have(reference.sampled, "reference's log-probs")
        tail = have(teacher.log_tail, "log tail"), have(reference.log_tail, "reference's log tail")
        metrics: dict[str, Any] = {}
        if self.guards.flip_cap is not None:
            limit = (self.guards.flip_cap * flip_limit(*values)).clamp(min=1.0)
            metrics["reward_scale_capped"] = ((batch.mask & (limit < self.scale)).sum(), batch.mask.sum())
            self.scale = self.scale.minimum(limit)
        adjusted = maths.adjusted_payload(
            values[0],
            sampled[0],
            tail[0],
            self.proxy(*values, batch.candidates),
            self.proxy(*sampled, batch.token_ids),
            self.proxy(*tail, None),
            2.0,
        )
        parts = adjusted.teacher_log_probs, adjusted.teacher_sampled, adjusted.teacher_log_tail
        return parts, metrics | self.metrics(*sampled, batch.mask)

    def metrics(
        self, teacher: Float[Tensor, " n"], reference: Float[Tensor, " n"], mask: Bool[Tensor, " n"]
    ) -> dict[str, Any]:
        """Metrics: mean lambda, and mean implicit reward log T - log R of the response tokens, nats."""
        import torch

        def mean(values: Tensor) -> tuple[Tensor, Tensor]:
            return torch.where(mask, values, torch.zeros_like(values)).sum(), mask.sum()

        return {"reward_scale": mean(self.scale), "implicit_reward": mean(teacher - reference)}
