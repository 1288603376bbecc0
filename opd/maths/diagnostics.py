"""Figures to watch while distilling, from numbers that the loss has computed anyway. All detached, all per token.

Healthy runs: the top-k overlap climbs, the reverse KL falls at every position, both tails stay small, student entropy
stays above the teacher's (arXiv 2604.13016, 2604.08527). Reduce late: keep sums and counts, divide at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opd.maths.checks import check_mask, check_shape


def topk_overlap(student_ids: Int[Tensor, "*N K"], teacher_ids: Int[Tensor, "*N M"]) -> Float[Tensor, "*N"]:
    """Share of the student's ids that are among the teacher's, in [0, 1].

    Args:
        student_ids: [..., K] distinct within a position.
        teacher_ids: [..., M] distinct within a position.

    Raises:
        ValueError: when the leading axes differ.
    """
    check_shape("teacher_ids", teacher_ids, (*student_ids.shape[:-1], teacher_ids.shape[-1]), "student_ids")
    both = (student_ids.unsqueeze(-1) == teacher_ids.unsqueeze(-2)).any(-1)
    return both.float().mean(-1) if both.shape[-1] else both.float().sum(-1)


def support_figures(
    student_log_probs: Float[Tensor, "*N K"],
    student_log_tail: Float[Tensor, "*N"],
    teacher_log_probs: Float[Tensor, "*N K"],
    teacher_log_tail: Float[Tensor, "*N"],
) -> dict[str, Float[Tensor, "*N"]]:
    """How much of both models a support of K ids covers, and the KL between the K + 1 buckets in both directions.

    Args:
        student_log_probs: [..., K] at the ids, as in `TokenScores.candidates`.
        student_log_tail: [...].
        teacher_log_probs: [..., K] at the same ids.
        teacher_log_tail: [...].

    Returns:
        student_mass, teacher_mass in [0, 1]; student_tail, teacher_tail; bucket_reverse_kl, bucket_forward_kl in nats,
        lower bounds of the full ones.
    """
    from opd.maths.pointwise import Kind, Spec, term_and_slope

    student = torch.cat([student_log_probs, student_log_tail.unsqueeze(-1)], -1).detach()
    teacher = torch.cat([teacher_log_probs, teacher_log_tail.unsqueeze(-1)], -1).detach().to(student.dtype)
    return {
        "student_mass": student[..., :-1].exp().sum(-1),
        "teacher_mass": teacher[..., :-1].exp().sum(-1),
        "student_tail": student[..., -1].exp(),
        "teacher_tail": teacher[..., -1].exp(),
        "bucket_reverse_kl": term_and_slope(Spec(Kind.REVERSE_KL), student, teacher)[0].sum(-1),
        "bucket_forward_kl": term_and_slope(Spec(Kind.FORWARD_KL), student, teacher)[0].sum(-1),
    }


POSITION_EDGES = (0, 16, 64, 256, 1024, 4096, 16384)
"""First positions of the default bins: finer where responses begin, few enough to watch."""


@dataclass(frozen=True, slots=True, eq=False)
class PositionProfile:
    """Sums of a per-token figure by position in the response; add profiles of ranks and steps, then take `mean`.

    Attributes:
        total: [bins].
        count: [bins] tokens.
        edges: first position of each bin; the last bin takes all later ones.
    """

    total: Float[Tensor, " bins"]
    count: Float[Tensor, " bins"]
    edges: tuple[int, ...]

    @property
    def mean(self) -> Float[Tensor, " bins"]:
        """Mean per bin; 0 where a bin is empty."""
        return self.total / self.count.clamp(min=1)

    def __add__(self, other: "PositionProfile") -> "PositionProfile":
        return PositionProfile(self.total + other.total, self.count + other.count, self.edges)


def position_profile(
    per_token: Float[Tensor, " N"],
    position: Int[Tensor, " N"],
    *,
    edges: Sequence[int] = POSITION_EDGES,
    mask: Bool[Tensor, " N"] | None = None,
) -> PositionProfile:
    """Sums of a per-token figure, for example the reverse KL, by the token's position in its response.

    Args:
        per_token: [N].
        position: [N] index in the response, from 0.
        edges: first position of each bin, ascending from 0.
        mask: [N] bool, True where a token counts.

    Raises:
        ValueError: for shapes that differ, or edges that do not ascend from 0.
    """
    if not edges or edges[0] != 0 or any(a >= b for a, b in pairwise(edges)):
        raise ValueError(f"edges must ascend from 0, but are {tuple(edges)!r}.")
    check_shape("position", position, tuple(per_token.shape), "per_token")
    check_mask("mask", mask, tuple(per_token.shape), "per_token")
    index = torch.bucketize(position.long(), torch.tensor(edges, device=position.device), right=True) - 1
    values = per_token.detach().float()
    counted = torch.ones_like(values)
    if mask is not None:
        values, counted = torch.where(mask, values, 0.0), mask.float()
    empty = torch.zeros(len(edges), device=values.device)
    return PositionProfile(empty.scatter_add(0, index, values), empty.scatter_add(0, index, counted), tuple(edges))
